"""The file: a versioned header and named tensors in safetensors. See docs/tensors.md."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from steadykv.cache.policy import TokenRange
from steadykv.codecs.files import write_tensors
from steadykv.config import CachePolicy
from steadykv.errors import ConfigError, PayloadError

__all__ = [
    "FORMAT",
    "PARTS",
    "VERSION",
    "CaptureHeader",
    "CapturedSpan",
    "SpanEntry",
    "rope_name",
    "tensor_name",
    "write_capture",
]

FORMAT = "steadykv.capture"
VERSION = 1

PARTS = ("k", "v", "q", "moment", "moment_count", "query_token", "query_step", "query_clean")
"""Tensors of one layer and span."""

STATISTICS = ("history", "own", "none")
KEY_ROPE = ("post", "pre")


def tensor_name(layer: int, span: int, part: str) -> str:
    """The name of a tensor of one layer and span."""
    return f"layer{layer}/span{span}/{part}"


def rope_name(span: int) -> str:
    """The name of a span's table of cosines and sines, which all layers share."""
    return f"span{span}/rope"


@dataclass(frozen=True)
class CapturedSpan:
    """One span of one layer; tensors are contiguous and on the CPU.

    k, v: [B, H, S, D] as they were committed, in the host's dtype; H counts the kept heads. Tokens
    [start, end), made of `chunks`.
    moment: FP32 [B, H, D, D] mean of q q^T of all passes that a query-aware cache knows when it
    packs this span, in the frame of the stored keys, and moment_count: int64 [B, H]. statistics:
    "history", or "own" in a first span, before which nothing was packed: its own commit passes,
    which a cache uses only if it is told to; "none" (moment is None) where no query was seen.
    q: [B, n·H, N, D] later queries as attention uses them (after RoPE), None where there are none;
    query_token: int64 [N] positions; query_step: int32 [N] passes within their chunk, from 0 on;
    query_clean: uint8 [N], 1 where that pass committed its chunk.
    """

    layer: int
    index: int
    start: int
    end: int
    chunks: tuple[TokenRange, ...]
    k: Tensor
    v: Tensor
    statistics: str
    moment: Tensor | None
    moment_count: Tensor | None
    q: Tensor | None
    query_token: Tensor
    query_step: Tensor
    query_clean: Tensor

    def entry(self) -> SpanEntry:
        """What the header says about it."""
        queries = 0 if self.q is None else self.q.shape[2]
        return SpanEntry(self.index, self.start, self.end, self.chunks, self.statistics, queries)

    def tensors(self) -> dict[str, Tensor]:
        """By name, as in the file."""
        optional = ("q", "query_token", "query_step", "query_clean")
        parts = {
            part: getattr(self, part)
            for part in PARTS
            if getattr(self, part) is not None and (self.q is not None or part not in optional)
        }
        return {tensor_name(self.layer, self.index, part): t for part, t in parts.items()}


@dataclass(frozen=True)
class SpanEntry:
    """A span as the header describes it, equal in all layers."""

    index: int
    start: int
    end: int
    chunks: tuple[TokenRange, ...]
    statistics: str
    queries: int


@dataclass(frozen=True)
class CaptureHeader:
    """What a reader has to know beside the tensors.

    model: its "name", and whatever the host adds. num_layers, num_heads (key/value heads),
    query_heads: of the model, of which `layers` and `heads` (key/value heads) are kept.
    rows: what the batch rows are, such as {"episode": …, "seed": …}; as many as there are rows.
    dtype: of k and v. key_rope: whether keys are stored after ("post") or before ("pre") their
    rotary embedding. policy: of the recording. queries, query_seed: the sample asked for.
    environment: versions and device.
    """

    model: dict[str, Any]
    num_layers: int
    num_heads: int
    query_heads: int
    head_dim: int
    frame_tokens: int
    rows: tuple[dict[str, Any], ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    dtype: str
    key_rope: str
    policy: CachePolicy
    queries: int
    query_seed: int
    environment: dict[str, Any]
    spans: tuple[SpanEntry, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with format and version."""
        data = dataclasses.asdict(self)
        return {"format": FORMAT, "version": VERSION, **data, "policy": self.policy.to_dict()}

    @classmethod
    def from_dict(cls, data: Any, source: str = "header") -> CaptureHeader:
        """Inverse of `to_dict`; PayloadError for anything else. Unknown fields are ignored."""
        if not isinstance(data, dict):
            raise PayloadError(f"{source}: got a {type(data).__name__}, expected an object")
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise PayloadError(
                f"{source}: got format {data.get('format')!r} version {data.get('version')!r}, "
                f"expected {FORMAT!r} version {VERSION}; capture it again with this release"
            )
        try:
            return cls._checked(data)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise PayloadError(
                f"{source}: got a damaged header ({reason}), expected what capture wrote"
            ) from error

    @classmethod
    def _checked(cls, data: Mapping[str, Any]) -> CaptureHeader:
        sizes = ("num_layers", "num_heads", "query_heads", "head_dim", "frame_tokens")
        values: dict[str, Any] = {name: _whole(data[name], 1, name) for name in sizes}
        values |= {name: _whole(data[name], 0, name) for name in ("queries", "query_seed")}
        values |= {
            name: tuple(_whole(n, 0, name) for n in data[name]) for name in ("layers", "heads")
        }
        for name, kind in (("model", dict), ("environment", dict), ("rows", list), ("dtype", str)):
            if not isinstance(data[name], kind):
                raise TypeError(f"{name} is a {type(data[name]).__name__}, not a {kind.__name__}")
            values[name] = tuple(data[name]) if kind is list else data[name]
        if not all(isinstance(row, dict) for row in values["rows"]):
            raise TypeError("rows are not objects")
        return cls(
            **values,
            key_rope=_one_of(data["key_rope"], KEY_ROPE, "key_rope"),
            policy=CachePolicy.from_dict(data["policy"]),
            spans=tuple(_entry(span) for span in data["spans"]),
        )


def _entry(data: Mapping[str, Any]) -> SpanEntry:
    numbers = {
        name: _whole(data[name], 0, f"span {name}") for name in ("index", "start", "end", "queries")
    }
    return SpanEntry(
        **numbers,
        chunks=tuple((_whole(a, 0, "chunk"), _whole(b, 0, "chunk")) for a, b in data["chunks"]),
        statistics=_one_of(data["statistics"], STATISTICS, "statistics"),
    )


def _whole(value: Any, least: int, name: str) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}, not a whole number of at least {least}")
    return value


def _one_of(value: Any, choices: tuple[str, ...], name: str) -> str:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(choices)}")
    return str(value)


def write_capture(
    path: str | os.PathLike[str],
    header: CaptureHeader,
    spans: Iterable[CapturedSpan],
    rope: Mapping[int, Tensor] | None = None,
) -> int:
    """Write one file, which appears under its name only when it is complete; returns its bytes.

    header: without spans, which are taken from `spans` (any order; every kept layer has the same).
    rope: span -> FP32 [2, S, D/2] cosines and sines of its tokens, for keys stored before RoPE.
    Allocates nothing but the header. Raises SteadyKVError where the system refuses to write.
    """
    spans = sorted(spans, key=lambda span: (span.layer, span.index))
    entries = {span.index: span.entry() for span in spans}
    whole = dataclasses.replace(header, spans=tuple(entries[i] for i in sorted(entries)))
    tensors = {name: t for span in spans for name, t in span.tensors().items()}
    tensors |= {rope_name(index): table for index, table in (rope or {}).items()}
    write_tensors(path, tensors, whole.to_dict())
    return Path(path).stat().st_size
