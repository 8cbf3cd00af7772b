"""Every method on every captured span: the cells, and one row a method. See docs/tensors.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from steadykv.cache.packing import DENSE_BITS
from steadykv.capture import CaptureFile, SpanTensors, rotate_pairs
from steadykv.codecs import Calibration
from steadykv.config import PRESETS, CacheConfig, parse_method, preset
from steadykv.errors import ConfigError, SteadyKVError
from steadykv.evaluation.attention_parts import (
    QUERY_MEASURES,
    attention_parts,
    mean_parts,
    query_groups,
)
from steadykv.evaluation.calibrated import check_for_file, describe_calibration
from steadykv.evaluation.metrics.tensors import attention_sums, relative_error, sqnr_db
from steadykv.evaluation.protocol import TOP_K
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.tensor_packing import SIDES, PackedSide, SpanPacker

SCHEMA_VERSION = 1

TENSOR_MEASURES = ("key_error", "value_error", "key_sqnr_db", "value_sqnr_db")
TIMES = ("encode_ms", "decode_ms")

OnProgress = Callable[[int, int, str], None]
"""(done, in all, what): every method on every cell is one step."""


@dataclass
class TensorResult:
    """rows: one per method. cells: one per method, layer and span. skipped: method -> why.

    notes: what a reader of the numbers has to know. file: what was read. environment: versions.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    file: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: what `tensors.json` holds."""
        return {"version": SCHEMA_VERSION, **asdict(self)}


def default_methods(is_calibrated: bool = False) -> tuple[str, ...]:
    """Every preset that packs something by itself; of those with equal codecs, one.

    What needs a calibration is left out unless there is one: fitted to the file that it is judged
    on, it would win.
    """
    seen: set[Any] = set()
    names = []
    for name in PRESETS:
        config = preset(name)
        codecs = (config.keys, config.values)
        is_dense = all(codec.is_dense for codec in codecs)
        is_ready = is_calibrated or not config.needs_calibration
        if codecs not in seen and not is_dense and is_ready:
            names.append(name)
        seen.add(codecs)
    return tuple(names)


def automatic_centroids(tokens: int) -> int:
    """The largest power of two up to 256 whose codebook costs at most half a bit: 16·C/S <= 1/2.

    32 at 1,152 tokens, and the papers' 256 from 8,192 tokens on.
    """
    return 1 << min(8, max(0, (tokens // 32).bit_length() - 1))


def configurations(
    file: CaptureFile,
    methods: Sequence[str],
    centroids: int | None,
    calibration: Calibration | None = None,
) -> dict[str, CacheConfig]:
    """Method -> configuration.

    Raises ConfigError for unknown or repeated names and for methods that need a calibration if
    there is none, or the reverse; CalibrationError for one that does not fit a method or the file.
    """
    if not methods or len(set(methods)) != len(methods):
        raise ConfigError(f"methods is {list(methods)}; expected at least one, and none twice")
    count = centroids
    if count is None:
        count = automatic_centroids(file.longest_span)
    found = {}
    for method in methods:
        config = parse_method(method)
        found[method] = config.with_span(config.policy.span_chunks, count).replace(name=method)
    check_for_file(calibration, found, file)
    return found


def compare_tensors(
    file: CaptureFile,
    methods: Sequence[str] | None = None,
    *,
    centroids: int | None = None,
    calibration: Calibration | None = None,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> TensorResult:
    """Pack every span of `file` with every method (default: `default_methods`) and compare.

    centroids: of clustering codecs; None is `automatic_centroids` of the longest span.
    calibration: for methods with fixed levels, and only if there are some.
    One cell is on the device at a time, with one method's result. A method that refuses these
    tensors is left out and named in `skipped`. Raises what `configurations` raises, PayloadError
    for NaN or Inf in the file, and what the codecs raise if all of them refuse.
    """
    names = methods or default_methods(calibration is not None)
    configs = configurations(file, names, centroids, calibration)
    fixed = None if calibration is None else calibration.to(device)
    packers = {method: SpanPacker(config, fixed) for method, config in configs.items()}
    result = TensorResult(file=_describe(file), environment=environment(device))
    refusal: SteadyKVError | None = None
    done, total = 0, len(file.cells) * len(packers)
    for cell in file.cells:
        span = file.load(cell, device)
        for method in list(packers):
            if on_progress is not None:
                on_progress(done, total, f"layer {cell[0]}")
            done += 1
            try:
                found = _measure(method, packers[method], span, file.needs_rope)
            except SteadyKVError as error:
                refusal = error
                result.skipped[method] = str(error)
                del packers[method]
                total -= len(file.cells) - file.cells.index(cell) - 1
                continue
            result.cells.append(found)
    if refusal is not None and not packers:
        raise refusal
    result.cells = [found for found in result.cells if found["method"] in packers]
    result.rows = [_row(configs[method], result.cells) for method in packers]
    if calibration is not None:
        judged = () if file.header is None else file.header.rows
        found = describe_calibration(calibration, judged)
        for row in result.rows:
            if configs[row["method"]].needs_calibration:
                row["configuration"]["calibration"] = found
    result.notes = _notes(file, configs, result)
    return result


def _measure(
    method: str, packer: SpanPacker, span: SpanTensors, needs_rope: bool
) -> dict[str, Any]:
    """One cell: every number of one method on one span of one layer."""
    packed = packer.pack(span)
    keys, values = packed["keys"], packed["values"]
    numbers: dict[str, float | None] = {
        "key_error": relative_error(span.k, keys.decoded),
        "value_error": relative_error(span.v, values.decoded),
        "key_sqnr_db": sqnr_db(span.k, keys.decoded),
        "value_sqnr_db": sqnr_db(span.v, values.decoded),
        **dict.fromkeys(QUERY_MEASURES),
    }
    selections, parts = 0, attention_parts(None, [])
    if span.q is not None and (span.rope is not None or not needs_rope):
        originals = span.k, keys.decoded
        if needs_rope and span.rope is not None:
            originals = rotate_pairs(span.k, span.rope), rotate_pairs(keys.decoded, span.rope)
        steps, groups = query_groups(span)
        sums = attention_sums(
            span.q, originals[0], span.v, originals[1], values.decoded, groups=groups, top_k=TOP_K
        )
        errors = sums.errors()
        numbers |= {name: getattr(errors, name) for name in QUERY_MEASURES}
        selections, parts = errors.selections, attention_parts(sums, steps)
    return {
        "method": method,
        "layer": span.layer,
        "span": span.span,
        "tokens": span.k.shape[2],
        "is_warm": keys.is_warm or values.is_warm,
        "has_statistics": packer.statistics(span) is not None,
        "selections": selections,
        **_sizes(packed),
        # JSON has no infinity: a perfect signal-to-noise ratio is null.
        **{name: None if x is None or not math.isfinite(x) else x for name, x in numbers.items()},
        "encode_ms": sum(packed[side].encode_ms for side in SIDES),
        "decode_ms": sum(packed[side].decode_ms for side in SIDES),
        **parts,
    }


def _sizes(packed: Mapping[str, PackedSide]) -> dict[str, Any]:
    bits = {side: packed[side].payload.bits_per_element for side in SIDES}
    return {
        "bits_per_element": sum(bits.values()) / 2,
        "keys_bits": bits["keys"],
        "values_bits": bits["values"],
        "bits_by_part": {side: dict(packed[side].bits_by_part()) for side in SIDES},
        "nbytes": sum(packed[side].payload.nbytes for side in SIDES),
    }


def _row(config: CacheConfig, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method: means over its cells, bits weighted by their tokens, medians of the times."""
    own = [cell for cell in cells if cell["method"] == config.name]
    tokens = sum(cell["tokens"] for cell in own)

    def weighted(values: Sequence[float]) -> float:
        pairs = zip(values, own, strict=True)
        return sum(value * cell["tokens"] for value, cell in pairs) / tokens

    parts: dict[str, dict[str, float]] = {}
    for side in SIDES:
        by_part = [cell["bits_by_part"][side] for cell in own]
        names = dict.fromkeys(part for bits in by_part for part in bits)
        parts[side] = {p: weighted([bits.get(p, 0.0) for bits in by_part]) for p in names}
    sizes = ("bits_per_element", "keys_bits", "values_bits")
    return {
        "version": SCHEMA_VERSION,
        "method": config.name,
        "keys": config.keys.method,
        "values": config.values.method,
        **{name: weighted([cell[name] for cell in own]) for name in sizes},
        "bits_by_part": parts,
        **{name: _mean(own, name) for name in (*TENSOR_MEASURES, *QUERY_MEASURES)},
        **{name: statistics.median(cell[name] for cell in own) for name in TIMES},
        "n_cells": len(own),
        "n_cells_with_queries": sum(cell["selections"] > 0 for cell in own),
        "n_cells_warm": sum(cell["is_warm"] for cell in own),
        "n_cells_with_statistics": sum(cell["has_statistics"] for cell in own),
        "selections": sum(cell["selections"] for cell in own),
        **mean_parts(own),
        "configuration": {"cache": config.to_dict()},
    }


