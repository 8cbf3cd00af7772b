"""The works that are timed: their inputs, what they have to equal, and what bounds their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from steadykv import ops
from steadykv.cache import KVCache
from steadykv.codecs import Payload, QueryMoment, encode
from steadykv.config import CacheConfig, CodecConfig
from steadykv.errors import SteadyKVError
from steadykv.ops.attention import BUDGETS

from .rivals import Release, best_attention, host_copy
from .timing import Rates, measure

__all__ = ["WORKS", "Bench", "Size", "Task"]

SETS = 3  # input sets that take turns, so that no cache holds what the last call used
TYPES = 64  # kinds of image patches that the tokens are made of

ENCODE_SLACK = 1.02  # of the reference's error: another order of summation ends elsewhere


@dataclass(frozen=True)
class Size:
    """KV heads, tokens of a span, queries of a pass (and tokens of the open chunk), head dim."""

    heads: int
    tokens: int
    queries: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.tokens}x{self.head_dim} q{self.queries}"


@dataclass
class Task:
    """One work with one method.

    calls: the work on each input set. nbytes, flops: what it has to move and compute at least.
    error, bound: of the result against the reference, and the most it may be; None if nothing is
    compared. baseline: name and milliseconds of what else does the work.
    """

    method: str
    calls: Sequence[Callable[[], object]]
    nbytes: float
    flops: float
    backend: str
    error: float | None = None
    bound: float | None = None
    baseline: tuple[str, float] | None = None

    def check(self, work: str) -> None:
        """Raise SteadyKVError if the result is wrong: a wrong kernel has no time."""
        if self.error is None or self.bound is None:
            return
        if not self.error <= self.bound:
            raise SteadyKVError(
                f"{work} {self.method}: error {self.error:.3g}, expected at most "
                f"{self.bound:.3g}; nothing is timed that differs from the reference: compare "
                "with STEADYKV_BACKEND=reference"
            )


@dataclass
class Bench:
    """Device, size and rates of one run, and the inputs that its works share."""

    device: torch.device
    size: Size
    rates: Rates
    seconds: float
    release: Release | None = field(init=False)

    def __post_init__(self) -> None:
        self.release = Release.find(self.device)

    def tokens(self, seed: int, count: int | None = None) -> Tensor:
        """BF16 [1, H, S, D] like a video's: few kinds of patches, a slow drift, some noise."""
        size, rng = self.size, torch.Generator(self.device).manual_seed(seed)
        count = size.tokens if count is None else count

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=self.device)

        kinds = 2 * normal(size.heads, TYPES, size.head_dim)
        which = torch.randint(0, TYPES, (count,), generator=rng, device=self.device)
        found = torch.empty(
            1, size.heads, count, size.head_dim, dtype=torch.bfloat16, device=self.device
        )
        drift = torch.linspace(0, 1, count, device=self.device)[:, None] * normal(size.head_dim)
        for head in range(size.heads):  # in FP32 one head at a time
            found[0, head] = kinds[head, which] + drift + normal(count, size.head_dim)
        return found

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each input set."""
        return [(self.tokens(2 * number), self.tokens(2 * number + 1)) for number in range(SETS)]

    @cached_property
    def queries(self) -> Tensor:
        """BF16 [1, H, Q, D]."""
        return self.tokens(1000, self.size.queries)

    @cached_property
    def moment(self) -> QueryMoment:
        """Statistics of the queries."""
        moment = QueryMoment.empty(1, self.size.heads, self.size.head_dim, self.device)
        moment.update(self.queries)
        return moment

    def encode(self, x: Tensor, codec: CodecConfig) -> Payload:
        """The first heads packed; with query statistics where the codec uses them."""
        stats = None
        if codec.needs_queries:
            moment, count = (t[:, : x.shape[1]] for t in (self.moment.moment, self.moment.count))
            stats = QueryMoment(moment, count, True)
        return encode(x, codec, stats=stats)

    def payloads(self, config: CacheConfig) -> list[tuple[Payload, Payload]]:
        """Every input set packed."""
        return [(self.encode(k, config.keys), self.encode(v, config.values)) for k, v in self.pairs]

    def backend(self, op: str) -> str:
        """What the op runs on."""
        return next(row["backend"] for row in ops.explain(self.device) if row["op"] == op)

    @property
    def dense_nbytes(self) -> int:
        """BF16 bytes of keys and values of one set."""
        return sum(t.nbytes for t in self.pairs[0])

    def clustering_flops(self, codec: CodecConfig, passes: int) -> float:
        """Of so many assignments of one tensor."""
        size = self.size
        clusters = min(codec.centroids, size.tokens)
        return 2.0 * passes * size.heads * size.tokens * clusters * size.head_dim


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def encode_works(state: Bench, configs: Sequence[CacheConfig]) -> Iterator[Task]:
    """Keys and values of a span, packed."""
    for config in configs:
        calls = [_encoding(state, config, k, v) for k, v in state.pairs]
        k = state.pairs[0][0]
        few = min(2, state.size.heads)
        payload = state.encode(k, config.keys)
        got = relative_error(payload.decode()[:, :few], k[:, :few])
        with ops.use_backend("reference"):
            wanted = state.encode(k[:, :few], config.keys).decode()
        least = relative_error(wanted, k[:, :few])
        passes = config.keys.stages * (config.keys.iterations + 1)
        baseline = None
        if config.name == "qvg" and state.release is not None:
            baseline = ("quant-videogen", _release_encode(state, config.keys))
        yield Task(
            config.name,
            calls,
            state.dense_nbytes
            + payload.nbytes
            + state.encode(state.pairs[0][1], config.values).nbytes,
            2 * state.clustering_flops(config.keys, passes),
            state.backend("kmeans"),
            got,
            ENCODE_SLACK * least,
            baseline,
        )


def kmeans_works(state: Bench, configs: Sequence[CacheConfig]) -> Iterator[Task]:
    """One iteration of k-means on the keys: an assignment and new means."""
    codec = configs[0].keys
    # BF16 where kernels run, as codecs give it to them.
    heads = [ops.head_rows(k, 0, state.size.heads, wide=False)[0] for k, _ in state.pairs]
    starts = [x[:, : codec.centroids].float() for x in heads]

    def means(x: Tensor, start: Tensor, backend: str | None = None) -> Tensor:
        x = x.float() if backend else x
        return ops.kmeans(x, start, 1, with_ids=False, rounded=False, backend=backend)[1]

    calls = [
        lambda x=x, start=start: means(x, start) for x, start in zip(heads, starts, strict=True)
    ]
    error = relative_error(means(heads[0], starts[0]), means(heads[0], starts[0], "reference"))
    yield Task(
        "all",
        calls,
        state.pairs[0][0].nbytes,
        state.clustering_flops(codec, 1),
        state.backend("kmeans"),
        error,
        0.01,
        None,
    )


def decode_works(state: Bench, configs: Sequence[CacheConfig]) -> Iterator[Task]:
    """A packed span into dense BF16 that is there already."""
    out = [torch.empty_like(t) for t in state.pairs[0]]
    for config in configs:
        packed = state.payloads(config)
        calls = [_decoding(pair, out) for pair in packed]
        calls[0]()
        last = min(256, state.size.tokens)
        with ops.use_backend("reference"):
            want = [p.decode(torch.float32, start=0, end=last) for p in packed[0]]
        error = max(relative_error(o[:, :, :last], w) for o, w in zip(out, want, strict=True))
        baseline = None
        if config.name == "qvg" and state.release is not None:
            baseline = ("quant-videogen", _release_decode(state, config.keys))
        yield Task(
            config.name,
            calls,
            state.dense_nbytes + sum(p.nbytes for p in packed[0]),
            0.0,
            state.backend("decode"),
            error,
            2**-8,
            baseline,
        )


def attend_works(state: Bench, configs: Sequence[CacheConfig]) -> Iterator[Task]:
    """Queries of a pass over a packed span and an open chunk, in both modes of memory."""
    size, q = state.size, state.queries
    tokens = size.tokens + size.queries
    flops = 4.0 * size.heads * size.queries * tokens * size.head_dim
    chunk = state.tokens(2000, size.queries), state.tokens(2001, size.queries)
    k, v = (torch.cat(pair, 2) for pair in zip(state.pairs[0], chunk, strict=True))
    name, timing, dense = best_attention(q, k, v, state.seconds)
    yield Task("bf16", [dense], 2 * q.nbytes + k.nbytes + v.nbytes, flops, f"SDPA {name}")
    if state.device.type == "cuda":
        bring = host_copy(k, v)

        def from_host() -> object:
            bring()
            return dense()

        yield Task("bf16 in host memory", [from_host], 2 * q.nbytes, flops, f"SDPA {name}")
    del k, v
    for config in configs:
        cache = KVCache(
            1,
            size.heads,
            size.head_dim,
            max(1, size.queries // 3),
            config,
            layout="BHSD",
            device=state.device,
        )
        cache[0].write(*state.pairs[0], 0)
        cache[0].observe_queries(q)
        cache[0].write(*chunk, size.tokens)
        nbytes = 2 * q.nbytes + cache.nbytes
        for memory in BUDGETS:
            error = _attention_error(cache, q, memory)
            yield Task(
                config.name if memory == "default" else f"{config.name} {memory}",
                [_attending(cache, q, memory)],
                nbytes,
                flops,
                state.backend("attention"),
                error,
                4 * 2**-8,
                (f"SDPA {name}", timing.median),
            )


def _attention_error(cache: KVCache, q: Tensor, memory: str) -> float:
    """Largest error of a few queries over the largest value, against FP32 on what is read."""
    got = cache[0].attend(q, memory=memory)[:, :, :64]
    k, v = cache[0].read()
    worst, scale = 0.0, q.shape[-1] ** -0.5
    for head in {0, q.shape[1] - 1}:
        logits = q[:, head, :64].double() @ k[:, head].double().transpose(1, 2) * scale
        want = logits.softmax(-1) @ v[:, head].double()
        worst = max(worst, float((got[:, head].double() - want).abs().max()))
    return worst / float(v.abs().max())


def _attending(cache: KVCache, q: Tensor, memory: str) -> Callable[[], object]:
    return lambda: cache[0].attend(q, memory=memory)


def _encoding(state: Bench, config: CacheConfig, k: Tensor, v: Tensor) -> Callable[[], object]:
    return lambda: (state.encode(k, config.keys), state.encode(v, config.values))


def _decoding(pair: Sequence[Payload], out: Sequence[Tensor]) -> Callable[[], object]:
    return lambda: [p.decode(out=o) for p, o in zip(pair, out, strict=True)]


def _release_encode(state: Bench, codec: CodecConfig) -> float:
    release = state.release
    assert release is not None

    def call_of(pair: tuple[Tensor, Tensor]) -> Callable[[], object]:
        options = (codec.iterations, codec.centroids, codec.group_size)
        return lambda: [release.encode(t, *options) for t in pair]

    return measure([call_of(pair) for pair in state.pairs], state.device, state.seconds).median


def _release_decode(state: Bench, codec: CodecConfig) -> float:
    release = state.release
    assert release is not None
    options = (codec.iterations, codec.centroids, codec.group_size)
    packed: list[list[Any]] = [[release.encode(t, *options) for t in pair] for pair in state.pairs]

    def call_of(pair: list[Any]) -> Callable[[], object]:
        return lambda: [release.decode(encoded, codec.group_size) for encoded in pair]

    return measure([call_of(pair) for pair in packed], state.device, state.seconds).median


WORKS: dict[str, Callable[[Bench, Sequence[CacheConfig]], Iterator[Task]]] = {
    "encode": encode_works,
    "kmeans": kmeans_works,
    "decode": decode_works,
    "attend": attend_works,
}
"""Work -> its tasks."""
