"""How one tensor (keys or values) is packed, and the table of methods."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigError

__all__ = ["METHODS", "VERSION", "CodecConfig", "check_fields", "check_int"]

VERSION = 1

_CLUSTERED = (
    "bits", "group_size", "centroids", "iterations", "warm_start", "reseed_empty", "refit", "seed",
    "metadata", "centroid_format", "refinement",
)  # fmt: skip
_FOUR_LEVELS = (*_CLUSTERED, "include_zero")

# Method -> the fields it reads. A field that a method does not read has to keep its default: a
# setting that changes nothing would look like a result. (`bits` of bf16 is tolerated, so that one
# loop over bit widths may include it.)
METHODS: dict[str, tuple[str, ...]] = {
    "bf16": ("bits",),
    "rtn": ("bits", "group_size", "grid", "packing"),
    "kivi": ("bits", "group_size", "axis"),
    "quarot": ("bits", "group_size", "clip_ratio", "dim_splits"),
    "qvg": (*_CLUSTERED, "stages", "packing"),
    "qvg4": (*_FOUR_LEVELS, "stages", "scale_search"),
    "quantwm": (
        *_FOUR_LEVELS,
        "candidates",
        "metric",
        "rank",
        "retain",
        "coef_layout",
        "first_span",
    ),
    "kvquant": (
        "bits",
        "axis",
        "outlier_fraction",
        "first_tokens",
        "levels",
        "level_weight",
        "q_norm",
    ),
}

# What a method takes for a field whose default is None, and its other choices.
_OWN_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "rtn": {"grid": ("affine_min", "symmetric")},
    "qvg": {"metadata": ("fp8", "int8")},
    "qvg4": {"metadata": ("int8", "fp8")},
    "quantwm": {"metadata": ("int8", "fp8")},
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4),
    "centroid_format": ("bf16", "fp8"),
    "refinement": (0, 1, 2, 3, 4),
    "packing": ("bits", "trits"),
    "axis": ("channels", "tokens"),
    "metric": ("diagonal", "full", "none"),
    "retain": ("row", "always"),
    "coef_layout": ("dense", "auto"),
    "first_span": ("paper", "own"),
    "outlier_fraction": (0.0, 0.001, 0.005, 0.01),
    "levels": ("online", "calibrated"),
    "level_weight": ("one", "queries"),
}

# Inclusive bounds. Centroid ids are uint8 up to 256 centroids and uint16 above.
_RANGES: dict[str, tuple[int, int]] = {
    "group_size": (1, 1 << 16),
    "centroids": (1, 1 << 16),
    "iterations": (0, 1000),
    "stages": (1, 4),
    "candidates": (1, 1 << 16),
    "rank": (0, 1024),
    "seed": (0, (1 << 63) - 1),
    "first_tokens": (0, 1 << 30),
}

_SWITCHES = ("reseed_empty", "refit", "include_zero", "scale_search", "q_norm")


def check_int(owner: str, name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{owner}.{name} is {value!r}: expected an integer from {low} to {high}")


def check_fields(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    """Checks the version and the names of a stored dictionary; returns it without the version."""
    if not isinstance(data, dict):
        raise ConfigError(f"{cls.__name__} data is a {type(data).__name__}: expected a dictionary")
    data = dict(data)
    version = data.pop("version", None)
    if version != VERSION:
        raise ConfigError(
            f"{cls.__name__} data has version {version!r}: this release reads version {VERSION}"
        )
    known = [f.name for f in fields(cls)]
    for name in data:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no field {name!r}: known are {', '.join(known)}")
    return data


@dataclass(frozen=True)
class CodecConfig:
    """How one tensor is packed. See `METHODS` for the fields that each method reads.

    method: a name in `METHODS`.
    bits: bits of one residual code, 2, 3 or 4.
    group_size: elements that share a scale: channels, or tokens for kivi with axis "tokens".
    axis: kivi only; "tokens" (one scale a channel and run of tokens, for keys) or "channels" (for
    values). Of kvquant: one scale a channel and span, or one a token and all heads.
    centroids: cluster means per head and span (capped by the span's tokens).
    iterations: k-means iterations before the final assignment; fixed, without a convergence test.
    warm_start: start from the span before, if its geometry is the same: True from its centroids,
    "ids" from the means of the new tokens that stand where the members of its clusters stood.
    reseed_empty: an empty cluster takes the token that is farthest from its centroid.
    refit: move the last stage's centroids, in BF16, once more when the codes are known, for heads
    that gain by it.
    include_zero: whether the range of a group reaches to zero; off, one-signed groups are cut off.
    scale_search: try smaller scales for each group and keep the one of the least squared error.
    candidates: nearest centroids that compete on quantization range (QSAC).
    metric: how candidates are weighed: "diagonal" by channel (eq. 10), "full" by the whole query
    moment where the nearest are sought (table 10), "none" not at all.
    rank: query directions in which the key error is stored (PSAC); 0 turns PSAC off.
    retain: "row" keeps a correction only where it lowers the query-weighted error, "always" keeps
    all.
    coef_layout: "dense" (size known beforehand) or "auto" (the smaller of dense and sparse; syncs
    the host).
    first_span: "paper" (no query statistics in the first span) or "own" (those of its own passes).
    grid: rtn only; "affine_min" (FP16 scale and minimum) or "symmetric" (E4M3 scale).
    metadata: what a group's scale is stored in, and beside it. qvg: "fp8" (E4M3) or "int8" (steps
    of one FP16 base a head). qvg4, quantwm: "int8" (with a zero point) or "fp8" (E4M3 scale and
    minimum). None takes the first.
    packing: "bits", or "trits" (five codes a byte) for the three levels of a symmetric grid at 2
    bits.
    stages: k-means passes, each over what the ones before left.
    centroid_format: "bf16", or "fp8" (E4M3 with an FP16 scale a centroid).
    refinement: bits that each number has beside its code while its span is among the newest
    (`CachePolicy.refined_spans`); with rank 0 and metadata "int8" only.
    clip_ratio: quarot only; ends of a group's range are taken times this, above 0 and at most 1.
    dim_splits: quarot only; widths that head_dim is cut into before each is rotated alone; empty
    for one.
    seed: of the private generator that draws cold-start centroids.
    outlier_fraction: share of the numbers of a vector that kvquant stores exactly: 0 to 0.01.
    first_tokens: first tokens of every span that kvquant keeps dense.
    levels: "online" (kvquant's levels and thresholds come from the span) or "calibrated" (from a
    `Calibration`, made beforehand from captured tensors).
    level_weight: "one", or "queries": kvquant's key levels are fitted with the weight of each
    channel in the logits.
    q_norm: kvquant moves its levels so that mean and deviation survive quantization.
    """

    method: str = "qvg"
    bits: int = 2
    group_size: int = 64
    axis: str = "channels"
    centroids: int = 256
    iterations: int = 2
    warm_start: bool | str = True
    reseed_empty: bool = False
    refit: bool = False
    include_zero: bool = True
    scale_search: bool = False
    candidates: int = 4
    metric: str = "diagonal"
    rank: int = 8
    retain: str = "row"
    coef_layout: str = "dense"
    first_span: str = "paper"
    seed: int = 0
    outlier_fraction: float = 0.01
    first_tokens: int = 0
    levels: str = "online"
    level_weight: str = "one"
    q_norm: bool = True
    grid: str | None = None
    metadata: str | None = None
    packing: str = "bits"
    stages: int = 1
    centroid_format: str = "bf16"
    refinement: int = 0
    clip_ratio: float = 0.99
    dim_splits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ConfigError(f"unknown method {self.method!r}: known are {', '.join(METHODS)}")
        for name, choices in _OWN_CHOICES.get(self.method, {}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, choices[0])
            self._check_choice(name, choices)
        for name, choices in _CHOICES.items():
            self._check_choice(name, choices)
        for name, (low, high) in _RANGES.items():
            check_int("CodecConfig", name, getattr(self, name), low, high)
        if not isinstance(self.warm_start, bool) and self.warm_start != "ids":
            raise ConfigError(
                f"CodecConfig.warm_start is {self.warm_start!r}: expected True, False or 'ids'"
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"CodecConfig.{name} is {getattr(self, name)!r}: expected True or False"
                )
        self._check_clip_ratio()
        self._check_dim_splits()
        for item in fields(self):
            name = item.name
            if name == "method" or name in METHODS[self.method]:
                continue
            if getattr(self, name) != item.default:
                raise ConfigError(
                    f"CodecConfig.{name} is {getattr(self, name)!r}: {self.method!r} ignores it, "
                    f"expected its default {item.default!r}"
                )
        if self.level_weight == "queries" and self.axis != "tokens":
            raise ConfigError(
                f"CodecConfig.axis is {self.axis!r} with level_weight='queries': expected "
                "'tokens', because queries weigh the channels of keys"
            )
        if not self.rank and (self.retain, self.coef_layout) != ("row", "dense"):
            name = "coef_layout" if self.retain == "row" else "retain"
            raise ConfigError(
                f"CodecConfig.{name} is {getattr(self, name)!r} with rank=0: expected its default, "
                "because nothing is corrected, or a rank above 0"
            )
        if self.packing == "trits" and (self.bits != 2 or self.grid not in (None, "symmetric")):
            raise ConfigError(
                f"CodecConfig.packing is 'trits' with bits={self.bits} and grid {self.grid!r}: "
                "expected the three levels of bits=2 on a symmetric grid, or packing='bits'"
            )
        if self.metadata == "fp8" and (not self.include_zero or self.scale_search):
            name = "scale_search" if self.scale_search else "include_zero"
            raise ConfigError(
                f"CodecConfig.{name} is {getattr(self, name)!r} with metadata='fp8': expected its "
                "default, because such groups have a minimum and no zero point, or metadata='int8'"
            )
        if self.refinement and (self.refit or (self.rank and "rank" in METHODS[self.method])):
            name, wanted = ("refit", False) if self.refit else ("rank", 0)
            raise ConfigError(
                f"CodecConfig.{name} is {getattr(self, name)!r} with refinement={self.refinement}: "
                f"expected {wanted}, because it would serve the unrefined numbers only"
            )
        if self.refinement and self.metadata != "int8":
            raise ConfigError(
                f"CodecConfig.metadata is {self.metadata!r} with refinement={self.refinement}: "
                "expected 'int8', because a part of the least FP8 scale would be added to zeros"
            )
        if self.refit and self.centroid_format == "fp8":
            raise ConfigError(
                "CodecConfig.refit is True with centroid_format='fp8': expected False, or "
                "centroid_format='bf16', because refitted centroids are stored in BF16"
            )

    def _check_choice(self, name: str, choices: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        # 2.0 == 2, but a config is a key: two equal ones must do the same
        kinds = {type(choice) for choice in choices} | ({int} if 0.0 in choices else set())
        if type(value) not in kinds or value not in choices:
            expected = " or ".join(repr(choice) for choice in choices)
            raise ConfigError(f"CodecConfig.{name} is {value!r}: expected {expected}")

    def _check_clip_ratio(self) -> None:
        value = self.clip_ratio
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigError(
                f"CodecConfig.clip_ratio is {value!r}: expected a number above 0, at most 1"
            )

    def _check_dim_splits(self) -> None:
        widths: Any = self.dim_splits
        if isinstance(widths, list):  # as JSON has it
            widths = tuple(widths)
            object.__setattr__(self, "dim_splits", widths)
        if not isinstance(widths, tuple) or any(type(w) is not int or w < 1 for w in widths):
            raise ConfigError(
                f"CodecConfig.dim_splits is {widths!r}: expected a tuple of integers above 0"
            )
        if any(width % self.group_size for width in widths[:-1]):
            raise ConfigError(
                f"CodecConfig.dim_splits is {widths!r} with group_size {self.group_size}: expected "
                "all widths but the last to be multiples of it, so that groups end with them"
            )

    @property
    def needs_queries(self) -> bool:
        """Whether the codec gets better with the query moment (`observe_queries`)."""
        from ..codecs import CODECS

        is_fitted_with_them = self.level_weight == "queries" and not self.needs_calibration
        return CODECS[self.method].needs_queries or is_fitted_with_them

    @property
    def needs_calibration(self) -> bool:
        """Whether encoding asks for a `Calibration`."""
        return self.levels == "calibrated"

    @property
    def is_dense(self) -> bool:
        """Whether the codec stores 16-bit numbers as they are."""
        from ..codecs import CODECS

        return CODECS[self.method].is_dense

    def payload_nbytes(
        self, batch: int, heads: int, tokens: int, head_dim: int, compensated: bool = True
    ) -> int:
        """Bytes of the payload of a [batch, heads, tokens, head_dim] span, exact before encoding.

        compensated: False is the size of a cold start (no basis, no coefficients). With coef_layout
        "auto" the result is an upper bound.
        """
        from ..codecs import payload_layout

        layout = payload_layout(self, (batch, heads, tokens, head_dim), compensated=compensated)
        return sum(item.nbytes for item in layout.values())

    def bits_per_element(
        self, batch: int, heads: int, tokens: int, head_dim: int, compensated: bool = True
    ) -> float:
        """Stored bits per element of one span, metadata included; 0 for an empty span."""
        elements = batch * heads * tokens * head_dim
        nbytes = self.payload_nbytes(batch, heads, tokens, head_dim, compensated)
        return 8 * nbytes / elements if elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dictionary with a version."""
        data = dataclasses.asdict(self)
        return {"version": VERSION, **data, "dim_splits": list(self.dim_splits)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CodecConfig:
        """Inverse of `to_dict`; an unknown version or field is a ConfigError."""
        if isinstance(data, dict):  # a field of feedback rounding, which is gone
            data = {name: value for name, value in data.items() if name != "damping"}
        return cls(**check_fields(cls, data))
