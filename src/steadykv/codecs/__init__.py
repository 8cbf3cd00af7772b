"""Codecs: dense [B, H, S, D] in, `Payload` out, and back.

`CODECS` is the one table of methods. What else the package knows of a method are attributes of its
class (`Codec`). A new method is one file beside these and one row here, one in `config.METHODS`
(the fields it reads), one in `config.PRESETS` and one in `tests/codecs.py`.
"""

from __future__ import annotations

from ..config import CodecConfig
from ..errors import ShapeError
from .base import Codec, Shape, SpanKey, TensorSpec, WarmStart
from .calibration import Calibration
from .dense import BF16Codec
from .encoder import encode
from .kivi import KIVICodec
from .kvquant import KVQuantCodec
from .payload import Payload
from .quantwm import QuantWMCodec
from .quarot import QuaRotCodec
from .query_moment import QueryMoment
from .qvg import QVGCodec
from .qvg4 import QVG4Codec
from .rotation import rotate
from .rtn import RTNCodec

__all__ = [
    "CODECS",
    "Calibration",
    "Codec",
    "CodecConfig",
    "Payload",
    "QueryMoment",
    "SpanKey",
    "TensorSpec",
    "WarmStart",
    "codec_for",
    "decode",
    "encode",
    "payload_layout",
    "rotate",
]

CODECS: dict[str, type[Codec]] = {
    "bf16": BF16Codec,
    "rtn": RTNCodec,
    "kivi": KIVICodec,
    "quarot": QuaRotCodec,
    "qvg": QVGCodec,
    "qvg4": QVG4Codec,
    "quantwm": QuantWMCodec,
    "kvquant": KVQuantCodec,
}


def codec_for(config: CodecConfig) -> Codec:
    """The codec of a configuration. Codecs hold no state."""
    return CODECS[config.method](config)


def payload_layout(
    config: CodecConfig, shape: Shape, compensated: bool = True
) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor of a payload, before it is encoded. Raises ShapeError."""
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape) or not shape[3]:
        raise ShapeError(f"span shape is {tuple(shape)}: expected [B, H, S, D], D at least 1")
    return codec_for(config).layout(shape, compensated)


# `decode(payload, …)` reads as the inverse of `encode(x, config)`.
decode = Payload.decode
