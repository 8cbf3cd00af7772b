"""What the benchmarks of one packed layer share: its tokens, its payloads, and calls by turns."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from steadykv.codecs import Payload, QueryMoment, codec_for, encode
from steadykv.codecs.encoder import in_kernels
from steadykv.config import CacheConfig

MEANS = 256

Row = dict[str, Any]
Call = Callable[[], object]
Turn = TypeVar("Turn")
Result = TypeVar("Result")


def sample(heads: int, tokens: int, width: int, rng: torch.Generator) -> Tensor:
    """BF16 [1, H, S, D]: one of 256 means a token, and noise of 0.4."""
    named: Any = {"device": rng.device, "generator": rng}
    means = torch.randn(heads, MEANS, width, **named)
    chosen = torch.randint(0, MEANS, (heads, tokens, 1), **named)
    noise = torch.randn(heads, tokens, width, **named)
    return (means.gather(1, chosen.expand(-1, -1, width)) + 0.4 * noise).bfloat16()[None]


def sample_moment(
    batch: int, heads: int, queries: int, width: int, rng: torch.Generator
) -> QueryMoment:
    """Statistics of random queries."""
    moment = QueryMoment.empty(batch, heads, width, device=rng.device)
    drawn = torch.randn(batch, heads, queries, width, device=rng.device, generator=rng)
    moment.update(drawn.bfloat16())
    return moment


class Pair(NamedTuple):
    """Payloads of the same span."""

    keys: Payload
    values: Payload

    @classmethod
    def packed(cls, config: CacheConfig, k: Tensor, v: Tensor, moment: QueryMoment) -> Pair:
        """Of BF16 [B, H, S, D]."""
        stats = moment if config.keys.needs_queries else None
        return cls(encode(k, config.keys, stats=stats), encode(v, config.values))

    def unrefined(self) -> Pair:
        """As the cache keeps it when it is no longer new."""
        return Pair(self.keys.unrefined(), self.values.unrefined())

    def decode(self, out: Tensor) -> None:
        """Into [2, B, S, H, D]."""
        for payload, dense in zip(self, out, strict=True):
            payload.decode(out=dense.transpose(1, 2))

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for payload in self)

    @property
    def bits_per_element(self) -> float:
        return sum(payload.bits_per_element for payload in self) / 2


def has_kernels(config: CacheConfig, device: torch.device) -> bool:
    """Whether both codecs encode in kernels there."""
    return all(in_kernels(codec_for(codec), device) for codec in (config.keys, config.values))


def seconds_of(call: Call, count: int, device: torch.device) -> float:
    """Of one call, the mean of `count` of them."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3 / count


def captured(call: Call) -> Call:
    """The call as a CUDA graph to replay; it has run before, and so has compiled."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def captured_name(work: str) -> str:
    """Of the same work as a CUDA graph."""
    return f"{work}, captured"


def in_turns(
    turns: Mapping[Turn, dict[str, Call]],
    rounds: int,
    count: int,
    device: torch.device,
    capture: Sequence[str] = (),
) -> dict[tuple[Turn, str], list[float]]:
    """Seconds of one call by turn and work, a sample a round, each the mean of `count` calls.

    capture: works that join the turns that have them as CUDA graphs too, on a GPU.
    """
    times: dict[tuple[Turn, str], list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for turn, calls in turns.items():
            for work, call in calls.items():
                seconds = seconds_of(call, count, device)
                if number:  # the first round loads and compiles
                    times[turn, work].append(seconds)
            if not number and device.type == "cuda":
                names = {work: captured_name(work) for work in capture if work in calls}
                calls.update(
                    (name, captured(calls[work]))
                    for work, name in names.items()
                    if name not in calls
                )
    return times


def attempt(call: Callable[[], Result], device: torch.device) -> Result | None:
    """What the call returns; None, with its memory given back, where that does not suffice."""
    try:
        return call()
    except torch.cuda.OutOfMemoryError:
        pass  # its traceback holds tensors until the block ends
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None
