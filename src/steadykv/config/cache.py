"""Which tokens are packed together, attended and kept dense; and a cache's whole configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError
from .codec import METHODS, VERSION, CodecConfig, check_fields, check_int

__all__ = ["CacheConfig", "CachePolicy"]


@dataclass(frozen=True)
class CachePolicy:
    """Which tokens are packed together, attended, and kept dense.

    span_chunks: chunks packed together, sharing one codebook.
    window_frames: attended frames, counted to the end of the open chunk, sink included; None
    attends to everything.
    sink_frames: first frames that are always attended.
    sink_keep: first frames that are kept dense.
    recent_keep: newest committed chunks that are kept dense.
    refined_spans: newest packed spans that keep the `refinement` of their codec; older ones are
    read without it, and nothing is packed again.
    """

    span_chunks: int = 1
    window_frames: int | None = None
    sink_frames: int = 0
    sink_keep: int = 0
    recent_keep: int = 0
    refined_spans: int = 1

    def __post_init__(self) -> None:
        check_int("CachePolicy", "span_chunks", self.span_chunks, 1, 1 << 20)
        for name in ("sink_frames", "sink_keep", "recent_keep", "refined_spans"):
            check_int("CachePolicy", name, getattr(self, name), 0, 1 << 30)
        if self.window_frames is None:
            return
        check_int("CachePolicy", "window_frames", self.window_frames, 1, 1 << 30)
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
        return cls(**check_fields(cls, data))


_POLICY_FIELDS = tuple(f.name for f in fields(CachePolicy))
# Not shared by keys and values, so `replace` does not set them for both.
_PER_TENSOR = ("method", "axis", "level_weight")


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
                    f"({', '.join(_PER_TENSOR)} are set through keys= and values=)"
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

    @property
    def needs_calibration(self) -> bool:
        """Whether either codec asks for a `Calibration`."""
        return self.keys.needs_calibration or self.values.needs_calibration

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
        data = check_fields(cls, data)
        kinds = {"keys": CodecConfig, "values": CodecConfig, "policy": CachePolicy}
        for label, kind in kinds.items():
            if label not in data:
                raise ConfigError(f"CacheConfig data lacks {label!r}: expected what to_dict wrote")
            data[label] = kind.from_dict(data[label])  # type: ignore[attr-defined]
        return cls(**data)
