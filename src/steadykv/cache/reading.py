"""Reads tokens of one layer into dense memory: what is attended, or ranges that a host names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from steadykv.cache.checks import check_pair
from steadykv.cache.policy import TokenRange
from steadykv.cache.workspace import decode_workspace_nbytes
from steadykv.errors import ConfigError, PositionError
from steadykv.ops.precision import full_precision

if TYPE_CHECKING:
    from steadykv.cache.layer import LayerCache

__all__ = ["read", "read_tensor"]


def read(layer: LayerCache, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """See `LayerCache.read`."""
    ranges = layer.spans()
    geometry, batch, tokens = layer.geometry, layer.batch or 1, _count(ranges)
    transient = decode_workspace_nbytes((*layer.keys.segments, *layer.values.segments))
    if out is None:
        out = geometry.empty(batch, tokens), geometry.empty(batch, tokens)
        transient += 2 * geometry.nbytes(batch, tokens)
    else:
        out = check_pair("out", out)
        geometry.check_out("out[0]", out[0], batch, tokens)
        geometry.check_out("out[1]", out[1], batch, tokens)
    k, v = (tensor.narrow(geometry.token_dim, 0, tokens) for tensor in out)
    with full_precision(geometry.device):
        layer.keys.read_into(k, ranges)
        layer.values.read_into(v, ranges)
    layer.meter.transient(transient)
    return k, v


def read_tensor(
    layer: LayerCache, name: str, ranges: Sequence[TokenRange], out: Tensor | None
) -> Tensor:
    """See `LayerCache.read_tensor`."""
    stores = {"key": layer.keys, "value": layer.values}
    if name not in stores:
        raise ConfigError(f"read_tensor got {name!r}: expected 'key' or 'value'")
    store, geometry = stores[name], layer.geometry
    for start, end in ranges:
        held = _count((low, high) for _, low, high in store.overlaps(((start, end),)))
        if start < 0 or end < start or held != end - start:
            raise PositionError(
                f"layer {layer.layer}: read of tokens {start} to {end}: expected ones that are "
                f"held ({_words(layer.held())}); widen the window to keep more"
            )
    batch, tokens = layer.batch or 1, _count(ranges)
    transient = decode_workspace_nbytes(store.segments)
    if out is None:
        out = geometry.empty(batch, tokens)
        transient += geometry.nbytes(batch, tokens)
    else:
        geometry.check_out("out", out, batch, tokens)
        out = out.narrow(geometry.token_dim, 0, tokens)
    with full_precision(geometry.device):
        store.read_into(out, ranges)
    layer.meter.transient(transient)
    return out


def _count(ranges: Iterable[TokenRange]) -> int:
    return sum(end - start for start, end in ranges)


def _words(ranges: Sequence[TokenRange]) -> str:
    return ", ".join(f"{start} to {end}" for start, end in ranges) or "none"
