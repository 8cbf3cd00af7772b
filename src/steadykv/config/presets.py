"""The usual configurations by name, and the names that the command line takes."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .cache import CacheConfig, CachePolicy
from .codec import METHODS, CodecConfig

__all__ = ["PRESETS", "parse_method", "preset"]

_RTN_SYMMETRIC = {"method": "rtn", "group_size": 16, "grid": "symmetric"}
_QVG_PRO = {"method": "qvg", "group_size": 16, "stages": 4}
_KIVI_KEYS = {"method": "kivi", "group_size": 32, "axis": "tokens"}
_KIVI_VALUES = {"method": "kivi", "group_size": 32, "axis": "channels"}
_KVQUANT_KEYS = {"method": "kvquant", "axis": "tokens"}
_KVQUANT_VALUES = {"method": "kvquant", "axis": "channels"}
# Without a floor under its scales, which a part of a step would be added to.
_STEADY = {"centroid_format": "fp8", "refinement": 2}
_STEADY_VALUES = {"method": "qvg", "metadata": "int8", "packing": "trits", **_STEADY}
_CALIBRATED = {"levels": "calibrated"}
# The one field of a policy that belongs to a method; all others belong to the host that runs it.
_POLICY_FIELD = "refined_spans"

# name -> (fields of the key codec, fields of the value codec, fields of the policy)
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"method": "bf16"}, {"method": "bf16"}, {}),
    "rtn": ({"method": "rtn"}, {"method": "rtn"}, {}),
    "rtn_g16_sym": (_RTN_SYMMETRIC, _RTN_SYMMETRIC, {}),
    "kivi": (_KIVI_KEYS, _KIVI_VALUES, {}),
    "kivi_recent": (_KIVI_KEYS, _KIVI_VALUES, {"recent_keep": 1}),
    "quarot": ({"method": "quarot"}, {"method": "quarot"}, {}),
    "qvg": ({"method": "qvg"}, {"method": "qvg"}, {}),
    "qvg_pro": (_QVG_PRO, _QVG_PRO, {}),
    "qvg4": ({"method": "qvg4"}, {"method": "qvg4"}, {}),
    "quantwm": ({"method": "quantwm"}, {"method": "qvg4"}, {}),
    "steady": ({"method": "qvg4", **_STEADY}, _STEADY_VALUES, {}),
    "kvquant": (_KVQUANT_KEYS, _KVQUANT_VALUES, {}),
    "kvquant_calibrated": (_KVQUANT_KEYS | _CALIBRATED, _KVQUANT_VALUES | _CALIBRATED, {}),
}


def preset(name: str, /, **overrides: Any) -> CacheConfig:
    """The named configuration; `overrides` as in `CacheConfig.replace`."""
    if name not in PRESETS:
        raise ConfigError(
            f"unknown method {name!r}: known are {', '.join(PRESETS)}; "
            "parse_method takes keys:values and NAME@FIELD=VALUE"
        )
    keys, values, policy = PRESETS[name]
    config = CacheConfig(CodecConfig(**keys), CodecConfig(**values), CachePolicy(**policy), name)
    if not overrides:
        return config
    config = config.replace(**overrides)
    if _POLICY_FIELD in overrides:
        _check_refined(config, name)
    return config


def _check_refined(config: CacheConfig, text: str) -> None:
    """Refuse a number of refined spans where nothing is refined."""
    if not (config.keys.refinement or config.values.refinement):
        raise ConfigError(
            f"{text!r}: {_POLICY_FIELD} changes nothing, because no number is refined: expected it "
            "with refinement=1 or more"
        )


def parse_method(text: str, /, **defaults: Any) -> CacheConfig:
    """A preset, or "keys:values": the key codec of one preset and the value codec of another.

    "quantwm:bf16" packs the keys only. Either side may change fields after an "@", as in
    "quantwm@rank=4+candidates=1" or "qvg@group_size=32:bf16"; widths are joined by "x", as in
    "quarot@dim_splits=64x64". One field of the policy can be given as well, on either side and for
    both: "qvg@metadata=int8+refinement=2+refined_spans=2". `defaults` are codec fields that are set
    first, wherever a codec reads them. The result is named `text`.
    Raises ConfigError for an unknown preset or field, a value that does not fit or changes nothing,
    and two policies.
    """
    keys_text, colon, values_text = text.strip().partition(":")
    if not colon:
        config = _side(keys_text, defaults, ("keys", "values")).replace(name=text.strip())
    else:
        keys, values = (
            _side(side, defaults, (used,))
            for side, used in ((keys_text, "keys"), (values_text, "values"))
        )
        policies = {c.policy for c in (keys, values)} - {CachePolicy()}
        if len(policies) > 1 or (text.count(_POLICY_FIELD) > 1 and keys.policy != values.policy):
            raise ConfigError(
                f"{text!r} joins two policies: build a CacheConfig and choose one of them"
            )
        policy = policies.pop() if policies else CachePolicy()
        config = CacheConfig(keys.keys, values.values, policy, text.strip())
    if _POLICY_FIELD in text:
        _check_refined(config, text)
    return config


def _side(text: str, defaults: dict[str, Any], used: tuple[str, ...]) -> CacheConfig:
    """One side of a method: a preset's name and its changes, of which `used` codecs are kept."""
    name, at, changes = text.strip().partition("@")
    config = preset(name.strip())
    read = {field for codec in (config.keys, config.values) for field in METHODS[codec.method]}
    config = config.replace(**{k: v for k, v in defaults.items() if k in read})
    if not at:
        return config
    overrides: dict[str, Any] = {}
    for change in changes.split("+"):
        field, equals, value = (part.strip() for part in change.partition("="))
        if not (field and equals and value) or field in overrides:
            raise ConfigError(
                f"{text!r}: got {change!r}, expected FIELD=VALUE, each field once; "
                "separate several with '+'"
            )
        read = {name for side in used for name in METHODS[getattr(config, side).method]}
        read.add(_POLICY_FIELD)
        if field not in read:
            known = ", ".join(sorted(read))
            raise ConfigError(f"{text!r}: got {field!r}, expected a field read here: {known}")
        overrides[field] = _widths(text, value) if field == "dim_splits" else _number_or_word(value)
    return config.replace(**overrides)


def _widths(text: str, value: str) -> tuple[int, ...]:
    """ "64x64" as (64, 64): the one field of several numbers, without a separator of lists."""
    parts = value.split("x")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"{text!r}: got dim_splits={value!r}, expected widths joined by 'x', such as 64x64"
        )
    return tuple(int(part) for part in parts)


def _number_or_word(text: str) -> int | float | bool | str:
    """What a field's value reads as."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
