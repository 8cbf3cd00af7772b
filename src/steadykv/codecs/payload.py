"""The packed form of one span: named tensors, exact bytes, decode, move, save and load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from ..config import CodecConfig
from ..errors import ConfigError, PayloadError, ShapeError
from ..ops import backend_of, centroid_values, full_precision
from ..reference.blocks import Decoder
from .base import FLAGS, Shape, TensorSpec
from .files import read_tensors, write_tensors
from .rotation import stored_rotation

__all__ = ["Payload"]

FORMAT = "steadykv.payload"
VERSION = 1
_FLAG_PREFIX = "flags/"
_DECODED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Payload:
    """One encoded K or V span of shape (B, H, S, D).

    config: the codec that wrote it, and that reads it.
    shape: (B, H, S, D) of the dense span.
    tensors: what is stored, by the names of the method; contiguous, [B, H, ...] first. These are
    the counted bytes.
    flags: [B, H] counters and switches that travel with the payload and are not counted:
        `nonfinite` and `saturated` (int64 counts), for quantwm also `weight_active`,
        `psac_active` and `psac_failed` (uint8).
    """

    config: CodecConfig
    shape: Shape
    tensors: dict[str, Tensor]
    flags: dict[str, Tensor] = field(default_factory=dict)
    _decoders: dict[object, Decoder] = field(init=False, repr=False, default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(self.nbytes_by_part().values())

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes of each stored tensor."""
        return {name: t.numel() * t.element_size() for name, t in self.tensors.items()}

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of the dense span; 0 for an empty one."""
        batch, heads, tokens, head_dim = self.shape
        elements = batch * heads * tokens * head_dim
        return 8 * self.nbytes / elements if elements else 0.0

    @property
    def device(self) -> torch.device:
        """Where the stored tensors are."""
        return next(iter(self.tensors.values())).device

    @property
    def centroids(self) -> Tensor | None:
        """[B, H, T, C, D], the warm start of the next span; None without clusters.

        The stored tensor where it is BF16, a new FP32 one where it is E4M3.
        """
        return centroid_values(self.tensors) if "centroids" in self.tensors else None

    def unrefined(self) -> Payload:
        """The same payload without its refinement, sharing all other tensors; itself if none."""
        if "refinement" not in self.tensors:
            return self
        kept = {name: t for name, t in self.tensors.items() if name != "refinement"}
        return Payload(replace(self.config, refinement=0), self.shape, kept, self.flags)

    def decode(
        self,
        dtype: torch.dtype = torch.bfloat16,
        out: Tensor | None = None,
        start: int = 0,
        end: int | None = None,
        rotated: bool = False,
    ) -> Tensor:
        """Tokens start..end, dense: [B, H, end - start, D] in `dtype`, or written into `out`.

        Sums in FP32 and casts once. `out` may be any strided view of that shape (its dtype then
        counts), so that a [B, S, H, D] buffer is filled through its transpose. Allocates the result
        unless `out` is given, and without a kernel a few FP32 row blocks, bounded in
        `reference/decode.py`. Any slice equals the same rows of the whole. Does not wait for a GPU;
        `torch.compile` traces it without a break.
        rotated: leave the tokens of quarot in the frame that they are stored in, for queries turned
        by `steadykv.rotate`; other methods have none.
        Raises ShapeError for a range outside the span, for a dtype other than BF16, FP16, FP32 and
        FP64, and for an `out` that does not fit; ConfigError for `rotated` tokens of other methods.
        """
        batch, heads, tokens, head_dim = self.shape
        end = tokens if end is None else end
        if not isinstance(out, Tensor | None):
            raise ShapeError(f"out is a {type(out).__name__}: expected a torch.Tensor or None")
        wanted = dtype if out is None else out.dtype
        if wanted not in _DECODED:
            raise ShapeError(
                f"dtype is {wanted!r}: expected {' or '.join(map(str, _DECODED))}; decode to one "
                "of these and convert the result"
            )
        is_range = isinstance(start, SupportsIndex) and isinstance(end, SupportsIndex)
        if not is_range or not 0 <= start <= end <= tokens:
            raise ShapeError(
                f"token range {start!r}..{end!r}: expected integers, 0 <= start <= end <= {tokens}"
            )
        shape = (batch, heads, end - start, head_dim)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        elif tuple(out.shape) != shape or out.device != self.device:
            raise ShapeError(
                f"out is {tuple(out.shape)} on {out.device}: expected {shape} on {self.device}"
            )
        from . import codec_for

        codec = codec_for(self.config)
        if rotated:
            stored_rotation(codec, head_dim)
        if not out.numel():
            return out
        # What `torch.compile` traces cannot set it; the operators do when they run.
        is_traced = torch.compiler.is_compiling()
        with nullcontext() if is_traced else full_precision(self.device):
            if rotated or is_traced:
                decode = codec.decode_rotated if rotated else codec.decode
                decode(self.tensors, self.shape, out, start, end)
            else:
                self.decoder()(None, out, start, end)
        return out

    @property
    def can_split(self) -> bool:
        """Whether `decoder` takes parts: heads are stored apart, at known places."""
        from . import CODECS

        return not CODECS[self.config.method].pools_heads and "row_index" not in self.tensors

    def decoder(self) -> Decoder:
        """Decodes some heads and tokens into a view, unchecked; those of a part if `can_split`.

        Prepared once for each backend, as every pass of a host reads again what is stored.
        """
        from . import codec_for

        codec = codec_for(self.config)
        if torch.compiler.is_compiling():
            return codec.decoder(self.tensors, self.shape)
        key = (backend_of("decode", self.device), *map(id, self.tensors.values()))
        found = self._decoders.get(key)
        if found is None:
            self._decoders.clear()  # of tensors that were replaced
            found = self._decoders[key] = codec.decoder(self.tensors, self.shape)
        return found

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_decoders": {}}  # functions, which nothing can copy

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Payload:
        """The same payload on another device; itself if it is there already.

        Raises ShapeError for what is no device: a payload keeps the dtypes of its method.
        """
        if not isinstance(device, torch.device | str | int):
            raise ShapeError(
                f"device is {device!r}: expected a torch.device or its name; for a dtype, "
                "decode(dtype) the payload"
            )
        if torch.device(device) == self.device:
            return self
        tensors = {k: t.to(device, non_blocking=non_blocking) for k, t in self.tensors.items()}
        flags = {k: t.to(device, non_blocking=non_blocking) for k, t in self.flags.items()}
        return Payload(self.config, self.shape, tensors, flags)

    def __eq__(self, other: object) -> bool:
        """Bytewise: same config, shape, names, dtypes and bits, flags included."""
        if not isinstance(other, Payload):
            return NotImplemented
        if self.config != other.config or self.shape != other.shape:
            return False
        return all(
            mine.keys() == theirs.keys() and all(_same_bits(mine[k], theirs[k]) for k in mine)
            for mine, theirs in ((self.tensors, other.tensors), (self.flags, other.flags))
        )

    __hash__ = None  # type: ignore[assignment]

    def header(self) -> dict[str, Any]:
        """What a reader has to know beside the tensors; JSON-able."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "config": self.config.to_dict(),
            "shape": list(self.shape),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name; flags under "flags/". No copies."""
        return {**self.tensors, **{_FLAG_PREFIX + k: t for k, t in self.flags.items()}}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Payload:
        """Inverse of `state_dict` and `header`; checks names, shapes, dtypes and indices."""
        from . import codec_for

        if header.get("format") != FORMAT or header.get("version") != VERSION:
            raise PayloadError(
                f"header says {header.get('format')!r} version {header.get('version')!r}: "
                f"expected {FORMAT!r} version {VERSION}"
            )
        shape = _shape_of(header.get("shape"))
        try:
            config = CodecConfig.from_dict(header.get("config"))  # type: ignore[arg-type]
        except (ConfigError, TypeError) as error:
            raise PayloadError(f"header has a config this release cannot read: {error}") from error
        flags = {
            k.removeprefix(_FLAG_PREFIX): t
            for k, t in tensors.items()
            if k.startswith(_FLAG_PREFIX)
        }
        stored = {k: t for k, t in tensors.items() if not k.startswith(_FLAG_PREFIX)}
        for name, flag in flags.items():
            if name not in FLAGS:
                raise PayloadError(f"unknown flag {name!r}: expected {', '.join(FLAGS)}")
            _check(name, flag, TensorSpec(shape[:2], FLAGS[name]))
        codec = codec_for(config)
        layout = codec.stored_layout(shape, stored)
        if stored.keys() != layout.keys():
            raise PayloadError(f"tensors are {sorted(stored)}: expected {sorted(layout)}")
        for name, item in layout.items():
            _check(name, stored[name], item)
        codec.check_indices(shape, stored)
        return cls(config, shape, {name: stored[name] for name in layout}, flags)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file; it appears under its name only when it is complete."""
        write_tensors(path, self.state_dict(), self.header())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Payload:
        """Reads what `save` wrote, bit for bit; a file that is something else is a PayloadError, a
        missing one a FileNotFoundError."""
        tensors, header = read_tensors(path, FORMAT, "payload", PayloadError, device)
        return cls.from_state(tensors, header)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Bytes, because NaN never equals itself and uint16 and FP8 have few operators.
    flat = [t.contiguous().reshape(-1).view(torch.uint8).to("cpu") for t in (a, b)]
    return torch.equal(*flat)


def _shape_of(value: Any) -> Shape:
    if not isinstance(value, list | tuple) or len(value) != 4:
        raise PayloadError(f"header has shape {value!r}: expected [B, H, S, D]")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value) or not value[3]:
        raise PayloadError(f"header has shape {value!r}: expected non-negative integers, D above 0")
    return value[0], value[1], value[2], value[3]


def _check(name: str, tensor: Tensor, item: TensorSpec) -> None:
    if tuple(tensor.shape) != item.shape or tensor.dtype != item.dtype:
        raise PayloadError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}: expected {item.shape} {item.dtype}"
        )
