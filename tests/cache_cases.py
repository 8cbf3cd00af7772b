"""What the cache tests share: inputs, a driver, a brute-force oracle and an allocation tracker."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steadykv.cache import KVCache
from steadykv.config import METHODS, CacheConfig, CachePolicy, CodecConfig

HEADS, DIM, FRAME = 2, 32, 8


def small(method: str = "bf16", **policy: Any) -> CacheConfig:
    """A configuration for spans of some 24 tokens: "quantwm:qvg4" names keys and values."""
    names = method.split(":")
    keys, values = names[0], names[-1]
    return CacheConfig(
        small_codec(keys, "tokens"),
        small_codec(values, "channels"),
        CachePolicy(**policy),
        method,
    )


def small_codec(method: str, axis: str = "channels", **changes: Any) -> CodecConfig:
    """The method's own fields, scaled down."""
    fields = {"group_size": 16, "axis": axis, "centroids": 4, "rank": 4, "candidates": 2}
    own = {name: value for name, value in fields.items() if name in METHODS[method]}
    return CodecConfig(**{"method": method, **own, **changes})


def cache_for(config: CacheConfig, layers: int = 1, **options: Any) -> KVCache:
    return KVCache(layers, HEADS, DIM, FRAME, config, **options)


@dataclass(frozen=True)
class Chunk:
    """One chunk as a host makes it: a few passes, the last of them clean; tensors are BSHD."""

    start: int
    passes: tuple[tuple[Tensor, Tensor, Tensor], ...]

    @property
    def end(self) -> int:
        return self.start + self.passes[-1][0].shape[1]

    def row(self, row: int) -> Chunk:
        """One row of the batch."""
        passes = [(k[row, None], v[row, None], q[row, None]) for k, v, q in self.passes]
        return Chunk(self.start, tuple(passes))


def chunks_of(
    lengths: Sequence[int],
    passes: int = 2,
    batch: int = 1,
    query_heads: int = HEADS,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Chunk]:
    """Random chunks with outlying channels, so that codecs have something to do."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(DIM, generator=generator).exp()
    chunks, start = [], 0
    for length in lengths:
        made = []
        for _ in range(passes):
            k, v = (
                torch.randn(batch, length, HEADS, DIM, generator=generator) * scale
                for _ in range(2)
            )
            q = torch.randn(batch, length, query_heads, DIM, generator=generator) * scale
            made.append((k.to(dtype), v.to(dtype), q.to(dtype)))
        chunks.append(Chunk(start, tuple(made)))
        start += length
    return chunks


def in_layout(x: Tensor, layout: str) -> Tensor:
    return x if layout == "BSHD" else x.transpose(1, 2).contiguous()


def drive(cache: Any, chunks: Sequence[Chunk], layout: str = "BSHD") -> list[tuple[Tensor, Tensor]]:
    """Run chunks through every layer, with a commit after each; returns every read as BSHD."""
    reads = []
    for chunk in chunks:
        for k, v, q in chunk.passes:
            for index in range(len(cache)):
                cache[index].write(in_layout(k, layout), in_layout(v, layout), chunk.start)
                cache[index].observe_queries(in_layout(q, layout))
                reads.append(tuple(in_layout(x, layout) for x in cache[index].read()))
        cache.commit()
    return reads


@dataclass
class Allocations(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of every storage that operators create inside, until it dies; and their peak."""

    now: int = 0
    peak: int = 0
    live: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            address = storage._cdata
            if address in known or address in self.live:
                continue
            self.live[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, address)
        return result

    def _release(self, address: int) -> None:
        self.now -= self.live.pop(address)


class NoHostSync(TorchDispatchMode):  # type: ignore[misc]
    """Fails on operators that make the host wait for a value or a size."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.FORBIDDEN) or name == "count_nonzero", f"{name} syncs"
        return func(*args, **(kwargs or {}))
