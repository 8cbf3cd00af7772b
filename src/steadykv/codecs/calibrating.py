"""How a calibration is made: captured spans of one tensor become one grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..config import CodecConfig
from ..errors import CalibrationError, ConfigError, NonFiniteError, ShapeError
from .calibration import CalibratedGrid
from .kvquant import KVQuantCodec, outlier_count
from .query_moment import QueryMoment

__all__ = ["fit_grid"]


def fit_grid(
    name: str,
    captured: Tensor | Sequence[Tensor],
    config: CodecConfig,
    moment: QueryMoment | None,
) -> CalibratedGrid:
    """The grid of all captured tokens; `name` says whose in errors. See `Calibration.fit`."""
    if not config.needs_calibration:
        raise ConfigError(
            f"{name}: {config.method} has levels={config.levels!r}: expected 'calibrated', as in "
            "preset('kvquant_calibrated')"
        )
    codec = KVQuantCodec(config)
    rows = _joined(name, captured, config.first_tokens)
    _, heads, tokens, width = rows.shape
    length = tokens if config.axis == "tokens" else heads * width
    if not tokens or outlier_count(length, config.outlier_fraction) >= length:
        raise CalibrationError(
            f"{name}: got {tokens} tokens of {heads * width} numbers: expected vectors with more "
            "numbers than outliers, and for good levels several spans"
        )
    energy = None
    if config.level_weight == "queries":
        energy = _energy(name, moment, rows)
    with ops.full_precision(rows.device):
        tensors = codec.fit(rows, energy)
    return CalibratedGrid(config, heads, width, tokens, tensors)


def _joined(name: str, captured: Tensor | Sequence[Tensor], first: int) -> Tensor:
    """All tokens behind the first ones of every span and batch row: FP32 [1, H, T, D], finite."""
    spans = [captured] if isinstance(captured, Tensor) else list(captured)
    if not spans:
        raise ShapeError(f"{name}: got no span: expected at least one tensor [B, H, S, D]")
    for x in spans:
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.dtype.is_floating_point:
            got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name}: got {got}: expected a float tensor [B, H, S, D]")
        if (x.shape[1], x.shape[3]) != (spans[0].shape[1], spans[0].shape[3]):
            raise ShapeError(
                f"{name}: got spans of {tuple(spans[0].shape)} and {tuple(x.shape)}: expected "
                "equal numbers of heads and channels"
            )
    rows = [x[:, :, first:].detach().float().transpose(0, 1).flatten(1, 2) for x in spans]
    joined = torch.cat(rows, 1)[None]
    bad = int(joined.isfinite().logical_not_().sum())
    if bad:
        raise NonFiniteError(f"{name} has {bad} NaN or Inf: expected finite captured tensors")
    return joined


def _energy(name: str, moment: QueryMoment | None, rows: Tensor) -> Tensor:
    """M_cc of all batch rows together: FP64 [1, H, D]."""
    if moment is None or not moment.has_queries:
        raise CalibrationError(
            f"{name}: level_weight='queries' got no query statistics: expected stats={{layer: "
            "QueryMoment}} with queries, or level_weight='one'"
        )
    expected = (rows.shape[1], rows.shape[3], rows.shape[3])
    if tuple(moment.moment.shape[1:]) != expected:
        raise ShapeError(
            f"{name}: query moment is {tuple(moment.moment.shape)}: expected [B, *{expected}]"
        )
    count = moment.count.double()[..., None]
    energy = moment.moment.diagonal(dim1=-2, dim2=-1).double()
    return ((energy * count).sum(0) / count.sum(0).clamp(min=1))[None].to(rows.device)
