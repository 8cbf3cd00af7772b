"""Bytes of one span: its payload by ledger part, and what encoding and decoding take beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from steadykv.cache.packing import DENSE_BITS
from steadykv.cache.segments import part_of
from steadykv.cache.workspace import encode_workspace_nbytes, span_decode_nbytes
from steadykv.codecs import codec_for, payload_layout
from steadykv.codecs.base import FLAGS
from steadykv.config import CodecConfig

__all__ = ["SpanSize", "span_size"]

_CUDA = torch.device("cuda")  # a name: nothing is asked of a device


@dataclass(frozen=True)
class SpanSize:
    """One packed tensor [B, H, S, D].

    payload: bytes of its tensors. parts: the same by ledger part, and the flags as "counters".
    is_packed: False where packing would save nothing, so that the cache keeps the span dense.
    warm: bytes by part of what the next span starts from. encode, decode: upper bounds of what the
    kernels of a GPU, or the reference where a method has none, allocate for it.
    """

    payload: int
    parts: Mapping[str, int]
    is_packed: bool
    warm: Mapping[str, int]
    encode: int
    decode: int


@lru_cache(maxsize=4096)
def span_size(codec: CodecConfig, shape: tuple[int, int, int, int], compensated: bool) -> SpanSize:
    """Sizes of a span; compensated: whether there are query statistics to encode it with."""
    method = codec_for(codec)
    layout = payload_layout(codec, shape, compensated)
    parts: dict[str, int] = {}
    for name, spec in layout.items():
        parts[part_of(name)] = parts.get(part_of(name), 0) + spec.nbytes
    flags = shape[0] * shape[1] * sum(FLAGS[name].itemsize for name in method.flags)
    centroids = layout.get("centroids")
    kept = {"centroids", "ids"} if codec.warm_start == "ids" else {"centroids"}
    warm = parts if codec.warm_start and centroids is not None else {}
    numbers = 0 if centroids is None else centroids.nbytes // centroids.dtype.itemsize
    return SpanSize(
        payload=codec.payload_nbytes(*shape, compensated),
        parts={**parts, "counters": flags},
        is_packed=codec.bits_per_element(*shape, compensated) < DENSE_BITS,
        warm={name: nbytes for name, nbytes in warm.items() if name in kept},
        encode=encode_workspace_nbytes(codec, shape, compensated, _CUDA, method.has_kernels),
        decode=span_decode_nbytes(codec, shape, numbers),
    )
