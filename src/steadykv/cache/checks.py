"""Boundary checks of the cache: one line that says got, expected and how to fix; no host sync."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from steadykv.cache.policy import SpanPolicy
from steadykv.codecs import Calibration
from steadykv.codecs.calibration import grid_for
from steadykv.config import CacheConfig
from steadykv.errors import (
    CalibrationError,
    ConfigError,
    NonFiniteError,
    PositionError,
    ShapeError,
)

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "Geometry",
    "calibration_of",
    "check_finite",
    "check_pair",
    "check_position",
    "check_span",
    "checked_token",
    "resolve_device",
]

LAYOUTS = {"BSHD": 1, "BHSD": 2}
"""Layout -> token dimension."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Geometry:
    """What every tensor that enters or leaves one cache must look like."""

    heads: int
    head_dim: int
    frame_tokens: int
    layout: str
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "frame_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}: expected a positive integer")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout is {self.layout!r}: expected {' or '.join(LAYOUTS)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype}: expected {_one_of(DTYPES)}")

    @property
    def token_dim(self) -> int:
        return LAYOUTS[self.layout]

    def shape(self, batch: int, tokens: int, heads: int | None = None) -> tuple[int, ...]:
        """Shape in the host's layout."""
        heads = self.heads if heads is None else heads
        middle = (tokens, heads) if self.token_dim == 1 else (heads, tokens)
        return (batch, *middle, self.head_dim)

    def empty(self, batch: int, tokens: int) -> Tensor:
        """Uninitialised memory in the host's layout."""
        return torch.empty(self.shape(batch, tokens), dtype=self.dtype, device=self.device)

    def elements(self, batch: int, tokens: int) -> int:
        """Elements of so many tokens of one tensor."""
        return batch * self.heads * tokens * self.head_dim

    def nbytes(self, batch: int, tokens: int) -> int:
        """Bytes of so many dense tokens of one tensor."""
        return self.elements(batch, tokens) * self.dtype.itemsize

    def check(self, name: str, x: Tensor, batch: int | None, queries: bool = False) -> None:
        """Raise ShapeError unless `x` fits. queries: any multiple of the heads, any float dtype."""
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        got = f"{name} is {tuple(x.shape)}: expected {self._words(batch, queries)}"
        if x.dim() != 4 or x.shape[3] != self.head_dim or 0 in x.shape:
            raise ShapeError(got + self._hint(x))
        heads = x.shape[3 - self.token_dim]
        if heads % self.heads if queries else heads != self.heads:
            raise ShapeError(got + self._hint(x))
        if batch is not None and x.shape[0] != batch:
            raise ShapeError(
                f"{got}; the first write fixed the batch, call reset() before changing it"
            )
        if queries and x.dtype not in DTYPES:
            raise ShapeError(f"{name} is {x.dtype}: expected {_one_of(DTYPES)}; cast it")
        if not queries and x.dtype != self.dtype:
            raise ShapeError(
                f"{name} is {x.dtype}: expected {self.dtype}; cast it, or build the cache with "
                f"dtype={x.dtype}"
            )
        if x.device != self.device:
            raise ShapeError(
                f"{name} is on {x.device}: expected {self.device}; move it, or build the cache "
                f"with device={str(x.device)!r}"
            )

    def check_out(self, name: str, out: Tensor, batch: int, tokens: int) -> None:
        """Raise ShapeError unless `tokens` tokens can be read into `out`."""
        self.check(name, out, None)
        if out.shape[0] != batch or out.shape[self.token_dim] < tokens:
            raise ShapeError(
                f"{name} is {tuple(out.shape)}: expected batch {batch} and room for {tokens} "
                f"tokens in dimension {self.token_dim}; leave out=None to get fresh memory"
            )

    def _words(self, batch: int | None, queries: bool) -> str:
        heads = f"n*{self.heads}" if queries else str(self.heads)
        middle = ("S>0", heads) if self.token_dim == 1 else (heads, "S>0")
        sizes = ", ".join(("B" if batch is None else str(batch), *middle, str(self.head_dim)))
        return f"({sizes}) in layout {self.layout}"

    def _hint(self, x: Tensor) -> str:
        if x.dim() == 4 and x.shape[self.token_dim] == self.heads and x.shape[3] == self.head_dim:
            other = next(name for name in LAYOUTS if name != self.layout)
            return f"; if heads and tokens are swapped, build the cache with layout={other!r}"
        return ""


