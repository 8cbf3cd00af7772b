"""Configurations: frozen, validated when built, versioned when written.

`CodecConfig` says how one tensor (keys or values) is packed, `CachePolicy` which tokens stay dense
and which are attended, `CacheConfig` joins two codecs and a policy. `preset` names the usual ones.
Nothing here imports torch until a payload size is asked for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError

__all__ = [
    "METHODS",
    "PRESETS",
    "CacheConfig",
    "CachePolicy",
    "CodecConfig",
    "parse_method",
    "preset",
]

VERSION = 1

_CLUSTERED = ("bits", "group_size", "centroids", "iterations", "warm_start", "seed")

# Method -> the fields it reads. A field that a method does not read has to keep its default: a
# setting that changes nothing would look like a result. (`bits` of bf16 is tolerated, so that one
# loop over bit widths may include it.)
METHODS: dict[str, tuple[str, ...]] = {
    "bf16": ("bits",),
    "kivi": ("bits", "group_size", "axis"),
    "qvg": _CLUSTERED,
    "qvg4": _CLUSTERED,
    "quantwm": (*_CLUSTERED, "candidates", "rank", "retain", "coef_layout", "first_span"),
}

_CHOICES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 4),
    "axis": ("channels", "tokens"),
    "retain": ("row", "always"),
    "coef_layout": ("dense", "auto"),
    "first_span": ("paper", "own"),
}

# Inclusive bounds. Centroid ids are uint8 up to 256 centroids and uint16 above.
_RANGES: dict[str, tuple[int, int]] = {
    "group_size": (1, 1 << 16),
    "centroids": (1, 1 << 16),
    "iterations": (0, 1000),
    "candidates": (1, 1 << 16),
    "rank": (0, 1024),
    "seed": (0, (1 << 63) - 1),
}


def _check_int(owner: str, name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{owner}.{name} is {value!r}: expected an integer from {low} to {high}")


def _check_fields(cls: type, data: dict[str, Any]) -> dict[str, Any]:
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

    method: "bf16", "kivi", "qvg", "qvg4" or "quantwm".
    bits: bits of one residual code, 2 or 4.
    group_size: elements that share a scale: channels, or tokens for kivi with axis "tokens".
    axis: kivi only; "tokens" (one scale a channel and run of tokens, for keys) or "channels" (for
    values).
    centroids: cluster means per head and span (capped by the span's tokens).
    iterations: k-means iterations before the final assignment; fixed, without a convergence test.
    warm_start: start from the centroids of the span before, if its geometry is the same.
    candidates: nearest centroids that compete on quantization range (QSAC).
    rank: query directions in which the key error is stored (PSAC); 0 turns PSAC off.
    retain: "row" keeps a correction only where it lowers the query-weighted error, "always" keeps
    all.
    coef_layout: "dense" (size known beforehand) or "auto" (the smaller of dense and sparse; syncs
    the host).
    first_span: "paper" (no query statistics in the first span) or "own" (those of its own passes).
    seed: of the private generator that draws cold-start centroids.
    """

    method: str = "qvg"
    bits: int = 2
    group_size: int = 64
    axis: str = "channels"
    centroids: int = 256
    iterations: int = 2
    warm_start: bool = True
    candidates: int = 4
    rank: int = 8
    retain: str = "row"
    coef_layout: str = "dense"
    first_span: str = "paper"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise ConfigError(f"unknown method {self.method!r}: known are {', '.join(METHODS)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices or isinstance(getattr(self, name), bool):
                expected = " or ".join(repr(choice) for choice in choices)
                raise ConfigError(
                    f"CodecConfig.{name} is {getattr(self, name)!r}: expected {expected}"
                )
        for name, (low, high) in _RANGES.items():
            _check_int("CodecConfig", name, getattr(self, name), low, high)
        if not isinstance(self.warm_start, bool):
            raise ConfigError(
                f"CodecConfig.warm_start is {self.warm_start!r}: expected True or False"
            )
        for item in fields(self):
            name = item.name
            if name == "method" or name in METHODS[self.method]:
                continue
            if getattr(self, name) != item.default:
                raise ConfigError(
                    f"CodecConfig.{name} is {getattr(self, name)!r}: {self.method!r} ignores it, "
                    f"expected its default {item.default!r}"
                )

    @property
    def needs_queries(self) -> bool:
        """Whether the codec gets better with the query moment (`observe_queries`)."""
        return self.method == "quantwm"

    @property
    def is_dense(self) -> bool:
        """Whether the codec stores 16-bit numbers as they are."""
        return self.method == "bf16"

    def payload_nbytes(
        self, batch: int, heads: int, tokens: int, head_dim: int, compensated: bool = True
    ) -> int:
        """Bytes of the payload of a [batch, heads, tokens, head_dim] span, exact before encoding.

        compensated: False is the size of a cold start (no basis, no coefficients). With coef_layout
        "auto" the result is an upper bound.
        """
        from .codecs import payload_layout

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
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CodecConfig:
        """Inverse of `to_dict`; an unknown version or field is a ConfigError."""
        return cls(**_check_fields(cls, data))


@dataclass(frozen=True)
class CachePolicy:
    """Which tokens are packed together, attended, and kept dense.

    span_chunks: chunks packed together, sharing one codebook.
    window_frames: attended frames, counted to the end of the open chunk, sink included; None
    attends to everything.
    sink_frames: first frames that are always attended.
    sink_keep: first frames that are kept dense.
    recent_keep: newest committed chunks that are kept dense.
    """

    span_chunks: int = 1
    window_frames: int | None = None
    sink_frames: int = 0
    sink_keep: int = 0
    recent_keep: int = 0

    def __post_init__(self) -> None:
        _check_int("CachePolicy", "span_chunks", self.span_chunks, 1, 1 << 20)
        for name in ("sink_frames", "sink_keep", "recent_keep"):
            _check_int("CachePolicy", name, getattr(self, name), 0, 1 << 30)
        if self.window_frames is None:
            return
        _check_int("CachePolicy", "window_frames", self.window_frames, 1, 1 << 30)
        if self.sink_frames >= self.window_frames:
            raise ConfigError(
                f"CachePolicy.sink_frames is {self.sink_frames}: expected less than the window of "
                f"{self.window_frames} frames, which the sink is part of"
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dictionary with a version."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CachePolicy:
        """Inverse of `to_dict`; an unknown version or field is a ConfigError."""
        return cls(**_check_fields(cls, data))


_POLICY_FIELDS = tuple(f.name for f in fields(CachePolicy))
# Not shared by keys and values, so `replace` does not set them for both.
_PER_TENSOR = ("method", "axis")


@dataclass(frozen=True)
class CacheConfig:
    """Codec of the keys, codec of the values, policy, and the name that results carry."""

    keys: CodecConfig
    values: CodecConfig
    policy: CachePolicy = field(default_factory=CachePolicy)
    name: str = "custom"

    def __post_init__(self) -> None:
        for label in ("keys", "values"):
            if not isinstance(getattr(self, label), CodecConfig):
                raise ConfigError(
                    f"CacheConfig.{label} is {getattr(self, label)!r}: expected a CodecConfig"
                )
        if not isinstance(self.policy, CachePolicy):
            raise ConfigError(f"CacheConfig.policy is {self.policy!r}: expected a CachePolicy")
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"CacheConfig.name is {self.name!r}: expected a word")

    def replace(self, **changes: Any) -> CacheConfig:
        """A copy with other `keys`, `values`, `policy` or `name`, or other policy or codec fields.

        A codec field is set wherever its method reads it (`centroids=32` changes the clustered
        codecs and leaves bf16 alone); one that neither codec reads is a ConfigError.
        """
        own = {k: changes.pop(k) for k in ("keys", "values", "policy", "name") if k in changes}
        config = dataclasses.replace(self, **own)
        policy = {k: changes.pop(k) for k in _POLICY_FIELDS if k in changes}
        keys, values = dict[str, Any](), dict[str, Any]()
        for name, value in changes.items():
            for codec, target in ((config.keys, keys), (config.values, values)):
                if name in METHODS[codec.method] and name not in _PER_TENSOR:
                    target[name] = value
            if name not in keys and name not in values:
                raise ConfigError(
                    f"{name!r} changes nothing in {config.keys.method}:{config.values.method}: "
                    "expected a field of CachePolicy or one that these codecs read "
                    "(method and axis are set through keys= and values=)"
                )
        return dataclasses.replace(
            config,
            keys=dataclasses.replace(config.keys, **keys),
            values=dataclasses.replace(config.values, **values),
            policy=dataclasses.replace(config.policy, **policy),
        )

    def with_span(self, span_chunks: int, centroids: int | None = None) -> CacheConfig:
        """A copy with spans of `span_chunks` chunks, and `centroids` where a codec has any."""
        config = self.replace(span_chunks=span_chunks)
        if centroids is not None and any(
            "centroids" in METHODS[codec.method] for codec in (self.keys, self.values)
        ):
            config = config.replace(centroids=centroids)
        return config

    @property
    def needs_queries(self) -> bool:
        """Whether either codec uses query statistics."""
        return self.keys.needs_queries or self.values.needs_queries

    def payload_nbytes(
        self, batch: int, heads: int, tokens: int, head_dim: int, compensated: bool = True
    ) -> int:
        """Bytes of one span, keys and values together."""
        shape = (batch, heads, tokens, head_dim)
        return sum(c.payload_nbytes(*shape, compensated) for c in (self.keys, self.values))

    def bits_per_element(
        self, batch: int, heads: int, tokens: int, head_dim: int, compensated: bool = True
    ) -> float:
        """Mean bits per element of keys and values."""
        shape = (batch, heads, tokens, head_dim)
        return sum(c.bits_per_element(*shape, compensated) for c in (self.keys, self.values)) / 2

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dictionary with a version."""
        parts = {k: getattr(self, k).to_dict() for k in ("keys", "values", "policy")}
        return {"version": VERSION, "name": self.name, **parts}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CacheConfig:
        """Inverse of `to_dict`; an unknown version or field is a ConfigError."""
        data = _check_fields(cls, data)
        kinds = {"keys": CodecConfig, "values": CodecConfig, "policy": CachePolicy}
        for label, kind in kinds.items():
            if label not in data:
                raise ConfigError(f"CacheConfig data lacks {label!r}: expected what to_dict wrote")
            data[label] = kind.from_dict(data[label])  # type: ignore[attr-defined]
        return cls(**data)


_KIVI_KEYS = {"method": "kivi", "group_size": 32, "axis": "tokens"}
_KIVI_VALUES = {"method": "kivi", "group_size": 32, "axis": "channels"}

# name -> (fields of the key codec, fields of the value codec, fields of the policy)
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"method": "bf16"}, {"method": "bf16"}, {}),
    "kivi": (_KIVI_KEYS, _KIVI_VALUES, {}),
    "kivi_recent": (_KIVI_KEYS, _KIVI_VALUES, {"recent_keep": 1}),
    "qvg": ({"method": "qvg"}, {"method": "qvg"}, {}),
    "qvg4": ({"method": "qvg4"}, {"method": "qvg4"}, {}),
    "quantwm": ({"method": "quantwm"}, {"method": "qvg4"}, {}),
}


def preset(name: str, /, **overrides: Any) -> CacheConfig:
    """The named configuration; `overrides` as in `CacheConfig.replace`."""
    if name not in PRESETS:
        raise ConfigError(
            f"unknown method {name!r}: known are {', '.join(PRESETS)}, or keys:values"
        )
    keys, values, policy = PRESETS[name]
    config = CacheConfig(CodecConfig(**keys), CodecConfig(**values), CachePolicy(**policy), name)
    return config.replace(**overrides) if overrides else config


def parse_method(text: str) -> CacheConfig:
    """A preset, or "keys:values": the key codec of one preset and the value codec of another.

    "quantwm:bf16" packs the keys only. The result is named `text`.
    """
    keys_name, colon, values_name = text.strip().partition(":")
    if not colon:
        return preset(keys_name)
    keys, values = preset(keys_name), preset(values_name)
    policies = {c.policy for c in (keys, values)} - {CachePolicy()}
    if len(policies) > 1:
        raise ConfigError(
            f"{text!r} joins two policies: build a CacheConfig and choose one of them"
        )
    policy = policies.pop() if policies else CachePolicy()
    return CacheConfig(keys.keys, values.values, policy, text.strip())
