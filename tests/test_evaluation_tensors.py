"""Every method on captured spans: cells, rows, warm starts, statistics, notes, and their schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from steadykv.capture import Selection, open_capture, rotate_pairs
from steadykv.capture.reader import CaptureFile
from steadykv.codecs import CODECS, QueryMoment, encode
from steadykv.codecs.kivi import KIVICodec
from steadykv.config import PRESETS, preset
from steadykv.errors import ConfigError, ShapeError
from steadykv.evaluation.metrics.tensors import attention_errors, relative_error, sqnr_db
from steadykv.evaluation.results import to_json
from steadykv.evaluation.tensor_comparison import (
    QUERY_MEASURES,
    TENSOR_MEASURES,
    TensorResult,
    automatic_centroids,
    compare_tensors,
    configurations,
    default_methods,
)
from steadykv.evaluation.tensor_packing import SpanPacker
from steadykv.evaluation.world_capture import capture_world
from tests.codecs import sample_queries, sample_tokens
from tests.worlds import tiny_episodes, tiny_world

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "tensors.md"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> CaptureFile:
    """Two layers, three spans of 144 tokens; the last span has no later queries."""
    path = tmp_path_factory.mktemp("capture") / "c.safetensors"
    capture_world(tiny_world(), tiny_episodes(2), path, Selection(queries=50), frames=15)
    return open_capture(path)


@pytest.fixture(scope="module")
def result(file: CaptureFile) -> TensorResult:
    return compare_tensors(file)


def cells_of(result: TensorResult, method: str) -> list[dict[str, Any]]:
    return [cell for cell in result.cells if cell["method"] == method]


def save(path: Path, **tensors: torch.Tensor) -> CaptureFile:
    save_file({name: x.contiguous() for name, x in tensors.items()}, str(path))
    return open_capture(path)


# --- what is compared -----------------------------------------------------------------------


def test_every_preset_that_packs_is_compared_once(result: TensorResult) -> None:
    names = default_methods()
    assert [row["method"] for row in result.rows] == list(names)
    for name in PRESETS:
        config = preset(name)
        codecs = (config.keys, config.values)
        equal = [other for other in names if (preset(other).keys, preset(other).values) == codecs]
        is_dense = all(codec.is_dense for codec in codecs)
        assert len(equal) == (0 if is_dense or config.needs_calibration else 1)


def test_a_cell_is_what_its_functions_say(file: CaptureFile, result: TensorResult) -> None:
    """quantwm on layer 1: packed by hand along the spans, measured by the public functions."""
    config = preset("quantwm").with_span(1, centroids=automatic_centroids(144))
    packer = SpanPacker(config)
    for cell in cells_of(result, "quantwm")[3:]:
        span = file.load((1, cell["span"]))
        packed = packer.pack(span)
        k, v = packed["keys"].decoded, packed["values"].decoded
        assert (cell["layer"], cell["tokens"]) == (1, 144)
        assert cell["key_error"] == relative_error(span.k, k)
        assert cell["value_error"] == relative_error(span.v, v)
        assert cell["key_sqnr_db"] == sqnr_db(span.k, k)
        assert cell["value_sqnr_db"] == sqnr_db(span.v, v)
        assert cell["nbytes"] == sum(side.payload.nbytes for side in packed.values())
        assert cell["keys_bits"] == packed["keys"].payload.bits_per_element
        assert 0 < cell["encode_ms"] < 10_000
        assert 0 < cell["decode_ms"] < 10_000
        if cell["span"] == 2:
            assert all(cell[name] is None for name in QUERY_MEASURES)
            assert cell["selections"] == 0
            continue
        assert span.q is not None
        errors = attention_errors(span.q, span.k, span.v, k, v)
        # A cell sums by heads first, in FP64: the last bit may differ.
        assert {name: cell[name] for name in QUERY_MEASURES} == pytest.approx(
            {name: getattr(errors, name) for name in QUERY_MEASURES}, rel=1e-14
        )
        assert cell["selections"] == 2 * 2 * 50


def test_warm_starts_and_statistics_run_along_the_spans(
    file: CaptureFile, result: TensorResult
) -> None:
    for method in default_methods():
        config, cells = preset(method), cells_of(result, method)
        spans = [(cell["layer"], cell["span"]) for cell in cells]
        assert spans == [(layer, span) for layer in (0, 1) for span in (0, 1, 2)]
        clusters = any(
            codec.warm_start and "centroids" in cells[0]["bits_by_part"][side]
            for side, codec in (("keys", config.keys), ("values", config.values))
        )
        assert [cell["is_warm"] for cell in cells] == [clusters and s > 0 for _, s in spans]
        first = 0 if config.keys.first_span == "own" else 1
        expected = [config.keys.needs_queries and s >= first for _, s in spans]
        assert [cell["has_statistics"] for cell in cells] == expected
    packer = SpanPacker(preset("qvg", centroids=4))
    payloads = [packer.pack(file.load((0, index)))["keys"].payload for index in (0, 1)]
    cold = SpanPacker(preset("qvg", centroids=4)).pack(file.load((0, 1)))["keys"].payload
    by_hand = encode(file.load((0, 1)).k, preset("qvg", centroids=4).keys, warm=payloads[0])
    assert payloads[1] == by_hand != cold


def test_spans_that_do_not_follow_each_other_start_cold(file: CaptureFile) -> None:
    packer = SpanPacker(preset("qvg", centroids=4))
    warm = [packer.pack(file.load(cell))["keys"].is_warm
            for cell in [(0, 0), (0, 2), (1, 2), (1, 0), (1, 1)]]  # fmt: skip
    assert warm == [False, False, False, False, True]
    longer = replace(file.load((1, 2)), k=torch.cat([file.load((1, 2)).k] * 2, 2),
                     v=torch.cat([file.load((1, 2)).v] * 2, 2))  # fmt: skip
    assert not packer.pack(longer)["keys"].is_warm
    never = SpanPacker(preset("qvg", centroids=4, warm_start=False))
    assert [never.pack(file.load((0, s)))["keys"].is_warm for s in (0, 1)] == [False, False]


def test_own_statistics_are_used_only_by_those_that_ask(file: CaptureFile) -> None:
    first = file.load((0, 0))
    assert SpanPacker(preset("quantwm")).statistics(first) is None
    assert SpanPacker(preset("quantwm", first_span="own")).statistics(first) is first.moment
    assert SpanPacker(preset("qvg")).statistics(file.load((0, 1))) is None
    later = file.load((0, 1))
    assert SpanPacker(preset("quantwm")).statistics(later) is later.moment


def test_rows_are_means_of_their_cells(result: TensorResult) -> None:
    for row in result.rows:
        cells = cells_of(result, row["method"])
        assert row["n_cells"] == len(cells) == 6
        assert row["n_cells_with_queries"] == 4
        for name in (*TENSOR_MEASURES, *QUERY_MEASURES):
            found = [cell[name] for cell in cells if cell[name] is not None]
            assert row[name] == pytest.approx(sum(found) / len(found))
        for side in ("keys", "values"):
            mean = sum(cell[f"{side}_bits"] for cell in cells) / 6
            assert row[f"{side}_bits"] == pytest.approx(mean)
            assert sum(row["bits_by_part"][side].values()) == pytest.approx(mean)
        assert row["selections"] == sum(cell["selections"] for cell in cells)
        both = (row["keys_bits"] + row["values_bits"]) / 2
        assert row["bits_per_element"] == pytest.approx(both)


def test_more_bits_mean_less_of_every_error(file: CaptureFile) -> None:
    """Two-sided: 4 bits lose less than 2 and more than nothing; keys alone are the keys' share."""
    found = {}
    for bits in (2, 4):
        config = preset("kivi", bits=bits)
        packed = SpanPacker(config).pack(file.load((0, 0)))
        span = file.load((0, 0))
        assert span.q is not None
        found[bits] = attention_errors(
            span.q, span.k, span.v, packed["keys"].decoded, packed["values"].decoded
        )
    for name in QUERY_MEASURES:
        assert 0 < getattr(found[4], name) < getattr(found[2], name)
    split = compare_tensors(file, ["kivi", "kivi:bf16", "bf16:kivi", "bf16"])
    both, keys, values, nothing = split.rows
    assert keys["output_error"] == keys["output_error_keys"] == both["output_error_keys"] > 0
    assert values["output_error"] == values["output_error_values"] == both["output_error_values"]
    assert (keys["value_error"], values["key_error"], values["softmax_kl"]) == (0, 0, 0)
    assert keys["value_sqnr_db"] is values["key_sqnr_db"] is None  # infinite
    assert [nothing[name] for name in QUERY_MEASURES] == [0.0] * len(QUERY_MEASURES)
    assert nothing["bits_per_element"] == 16.0


