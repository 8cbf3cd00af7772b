"""Reads a capture, or a user's own tensors, one layer and span at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steadykv.capture.format import FORMAT, PARTS, CaptureHeader, rope_name, tensor_name
from steadykv.codecs import QueryMoment
from steadykv.errors import PayloadError

__all__ = ["CaptureFile", "Cell", "SpanTensors", "open_capture"]

Cell = tuple[int, int]
"""(layer, span)."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAME = re.compile(r"(?:layer(\d{1,9})/span(\d{1,9})/)?(\w+)")


@dataclass(frozen=True)
class SpanTensors:
    """One cell of the file: k, v [B, H, S, D]; q [B, n·H, N, D], moment and rope or None.

    query_step, query_clean [N]: pass of each query within its chunk, and whether it was the one
    that committed the chunk; None in files that do not say.
    has_own_statistics: the moment is that of the span's own commit passes, which only a codec with
    `first_span="own"` may use.
    """

    layer: int
    span: int
    k: Tensor
    v: Tensor
    q: Tensor | None
    moment: QueryMoment | None
    has_own_statistics: bool
    rope: Tensor | None
    query_step: Tensor | None = None
    query_clean: Tensor | None = None


class CaptureFile:
    """An opened file: what it holds, checked; tensors are loaded cell by cell.

    header: None for a user's own file. cells: (layer, span) that have k and v, layer by layer,
    spans ascending. shapes: name -> shape.
    """

    def __init__(
        self,
        path: Path,
        header: CaptureHeader | None,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
    ) -> None:
        self.path, self.header = path, header
        self.shapes, self._dtypes = dict(shapes), dict(dtypes)
        self._names = _by_cell(self.shapes)
        self.cells: tuple[Cell, ...] = tuple(sorted(self._names))
        self._check()

    # --- what it holds ------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have at least one span."""
        return tuple(dict.fromkeys(layer for layer, _ in self.cells))

    @property
    def spans(self) -> tuple[int, ...]:
        """Spans that at least one layer has."""
        return tuple(sorted({span for _, span in self.cells}))

    @property
    def longest_span(self) -> int:
        """Tokens of the longest span."""
        return max(self.shapes[names["k"]][2] for names in self._names.values())

    def shape(self, cell: Cell, part: str = "k") -> tuple[int, ...] | None:
        """The shape of one tensor of a cell, None where the cell has none."""
        name = self._names[cell].get(part)
        return None if name is None else self.shapes[name]

    @property
    def needs_rope(self) -> bool:
        """Whether keys are stored before their rotary embedding."""
        return self.header is not None and self.header.key_rope == "pre"

    def rope_shape(self, span: int) -> tuple[int, ...] | None:
        """Of a span's table of cosines and sines, None where there is none."""
        return self.shapes.get(rope_name(span))

    # --- loading ------------------------------------------------------------------------------

    def load(self, cell: Cell, device: torch.device | str = "cpu") -> SpanTensors:
        """Tensors of one cell on `device`; a count of 0 queries everywhere is no moment.

        Raises PayloadError for NaN or Inf among them, and for statistics that no queries have.
        """
        layer, span = cell
        names = dict(self._names[cell])
        if self.rope_shape(span) is not None:
            names["rope"] = rope_name(span)
        try:
            with safe_open(str(self.path), framework="pt", device="cpu") as file:
                tensors = {part: file.get_tensor(name).to(device) for part, name in names.items()}
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.path, error) from error
        for part, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor)).sum())
                raise PayloadError(
                    f"{self.path}: {names[part]} holds {bad:,} NaN or Inf, expected finite "
                    "numbers; replace them before saving"
                )
        moment = None
        if "moment" in tensors and bool(tensors["moment_count"].any()):
            moment = self._statistics_of(names, tensors["moment"], tensors["moment_count"])
        return SpanTensors(
            layer=layer,
            span=span,
            k=tensors["k"],
            v=tensors["v"],
            q=tensors.get("q"),
            moment=moment,
            has_own_statistics=self._statistics(span) == "own",
            rope=tensors.get("rope"),
            query_step=tensors.get("query_step"),
            query_clean=tensors.get("query_clean"),
        )

    def _statistics_of(
        self, names: Mapping[str, str], moment: Tensor, count: Tensor
    ) -> QueryMoment:
        """The mean of q q^T over `count` queries; refused where it can be none."""
        if int(count.min()) < 0:
            raise PayloadError(
                f"{self.path}: {names['moment_count']} reaches {int(count.min())}, expected "
                "numbers of queries, 0 where there are none"
            )
        diagonal = moment.diagonal(dim1=-2, dim2=-1)
        if float(diagonal.min()) < 0:
            raise PayloadError(
                f"{self.path}: {names['moment']} has {float(diagonal.min()):.3g} on its diagonal, "
                "expected means of squares; save what QueryMoment holds"
            )
        # Sums of products may be rounded in two orders, but not apart by this much.
        apart = (moment - moment.mT).abs().amax((-2, -1))
        if bool((apart > 1e-3 * diagonal.amax(-1)).any()):
            raise PayloadError(
                f"{self.path}: {names['moment']} is not symmetric, by up to "
                f"{float(apart.max()):.3g}; expected the mean of q q^T, as QueryMoment holds it"
            )
        return QueryMoment(moment, count)

    def _statistics(self, span: int) -> str:
        entries = () if self.header is None else self.header.spans
        return next((entry.statistics for entry in entries if entry.index == span), "history")

    # --- checks -------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self.cells:
            found = ", ".join(sorted(self.shapes)[:6]) or "nothing"
            raise PayloadError(
                f"{self.path}: got tensors {found}; expected k and v [B, H, S, D], and if there "
                "are queries q [B, H, N, D]; docs/tensors.md describes the file"
            )
        for cell in self.cells:
            names = self._names[cell]
            if missing := {"k", "v"} - names.keys():
                raise PayloadError(
                    f"{self.path}: {_where(cell, names)} lacks {missing.pop()}; expected k and v "
                    "of the same tokens"
                )
            self._check_cell(names)
        if self.header is not None:
            self._check_header(self.header)
        for span in self.spans:
            self._check_rope(span)

    def _check_cell(self, names: Mapping[str, str]) -> None:
        shape = self.shapes[names["k"]]
        if len(shape) != 4 or 0 in shape:
            raise self._wrong(names["k"], "[B, H, S, D] with no dimension of 0")
        if self.shapes[names["v"]] != shape:
            raise self._wrong(names["v"], f"the shape of {names['k']}, {list(shape)}")
        batch, heads, _, head_dim = shape
        for part in {"k", "v", "q"} & names.keys():
            if self._dtypes[names[part]] not in _DTYPES:
                raise self._wrong(names[part], f"{' or '.join(_DTYPES)}; cast it")
        if "q" in names:
            q = self.shapes[names["q"]]
            fits = len(q) == 4 and (q[0], q[3]) == (batch, head_dim) and q[1] and not q[1] % heads
            if not fits or not q[2]:
                raise self._wrong(names["q"], f"[{batch}, a multiple of {heads}, N, {head_dim}]")
        if "moment" in names:
            expected = {"moment": ((batch, heads, head_dim, head_dim), "F32"),
                        "moment_count": ((batch, heads), "I64")}  # fmt: skip
            for part, (wanted, dtype) in expected.items():
                if part not in names:
                    raise PayloadError(f"{self.path}: {names['moment']} has no {part} beside it")
                if self.shapes[names[part]] != wanted or self._dtypes[names[part]] != dtype:
                    raise self._wrong(names[part], f"{list(wanted)} {dtype}")

    def _check_rope(self, span: int) -> None:
        shape = self.rope_shape(span)
        if shape is None:
            return
        _, _, tokens, head_dim = next(self.shapes[n["k"]] for c, n in self._names.items()
                                      if c[1] == span)  # fmt: skip
        if shape != (2, tokens, head_dim // 2) or self._dtypes[rope_name(span)] != "F32":
            raise self._wrong(rope_name(span), f"[2, {tokens}, {head_dim // 2}] F32")

    def _check_header(self, header: CaptureHeader) -> None:
        """The tensors are those that the header names."""
        wanted = {(layer, entry.index) for layer in header.layers for entry in header.spans}
        if set(self.cells) != wanted:
            odd = sorted(wanted ^ set(self.cells))[0]
            state = "lacks" if odd in wanted else "holds an unexpected"
            raise PayloadError(
                f"{self.path}: {state} layer {odd[0]} span {odd[1]}, against its header; "
                "capture it again"
            )
        tokens = {entry.index: entry.end - entry.start for entry in header.spans}
        for cell in self.cells:
            name = tensor_name(*cell, "k")
            expected = (len(header.rows), len(header.heads), tokens[cell[1]], header.head_dim)
            if self.shapes[name] != expected:
                raise self._wrong(name, f"{list(expected)}, as its header says")

    def _wrong(self, name: str, expected: str) -> PayloadError:
        got = f"{list(self.shapes[name])} {self._dtypes[name]}"
        return PayloadError(f"{self.path}: {name} is {got}, expected {expected}")


def open_capture(path: str | Path) -> CaptureFile:
    """Open a capture, or any safetensors file with k and v; its tensors are not loaded yet.

    Raises PayloadError, in one line, for a file that is missing, is no safetensors, has another
    version or a damaged header, or whose tensors do not fit each other.
    """
    source = Path(path)
    try:
        with safe_open(str(source), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: str(part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise _unreadable(source, error) from error
    header = None
    if FORMAT in metadata:
        header = CaptureHeader.from_dict(_json(metadata[FORMAT]), str(source))
    return CaptureFile(source, header, shapes, dtypes)


def _by_cell(shapes: Mapping[str, tuple[int, ...]]) -> dict[Cell, dict[str, str]]:
    """(layer, span) -> part -> tensor name; plain names are layer 0, span 0."""
    cells: dict[Cell, dict[str, str]] = {}
    for name in sorted(shapes):
        match = _NAME.fullmatch(name)
        if match is not None and match[3] in PARTS:
            cells.setdefault((int(match[1] or 0), int(match[2] or 0)), {})[match[3]] = name
    return {cell: names for cell, names in cells.items() if names.keys() & {"k", "v"}}


def _where(cell: Cell, names: Mapping[str, str]) -> str:
    is_plain = all("/" not in name for name in names.values())
    return "it" if is_plain else f"layer {cell[0]} span {cell[1]}"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _unreadable(path: Path, error: Exception) -> PayloadError:
    if path.is_dir():
        return PayloadError(f"{path}: got a folder, expected a safetensors file in it or elsewhere")
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return PayloadError(
        f"{path}: got no readable safetensors file ({reason}); expected what capture wrote, or "
        "tensors k and v"
    )
