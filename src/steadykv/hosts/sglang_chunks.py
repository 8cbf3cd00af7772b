"""The chunks that SGLang writes: where one may begin, and which heads a call carries of it."""

from __future__ import annotations

from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.errors import HostError, ShapeError

__all__ = ["all_heads", "check_chunk", "given_heads"]


def check_chunk(layer: LayerCache, start: int, tokens: int, name: str) -> None:
    """HostError unless so many tokens from `start` on are the newest chunk again, or the next."""
    chunk, end = layer.progress.open, layer.progress.newest
    if chunk is not None and start == chunk[0] and tokens != end - start:
        raise HostError(
            f"{name}: chunk at token {start} written again with {tokens} tokens: expected "
            f"{end - start}; only the next chunk may have another length"
        )
    if start != end and (chunk is None or start != chunk[0]):
        raise HostError(
            f"{name}: write at token {start}: expected {end}"
            + (f" or {chunk[0]}" if chunk is not None else "")
            + "; a packed cache is written in order, reset_indices() starts over"
        )


def given_heads(
    layer: LayerCache, key: Tensor, start: int | None, name: str
) -> tuple[int, int] | None:
    """First head and number of heads of key [B, S, H, D], where it carries a part of the layer's.

    Raises ShapeError where they are none of the layer's.
    """
    count, heads = key.shape[2], layer.geometry.heads
    if count == heads:
        return None
    if start is None or start < 0 or start + count > heads:
        raise ShapeError(
            f"{name}: {count} heads of {heads} from head {start}: expected cache_head_start "
            "within the cache's heads"
        )
    return start, count


def all_heads(
    layer: LayerCache, key: Tensor, value: Tensor, start: int, first: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of the chunk at `start` in all heads of the layer, in fresh memory.

    key, value [B, S, H, D] of the heads from `first` on lie over what is there, or over zeros.
    """
    chunk = layer.progress.open
    whole = []
    for name, new in (("key", key), ("value", value)):
        if chunk is not None and chunk[0] == start:
            old = layer.read_tensor(name, [chunk])
        else:
            shape = (*new.shape[:2], layer.geometry.heads, new.shape[3])
            old = new.new_zeros(shape, dtype=layer.geometry.dtype)
        old.narrow(2, first, new.shape[2]).copy_(new)
        whole.append(old)
    return whole[0], whole[1]