def _mean(cells: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [cell[name] for cell in cells if cell[name] is not None]
    return sum(found) / len(found) if found else None


def _describe(file: CaptureFile) -> dict[str, Any]:
    shapes = [file.shape(cell) for cell in file.cells]
    return {
        "name": file.path.name,
        "header": None if file.header is None else file.header.to_dict(),
        "layers": list(file.layers),
        "spans": list(file.spans),
        "shapes": sorted({tuple(shape) for shape in shapes if shape is not None}),
    }


def _notes(
    file: CaptureFile, configs: Mapping[str, CacheConfig], result: TensorResult
) -> list[str]:
    """What has to be said beside the numbers."""
    notes = [f"{method} left out: {why}" for method, why in result.skipped.items()]
    row = result.rows[0]
    count, measured = row["n_cells"], row["n_cells_with_queries"]
    needing = "logits, token shift, softmax KL and attention output"
    if not measured:
        why = "the file has no q"
        if file.needs_rope and any(file.shape(cell, "q") for cell in file.cells):
            why = "keys are stored before RoPE and the file has no rope table"
        notes.append(f"{why}: {needing} are left out")
    elif measured < count:
        notes.append(
            f"{count - measured} of {count} spans have no later queries: {needing} are means over "
            "the others"
        )
    for own in result.rows:
        cold = count - own["n_cells_with_statistics"]
        if configs[own["method"]].keys.needs_queries and cold:
            notes.append(
                f"{own['method']} packs {cold} of {count} spans without query statistics, as a "
                "first span: no correction, unit weights"
            )
        if own["bits_per_element"] >= DENSE_BITS:
            notes.append(
                f"{own['method']} takes {own['bits_per_element']:.1f} bits: a cache would keep "
                "spans this short dense"
            )
        shared = own["configuration"].get("calibration", {}).get("shared_walks")
        if shared:
            notes.append(
                f"{own['method']} was calibrated on walks that it is judged on here "
                f"({'; '.join(shared)}): its errors on others may be larger"
            )
    if any(shape[1] > shape[2] for shape in result.file["shapes"]):
        notes.append(
            "more heads than tokens: if the tensors are [B, S, H, D], transpose them before saving"
        )
    return notes
