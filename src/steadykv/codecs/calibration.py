"""Levels and thresholds of kvquant that are fixed before a run, from captured tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..config import CacheConfig, CodecConfig
from ..errors import CalibrationError, ConfigError
from .files import read_tensors, write_tensors
from .query_moment import QueryMoment

__all__ = ["CalibratedGrid", "Calibration", "grid_for"]

FORMAT = "steadykv.calibration"
VERSION = 1
TENSORS = ("key", "value")
KEY_FRAMES = {"post": "after", "pre": "before"}

Key = tuple[int, str]
Captured = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class CalibratedGrid:
    """What is fixed of one tensor of one layer.

    config: the codec it was made for, and that alone reads it. heads, head_dim: H and D.
    tokens: captured tokens it was made from.
    tensors: `levels` FP32 [2^bits], which decide codes, and `stored_levels` FP16 [2^bits], which
    decode them; for axis "tokens" also `center` and `half` FP16 [H, D].
    """

    config: CodecConfig
    heads: int
    head_dim: int
    tokens: int
    tensors: dict[str, Tensor]

    def to(self, device: torch.device | str) -> CalibratedGrid:
        """The same on another device; itself if it is there already."""
        if self.tensors["levels"].device == torch.device(device):
            return self
        moved = {k: t.to(device, non_blocking=True) for k, t in self.tensors.items()}
        return replace(self, tensors=moved)


@dataclass(frozen=True, eq=False)
class Calibration:
    """One `CalibratedGrid` a layer and tensor ("key" or "value").

    For configs with levels="calibrated" (preset "kvquant_calibrated"): hand it to `encode` and
    `KVCache` as `calibration`. KVQuant (arXiv 2401.18079) Sec. 3.3 to 3.6.

    key_rope: the captured keys were stored after ("post") or before ("pre") their rotary embedding;
    a calibration of the one is none of the other. None where that is not known.
    source: what else is known of the captured tensors, JSON-able.
    """

    grids: Mapping[Key, CalibratedGrid]
    key_rope: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        tensors: Mapping[Key, Captured] | Iterable[tuple[Key, Captured]],
        config: CacheConfig,
        *,
        stats: Mapping[int, QueryMoment] | None = None,
        key_rope: str | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> Calibration:
        """From captured K and V.

        tensors: (layer, "key" or "value") -> a span [B, H, S, D] in BF16, FP16 or FP32, or several
            of equal H and D; pairs may come one by one from a generator, so that no more than one
            is held. All tokens of all batch rows count alike.
        config: its codec of keys, or of values, decides bits, outliers and the rest.
        stats: layer -> query statistics, where the key codec has level_weight="queries".
        key_rope, source: of the result.
        Allocates about five FP32 copies of one entry; works on the tensors' device, and waits.
        Raises ConfigError for codecs without calibration or another key_rope, ShapeError for
        tensors that do not fit, NonFiniteError for NaN or Inf, CalibrationError for too few tokens
        or missing statistics.
        """
        if not isinstance(config, CacheConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}: expected a CacheConfig, as in "
                "preset('kvquant_calibrated')"
            )
        if key_rope not in (None, *KEY_FRAMES):
            raise ConfigError(f"key_rope is {key_rope!r}: expected 'post', 'pre' or None")
        from .calibrating import fit_grid

        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        grids = {}
        for (layer, tensor), captured in pairs:
            name = _name(layer, tensor)
            codec = config.keys if tensor == "key" else config.values
            moment = None if stats is None else stats.get(layer)
            grids[layer, tensor] = fit_grid(name, captured, codec, moment)
        return cls(grids, key_rope, dict(source or {}))

    def check(
        self,
        config: CacheConfig,
        layers: Iterable[int],
        heads: int,
        head_dim: int,
        key_rope: str | None = None,
    ) -> None:
        """Raises CalibrationError unless it fits a cache of that geometry.

        key_rope: how the cache's keys are stored; None where that is not known.
        """
        for layer in layers:
            for tensor, codec in zip(TENSORS, (config.keys, config.values), strict=True):
                if codec.needs_calibration:
                    grid_for(self, codec, layer, tensor, heads, head_dim)
        if not config.keys.needs_calibration or self.key_rope is None or key_rope is None:
            return
        if self.key_rope != key_rope:
            mine, theirs = KEY_FRAMES[self.key_rope], KEY_FRAMES[key_rope]
            raise CalibrationError(
                f"calibrated on keys {mine} their rotary embedding, got keys {theirs} it: expected "
                f"equal frames; calibrate on a capture with --key-rope {key_rope}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the fixed tensors: state of a cache, not of its payloads."""
        return sum(t.nbytes for grid in self.grids.values() for t in grid.tensors.values())

    def to(self, device: torch.device | str) -> Calibration:
        """The same on another device."""
        return replace(self, grids={key: grid.to(device) for key, grid in self.grids.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file; it appears under its name only when it is complete.

        Raises SteadyKVError where the system refuses to write.
        """
        entries = [
            {
                "layer": layer,
                "tensor": tensor,
                "config": grid.config.to_dict(),
                "heads": grid.heads,
                "head_dim": grid.head_dim,
                "tokens": grid.tokens,
            }
            for (layer, tensor), grid in self.grids.items()
        ]
        stored = {
            f"{layer}/{tensor}/{name}": t.contiguous()
            for (layer, tensor), grid in self.grids.items()
            for name, t in grid.tensors.items()
        }
        header = {"format": FORMAT, "version": VERSION, "grids": entries}
        header |= {"key_rope": self.key_rope, "source": dict(self.source)}
        write_tensors(path, stored, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Calibration:
        """Reads what `save` wrote, bit for bit; anything else is a CalibrationError."""
        tensors, header = read_tensors(path, FORMAT, "calibration", CalibrationError, device)
        if header.get("format") != FORMAT or header.get("version") != VERSION:
            raise CalibrationError(
                f"{path} says {header.get('format')!r} version {header.get('version')!r}: "
                f"expected {FORMAT!r} version {VERSION}"
            )
        entries = header.get("grids")
        if not isinstance(entries, list):
            raise CalibrationError(f"{path} has grids {entries!r}: expected a list")
        grids: dict[Key, CalibratedGrid] = {}
        names: set[str] = set()
        for entry in entries:
            key, grid = _read_entry(path, entry, tensors)
            grids[key] = grid
            names |= {f"{key[0]}/{key[1]}/{name}" for name in grid.tensors}
        if names != tensors.keys():
            raise CalibrationError(
                f"{path} has tensors {sorted(tensors.keys() - names)} that its header does not "
                "name: expected what save wrote"
            )
        key_rope, source = header.get("key_rope"), header.get("source", {})
        if key_rope not in (None, *KEY_FRAMES) or not isinstance(source, dict):
            raise CalibrationError(
                f"{path} has key_rope {key_rope!r} and source {source!r}: expected 'post', 'pre' "
                "or null, and an object"
            )
        return cls(grids, key_rope, source)


def grid_for(
    calibration: Calibration | None,
    config: CodecConfig,
    layer: int,
    tensor: str,
    heads: int,
    head_dim: int,
) -> CalibratedGrid | None:
    """The grid that encodes this tensor; None where the config asks for none.

    Raises CalibrationError where there should be one and none fits, and the reverse.
    """
    name = _name(layer, tensor, check=False)
    if not isinstance(calibration, Calibration | None):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}: expected a Calibration; "
            "Calibration.fit and Calibration.load make one"
        )
    if not config.needs_calibration:
        if calibration is not None:
            raise CalibrationError(
                f"{name}: {config.method} with levels={config.levels!r} reads no calibration: "
                "expected none, or levels='calibrated'"
            )
        return None
    grid = None if calibration is None else calibration.grids.get((layer, tensor))
    if grid is None:
        got = "no calibration" if calibration is None else "a calibration without it"
        raise CalibrationError(
            f"{name}: levels='calibrated' got {got}: expected calibration=Calibration.fit(...) of "
            "captured tensors, or levels='online'"
        )
    if (grid.heads, grid.head_dim) != (heads, head_dim):
        raise CalibrationError(
            f"{name}: calibrated for {grid.heads} heads of {grid.head_dim}, got {heads} of "
            f"{head_dim}: expected equal geometry; calibrate on tensors of this model"
        )
    if grid.config != config:
        raise CalibrationError(
            f"{name}: calibrated for {_difference(grid.config, config)}: expected the "
            "configuration that it was fitted with; fit it again with this one"
        )
    return grid


def _read_entry(
    path: str | os.PathLike[str], entry: Any, tensors: Mapping[str, Tensor]
) -> tuple[Key, CalibratedGrid]:
    """One checked grid of a file."""
    try:
        layer, tensor = entry["layer"], entry["tensor"]
        sizes = heads, width, tokens = entry["heads"], entry["head_dim"], entry["tokens"]
        config = CodecConfig.from_dict(entry["config"])
        name = _name(layer, tensor)
    except (KeyError, TypeError, ConfigError) as error:
        raise CalibrationError(
            f"{path} has a grid this release cannot read: {error}; expected what save wrote"
        ) from error
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise CalibrationError(f"{path}: {name} has sizes {sizes}: expected positive integers")
    if not config.needs_calibration:
        raise CalibrationError(
            f"{path}: {name} has levels={config.levels!r}: expected 'calibrated'"
        )
    wanted = {"levels": torch.float32, "stored_levels": torch.float16}
    if config.axis == "tokens":
        wanted |= {"center": torch.float16, "half": torch.float16}
    found = {}
    for part, dtype in wanted.items():
        shape = (2**config.bits,) if "levels" in part else (heads, width)
        t = tensors.get(f"{layer}/{tensor}/{part}")
        if t is None or tuple(t.shape) != shape or t.dtype != dtype:
            got = "nothing" if t is None else f"{tuple(t.shape)} {t.dtype}"
            raise CalibrationError(f"{path}: {name} {part} is {got}: expected {shape} {dtype}")
        is_good = t.isfinite().all()
        if "levels" in part:
            is_good &= (t.float().diff() >= 0).all()
        elif part == "half":
            is_good &= (t >= 0).all()
        if not is_good:
            raise CalibrationError(
                f"{path}: {name} {part} has impossible numbers: expected finite ones, levels "
                "ascending and halves not negative"
            )
        found[part] = t
    return (layer, tensor), CalibratedGrid(config, heads, width, tokens, found)


def _name(layer: Any, tensor: Any, check: bool = True) -> str:
    """ "layer 3 key"."""
    is_layer = isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
    if check and (not is_layer or tensor not in TENSORS):
        raise ConfigError(
            f"got layer {layer!r}, tensor {tensor!r}: expected a number from 0 and 'key' or 'value'"
        )
    return f"layer {layer} {tensor}"


def _difference(made: CodecConfig, wanted: CodecConfig) -> str:
    """The fields in which two configurations differ."""
    mine, other = made.to_dict(), wanted.to_dict()
    return ", ".join(f"{k}={mine[k]!r} (got {other[k]!r})" for k in mine if mine[k] != other[k])