def test_keys_before_rope_are_rotated_before_they_meet_queries(tmp_path: Path) -> None:
    path = tmp_path / "pre.safetensors"
    selection = Selection(queries=50, layers=(1,))
    capture_world(tiny_world(), tiny_episodes(1), path, selection, frames=9, key_rope="pre")
    file = open_capture(path)
    result = compare_tensors(file, ["qvg"], centroids=8)
    span = file.load((1, 0))
    packed = SpanPacker(preset("qvg", centroids=8)).pack(span)
    assert span.rope is not None
    assert span.q is not None
    k, packed_k = (rotate_pairs(x, span.rope) for x in (span.k, packed["keys"].decoded))
    errors = attention_errors(span.q, k, span.v, packed_k, packed["values"].decoded)
    assert result.cells[0]["logit_rmse"] == pytest.approx(errors.logit_rmse, rel=1e-14)
    unrotated = attention_errors(
        span.q, span.k, span.v, packed["keys"].decoded, packed["values"].decoded
    )
    assert errors.output_error_keys != unrotated.output_error_keys
    assert result.cells[0]["key_error"] == relative_error(span.k, packed["keys"].decoded)


# --- users' own files -----------------------------------------------------------------------


def test_without_queries_their_numbers_are_left_out_and_said(tmp_path: Path) -> None:
    k, v = sample_tokens(seed=1), sample_tokens(seed=2)
    result = compare_tensors(save(tmp_path / "own", k=k, v=v), ["qvg", "quantwm"])
    for row in result.rows:
        assert all(row[name] is None for name in QUERY_MEASURES)
        assert all(row[name] is not None for name in TENSOR_MEASURES)
        assert row["n_cells_with_queries"] == row["selections"] == 0
    assert result.file["header"] is None
    assert len(result.notes) == 2
    assert result.notes[0].startswith("the file has no q: logits, token shift")
    assert result.notes[1].startswith("quantwm packs 1 of 1 spans without query statistics")


