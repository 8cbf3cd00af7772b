"""steadykv: the key/value cache of video and world models in about two bits a number.

The public names load on first use, so that `import steadykv` imports neither torch nor a codec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import KVCache, LayerCache
    from .codecs import Calibration, Payload, QueryMoment, SpanKey, decode, encode, rotate
    from .config import CacheConfig, CachePolicy, CodecConfig, parse_method, preset
    from .errors import (
        BackendUnavailable,
        CalibrationError,
        ConfigError,
        HostError,
        NonFiniteError,
        PayloadError,
        PositionError,
        ShapeError,
        SteadyKVError,
    )
    from .hosts import AttachedCaches, attach
    from .ops import explain, use_backend
    from .planning import Plan, plan

__version__ = "0.1.0"

_HOMES = {
    "cache": ("KVCache", "LayerCache"),
    "codecs": ("Calibration", "Payload", "QueryMoment", "SpanKey", "decode", "encode", "rotate"),
    "config": ("CacheConfig", "CachePolicy", "CodecConfig", "parse_method", "preset"),
    "errors": (
        "BackendUnavailable",
        "CalibrationError",
        "ConfigError",
        "HostError",
        "NonFiniteError",
        "PayloadError",
        "PositionError",
        "ShapeError",
        "SteadyKVError",
    ),
    "hosts": ("AttachedCaches", "attach"),
    "ops": ("explain", "use_backend"),
    "planning": ("Plan", "plan"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AttachedCaches",
    "BackendUnavailable",
    "CacheConfig",
    "CachePolicy",
    "Calibration",
    "CalibrationError",
    "CodecConfig",
    "ConfigError",
    "HostError",
    "KVCache",
    "LayerCache",
    "NonFiniteError",
    "Payload",
    "PayloadError",
    "Plan",
    "PositionError",
    "QueryMoment",
    "ShapeError",
    "SpanKey",
    "SteadyKVError",
    "attach",
    "decode",
    "encode",
    "explain",
    "parse_method",
    "plan",
    "preset",
    "rotate",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'steadykv' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
