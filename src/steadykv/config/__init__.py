"""Configurations: frozen, validated when built, versioned when written.

`CodecConfig` says how one tensor (keys or values) is packed, `CachePolicy` which tokens stay dense
and which are attended, `CacheConfig` joins two codecs and a policy. `preset` names the usual ones.
Nothing here imports torch until a payload size or a property of a codec is asked for.
"""

from .cache import CacheConfig, CachePolicy
from .codec import METHODS, CodecConfig
from .presets import PRESETS, parse_method, preset

__all__ = [
    "METHODS",
    "PRESETS",
    "CacheConfig",
    "CachePolicy",
    "CodecConfig",
    "parse_method",
    "preset",
]