def test_statistics_of_a_users_file_are_used(tmp_path: Path) -> None:
    k, v = sample_tokens(seed=1), sample_tokens(seed=2)
    q = sample_queries(k, seed=3, group=2)
    moment = QueryMoment.empty(1, 2, 64)
    moment.update(sample_queries(k, seed=4, group=2))
    given = {"k": k, "v": v, "q": q}
    cold = compare_tensors(save(tmp_path / "cold", **given), ["quantwm"], centroids=16)
    stats = {"moment": moment.moment, "moment_count": moment.count}
    warm = compare_tensors(save(tmp_path / "warm", **given, **stats), ["quantwm"], centroids=16)
    assert (cold.cells[0]["has_statistics"], warm.cells[0]["has_statistics"]) == (False, True)
    assert warm.rows[0]["keys_bits"] > cold.rows[0]["keys_bits"]
    assert warm.rows[0]["logit_rmse"] < cold.rows[0]["logit_rmse"]
    assert not warm.notes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_compared_in_their_own(dtype: torch.dtype, tmp_path: Path) -> None:
    k, v = (sample_tokens(seed=seed, dtype=dtype) for seed in (1, 2))
    result = compare_tensors(save(tmp_path / "own", k=k, v=v, q=sample_queries(k)), ["kivi"])
    decoded = encode(k, preset("kivi").keys).decode(dtype=dtype)
    assert result.cells[0]["key_error"] == relative_error(k, decoded)
    assert 0 < result.cells[0]["key_error"] < 1


def test_numbers_that_json_cannot_hold_are_null(tmp_path: Path) -> None:
    """Zeros are restored exactly: no signal-to-noise ratio, and the error of nothing is 0."""
    zero = torch.zeros(1, 2, 64, 32, dtype=torch.bfloat16)
    result = compare_tensors(save(tmp_path / "own", k=zero, v=zero + 0, q=zero + 1))
    for cell in result.cells:
        assert cell["key_error"] == cell["output_error"] == 0.0
        assert cell["key_sqnr_db"] is None
    json.loads(to_json(result.to_dict()))


def test_notes_say_what_looks_wrong(tmp_path: Path) -> None:
    swapped = sample_tokens(heads=64, tokens=4, head_dim=32)
    result = compare_tensors(save(tmp_path / "own", k=swapped, v=swapped + 0), ["qvg"], centroids=4)
    notes = " | ".join(result.notes)
    assert "more heads than tokens" in notes
    assert f"qvg takes {result.rows[0]['bits_per_element']:.1f} bits" in notes
    assert result.rows[0]["bits_per_element"] > 16