def resolve_device(device: torch.device | str) -> torch.device:
    """The device in full: "cuda" becomes "cuda:0". Raises ConfigError if there is none."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"device is {device!r}: expected one that this torch can use, like 'cpu' ({why})"
        ) from error


def _one_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


def calibration_of(
    calibration: Calibration | None, config: CacheConfig, layer: int, geometry: Geometry
) -> Calibration | None:
    """This layer's part, on its device; None where no codec asks for one. Else CalibrationError."""
    grids = {}
    sides = {"key": config.keys, "value": config.values}
    for tensor, codec in sides.items():
        if codec.needs_calibration:
            size = (geometry.heads, geometry.head_dim)
            grid = grid_for(calibration, codec, layer, tensor, *size)
            assert grid is not None
            grids[layer, tensor] = grid
    if grids:
        return Calibration(grids).to(geometry.device)
    if calibration is not None:
        raise CalibrationError(
            f"layer {layer}: {config.name} reads no calibration: expected none, or codecs with "
            "levels='calibrated', as in preset('kvquant_calibrated')"
        )
    return None


def checked_token(name: str, token: object, layer: int) -> int:
    """The number of a token as an int; PositionError for anything else."""
    # A tensor could be read, but that would sync the host, in every layer of every pass.
    if isinstance(token, (Tensor, bool)) or not isinstance(token, SupportsIndex):
        raise PositionError(
            f"layer {layer}: {name} is a {type(token).__name__}: expected an int; "
            "read a device tensor once a chunk, not once a layer"
        )
    return operator.index(token)


def check_position(start: object, layer: int, open_range: tuple[int, int] | None, end: int) -> int:
    """`start` as an int if it rewrites the open chunk or follows the newest; else PositionError."""
    position = checked_token("start", start, layer)
    if open_range is not None and position in open_range:
        return position
    if open_range is None and position == end:
        return position
    wanted = (
        f"{open_range[0]} (rewrite the open chunk) or {open_range[1]} (commit it, open the next)"
        if open_range is not None
        else f"{end} (the next chunk)"
    )
    raise PositionError(
        f"layer {layer}: write at token {position}: expected {wanted}; chunks follow each other "
        "without gaps, and reset() starts over at 0"
    )


def check_span(policy: SpanPolicy, frame_tokens: int, chunk_tokens: int) -> None:
    """Raise ConfigError if spans of chunks of that length are never complete in time.

    chunk_tokens: 0 where it is not known. Chunk lengths may vary, and a first chunk often differs:
    so two in a row have to be too long, and the shorter one is taken as the length of all.
    """
    longest = policy.longest_span(chunk_tokens) if chunk_tokens else 0
    rules = policy.policy
    if not longest or rules.span_chunks <= longest:
        return
    frames = -(-rules.span_chunks * chunk_tokens // frame_tokens) + rules.sink_frames
    raise ConfigError(
        f"span_chunks is {rules.span_chunks} with chunks of {chunk_tokens} tokens: expected at "
        f"most {longest} in a window of {rules.window_frames} frames of {frame_tokens} tokens, "
        "sink included, because chunks leave it before their span is complete; lower span_chunks "
        f"or set window_frames={frames}"
    )


def check_pair(name: str, pair: object) -> tuple[Tensor, Tensor]:
    """`pair` as a tuple of two; else ShapeError. What the two are is checked elsewhere."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        count = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
        raise ShapeError(
            f"{name} is a {type(pair).__name__}{count}: expected a pair of tensors (k, v)"
        )
    return pair[0], pair[1]


def check_finite(layer: int, **tensors: Tensor) -> None:
    """Raise NonFiniteError if a tensor has NaN or Inf. Syncs the host: debug mode only."""
    for name, x in tensors.items():
        bad = int(torch.isfinite(x).logical_not_().sum())
        if bad:
            raise NonFiniteError(
                f"layer {layer}: {name} {tuple(x.shape)} has {bad} NaN or Inf: expected finite "
                "numbers; find where the model makes them, or use debug=False to store 0 instead"
            )
