"""The usual configurations by name, and the names that the command line takes."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .cache import CacheConfig, CachePolicy
from .codec import CodecConfig

__all__ = ["PRESETS", "parse_method", "preset"]

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
    "steady": ({"method": "steady"}, {"method": "qvg4"}, {}),
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