class Refusing(KIVICodec):
    """KIVI that takes no span of more than 100 tokens."""

    def encode(self, x: torch.Tensor, inputs: Any) -> Any:
        if x.shape[1] > 100:
            raise ShapeError(f"{x.shape[1]} tokens: expected at most 100")
        return super().encode(x, inputs)


@pytest.fixture
def refusing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODECS, "kivi", Refusing)
        yield


@pytest.mark.usefixtures("refusing")
def test_a_method_that_refuses_is_left_out_and_named(tmp_path: Path) -> None:
    short, long = sample_tokens(tokens=90), sample_tokens(tokens=120)
    names = {f"layer0/span{i}/{part}": x + 0 for i, x in enumerate((short, long))
             for part in ("k", "v")}  # fmt: skip
    file = save(tmp_path / "own", **names)
    result = compare_tensors(file, ["kivi", "qvg"], centroids=4)
    assert [row["method"] for row in result.rows] == ["qvg"]
    assert {cell["method"] for cell in result.cells} == {"qvg"}
    assert result.skipped == {"kivi": "120 tokens: expected at most 100"}
    assert "kivi left out: 120 tokens: expected at most 100" in result.notes
    with pytest.raises(ShapeError, match="120 tokens"):
        compare_tensors(file, ["kivi"])


# --- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "count"),
    [(1, 1), (63, 1), (64, 2), (1152, 32), (4680, 128), (8192, 256), (29_640, 256)],
)
def test_automatic_centroids_cost_at_most_half_a_bit(tokens: int, count: int) -> None:
    assert automatic_centroids(tokens) == count
    assert count == 1 or 16 * count / tokens <= 0.5
    assert count == 256 or 16 * 2 * count / tokens > 0.5


def test_configurations_take_the_count_where_a_codec_clusters(file: CaptureFile) -> None:
    found = configurations(file, ["kivi", "qvg:kivi", "quantwm"], 7)
    assert found["qvg:kivi"].keys.centroids == 7
    assert found["quantwm"].values.centroids == 7
    assert found["kivi"].keys == preset("kivi").keys
    assert configurations(file, ["qvg"], None)["qvg"].keys.centroids == automatic_centroids(144)
    for methods in ([], ["qvg", "qvg"], ["nope"]):
        with pytest.raises(ConfigError):
            configurations(file, methods, None)


def test_progress_counts_every_method_on_every_cell(file: CaptureFile) -> None:
    steps: list[tuple[int, int, str]] = []
    compare_tensors(file, ["kivi", "qvg"], on_progress=lambda *step: steps.append(step))
    assert [(done, total) for done, total, _ in steps] == [(n, 12) for n in range(12)]
    assert {label for *_, label in steps} == {"layer 0", "layer 1"}


def test_the_global_generator_is_left_alone_and_errors_repeat(
    file: CaptureFile, result: TensorResult
) -> None:
    state = torch.get_rng_state()
    again = compare_tensors(file)
    assert torch.equal(state, torch.get_rng_state())
    timed = ("encode_ms", "decode_ms")
    for cell, other in zip(result.cells, again.cells, strict=True):
        assert {k: v for k, v in cell.items() if k not in timed} == {
            k: v for k, v in other.items() if k not in timed
        }


def test_the_document_names_every_field(file: CaptureFile, result: TensorResult) -> None:
    """A table row `name` | in | meaning for each field of rows and cells, and no other."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text[text.index("## `tensors.json`") :]
    documented: dict[str, set[str]] = {"rows": set(), "cells": set()}
    for names, place in re.findall(r"^\| (`.+?) \| (rows|cells|both) \|", section, re.MULTILINE):
        for kind in documented if place == "both" else [place]:
            documented[kind] |= set(re.findall(r"`(\w+)`", names))
    assert documented == {"rows": set(result.rows[0]), "cells": set(result.cells[0])}
    for name in result.to_dict():
        assert f"`{name}`" in section
    header = file.header
    assert header is not None
    for name in (*header.to_dict(), *header.to_dict()["spans"][0]):
        assert f"`{name}`" in text


@pytest.mark.cuda
def test_cuda_measures_the_same(file: CaptureFile, result: TensorResult) -> None:
    found = compare_tensors(file, device="cuda")
    for row, other in zip(result.rows, found.rows, strict=True):
        assert row["bits_per_element"] == pytest.approx(other["bits_per_element"], abs=0.02)
        assert row["key_error"] == pytest.approx(other["key_error"], rel=0.05)
        assert row["output_error"] == pytest.approx(other["output_error"], rel=0.1)
