"""`python -m benchmarks.spans` on a tiny layer and a tiny world: what is known without a clock."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from benchmarks import layer_work, spans, spans_layer, spans_rollouts
from benchmarks.spans_layer import TINY
from steadykv.config import CacheConfig, parse_method
from steadykv.errors import ConfigError
from steadykv.planning.replay import Geometry, Replay
from tests.worlds import TINY as WORLD
from tests.worlds import tiny_episodes

FADING = "steady"
METHODS = ("qvg", FADING)
RUN = ["--device", "cpu", "--tiny", "--rounds", "1", "--calls", "1", "--rollout-rounds", "1"]
RUN += ["--methods", *METHODS]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is timed takes two seconds, so that every ratio is known."""

    def seconds_of(call: layer_work.Call, count: int, device: torch.device) -> float:
        call()
        return 2.0

    monkeypatch.setattr(layer_work, "seconds_of", seconds_of)


# --- the layer ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_seconds")
def test_a_layer_row_has_the_predicted_bytes_and_a_tokens_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    spans.main([*RUN, "--tables", "layer", "--spans", "1", "2", "9", "--csv", str(path)])
    rows = rows_of(path)
    cells = [(batch, chunks) for batch in ("1", "2") for chunks in ("1", "2", "9")]
    assert [(r["batch"], r["span_chunks"], r["method"], r["work"]) for r in rows] == [
        (*cell, method, work) for cell in cells for method in METHODS
        for work in ("encode", "decode")
    ]  # fmt: skip
    # 21 frames hold 7 spans of one chunk and 3 of two; a longer span is a window of its own.
    held = {"1": (7, 21), "2": (3, 18), "9": (1, 27)}
    for row in rows:
        batch, chunks = int(row["batch"]), int(row["span_chunks"])
        count, frames = held[row["span_chunks"]]
        assert (int(row["spans"]), int(row["frames"])) == (count, frames)
        tokens = 48 * chunks
        shape = (batch, TINY.heads, tokens, TINY.head_dim)
        newest = parse_method(row["method"], centroids=8)
        older = newest.replace(refinement=0)
        assert float(row["bits_newest"]) == pytest.approx(newest.bits_per_element(*shape))
        assert float(row["bits_older"]) == pytest.approx(older.bits_per_element(*shape))
        nbytes = (count - 1) * older.payload_nbytes(*shape) + newest.payload_nbytes(*shape)
        assert int(row["window_bytes"]) == nbytes
        elements = 2 * count * batch * TINY.heads * tokens * TINY.head_dim
        assert int(row["bf16_bytes"]) == 2 * elements
        assert float(row["bits_window"]) == pytest.approx(8 * nbytes / elements)
        # Two seconds for all tokens of all rows, there as here.
        spanned, first = (tokens, 48) if row["work"] == "encode" else (count * tokens, 7 * 48)
        assert float(row["seconds_per_token"]) == pytest.approx(2 / (batch * spanned))
        assert float(row["ratio_first"]) == pytest.approx(first / (batch * spanned))
        assert float(row["ratio_copy"]) == pytest.approx(count * tokens / spanned)
    fading = next(row for row in rows if row["method"] == FADING)
    assert float(fading["bits_newest"]) == pytest.approx(float(fading["bits_older"]) + 2)
    printed = capsys.readouterr().out
    assert f"| {FADING} | 2 | 9 | 432 |" in printed
    assert "1 spans, 27 frames" in printed


def test_the_window_is_decoded_with_its_newest_span_refined() -> None:
    dense = spans_layer.dense_of(TINY, spans_layer.Cell(2, 2), torch.device("cpu"))
    for policy, newer in (("", 1), ("@refined_spans=2", 2), ("@refined_spans=0", 0)):
        work = spans_layer.work_of(parse_method(FADING + policy, centroids=8), dense)
        dense.out.fill_(float("nan"))
        work.calls["decode"]()
        true = torch.stack((dense.k, dense.v)).transpose(2, 3).float()
        errors = [
            float((dense.out[:, span].float() - true).norm() / true.norm()) for span in range(3)
        ]
        assert errors[: 3 - newer] == [errors[0]] * (3 - newer)
        # Two more bits of every number: about a quarter of the error.
        assert all(error < 0.4 * errors[0] for error in errors[3 - newer :])
        more = work.facts["bits_newest"] - work.facts["bits_older"]
        assert more == pytest.approx(2 if newer else 0)


def test_a_sample_is_a_round_and_graphs_join_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    device = torch.device("cuda")

    def seconds_of(call: layer_work.Call, count: int, where: torch.device) -> float:
        assert (count, where) == (3, device)
        call()
        return float(len(called))

    monkeypatch.setattr(layer_work, "seconds_of", seconds_of)

    def captured(call: layer_work.Call) -> layer_work.Call:
        called.append("capture")
        return lambda: called.append("graph")

    monkeypatch.setattr(layer_work, "captured", captured)
    turns: dict[str, dict[str, layer_work.Call]] = {
        "one": {"encode": lambda: called.append("e"), "decode": lambda: called.append("d")},
        "copy": {"copy": lambda: called.append("c")},
    }
    times = layer_work.in_turns(turns, 2, 3, device, capture=("decode",))
    assert called == ["e", "d", "capture", "c"] + 2 * ["e", "d", "graph", "c"]
    assert times == {
        ("one", "encode"): [5, 9],
        ("one", "decode"): [6, 10],
        ("one", "decode, captured"): [7, 11],
        ("copy", "copy"): [8, 12],
    }
    layer_work.in_turns(turns, 1, 3, device, capture=("decode",))
    assert called[12:] == 2 * ["e", "d", "graph", "c"]  # no second graph


def test_what_does_not_fit_is_a_row_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encode, run_batch = layer_work.encode, spans_rollouts.run_batch
    tried: list[CacheConfig] = []

    def small_encode(x: torch.Tensor, config: Any, **named: Any) -> Any:
        if x.shape[0] == 2 and config.refinement:
            raise torch.cuda.OutOfMemoryError("a span of two rows")
        return encode(x, config, **named)

    def small_rollout(world: Any, walks: Any, seeds: Any, config: Any, **named: Any) -> Any:
        if len(walks) == 2 and config.name == FADING:
            tried.append(config)
            if len(tried) == 3:  # after a round that was timed
                raise torch.cuda.OutOfMemoryError("two walks")
        return run_batch(world, walks, seeds, config, **named)

    monkeypatch.setattr(layer_work, "encode", small_encode)
    monkeypatch.setattr(spans_rollouts, "run_batch", small_rollout)
    layer, rollouts = tmp_path / "layer.csv", tmp_path / "rollouts.csv"
    named = ["--csv", str(layer), "--rollouts-csv", str(rollouts)]
    spans.main([*RUN, "--spans", "1", "--rollout-spans", "1", "--rollout-rounds", "3", *named])
    assert len(tried) == 3  # and never again
    for path, timed in ((layer, "seconds_per_token"), (rollouts, "seconds_per_frame")):
        for row in rows_of(path):
            lost = (row["batch"], row["method"]) == ("2", FADING)
            assert row["outcome"] == ("out of memory" if lost else "ok")
            assert (row[timed] == "") == lost
    assert capsys.readouterr().out.count("out of memory") == 2


# --- rollouts -------------------------------------------------------------------------------------


def test_a_rollout_row_has_the_planned_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    spans.main([*RUN, "--tables", "rollouts", "--rollouts-csv", str(path)])
    rows = rows_of(path)
    cells = [(batch, chunks) for batch in ("1", "2") for chunks in ("1", "2")]
    assert [(r["batch"], r["span_chunks"], r["method"]) for r in rows] == [
        (*cell, method) for cell in cells for method in ("bf16", *METHODS)
    ]
    for row in rows:
        batch, chunks = int(row["batch"]), int(row["span_chunks"])
        config = configuration(row["method"], chunks)
        resident = ends(config, batch)
        assert int(row["resident_bytes"]) == resident[-1]
        # Both span lengths have packed at the end of the second chunk of six: frame 6.
        assert int(row["counted_from"]) == 6
        assert float(row["resident_bytes_mean"]) == pytest.approx(fmean(resident[1:]))
        plain = ends(configuration("bf16", chunks), batch)
        assert float(row["resident_over_bf16"]) == pytest.approx(resident[-1] / plain[-1])
        mean = fmean(resident[1:]) / fmean(plain[1:])
        assert float(row["resident_mean_over_bf16"]) == pytest.approx(mean)
        # The window of five chunks holds five spans of one chunk, or three of two, one in part.
        count = {1: 5, 2: 3}[chunks]
        shape = (batch, WORLD.num_heads, 72 * chunks, WORLD.head_dim)
        newest = config.bits_per_element(*shape)
        bits = newest
        if row["method"] == FADING:
            older = config.replace(refinement=0).bits_per_element(*shape)
            bits = ((count - 1) * older + newest) / count
        assert float(row["bits_per_element"]) == pytest.approx(bits)
        (base,) = (r for r in rows if (r["batch"], r["span_chunks"]) == (str(batch), str(chunks))
                   and r["method"] == "bf16")  # fmt: skip
        assert float(row["over_bf16"]) == pytest.approx(
            float(row["seconds"]) / float(base["seconds"])
        )
        assert float(row["seconds_per_frame"]) == pytest.approx(
            float(row["seconds"]) / (15 * batch)
        )
    assert f"| {FADING} | 2 | 2 |" in capsys.readouterr().out


def configuration(method: str, span_chunks: int) -> CacheConfig:
    return parse_method(method, centroids=8).replace(
        span_chunks=span_chunks, window_frames=WORLD.window_frames
    )


def ends(config: CacheConfig, batch: int) -> list[int]:
    """Resident bytes of all layers after each of six chunks, a true one and five generated."""
    replay = Replay(Geometry(batch, WORLD.num_heads, WORLD.head_dim, WORLD.frame_tokens), config)
    tokens = WORLD.chunk_frames * WORLD.frame_tokens
    return [WORLD.num_layers * replay.chunk(tokens)[-1].resident for _ in range(6)]


def test_more_walks_than_there_are_come_again_with_another_seed() -> None:
    walks, seeds = spans_rollouts.rows_of_batch(tiny_episodes(2), 5)
    assert walks.names == ("walk-0", "walk-1", "walk-0", "walk-1", "walk-0")
    assert seeds == [0, 0, 1, 1, 2]


def test_spans_refuses_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("--methods", "qgv"): "unknown method 'qgv'",
        ("--spans", "1", "0"): "--spans has 0: expected 1 or more",
        ("--rounds", "0"): "expected 1 or more",
        ("--tables", "rollouts", "--rollout-spans", "3", "--chunks", "2"): "expected 3 or more",
    }
    for arguments, message in wrong.items():
        with pytest.raises(SystemExit):
            spans.main([*RUN, *arguments])
        assert message in capsys.readouterr().err
    given = spans.options().parse_args([*RUN, "--rollout-spans", "3", "--chunks", "3"])
    given.rollout_centroids = 8
    assert spans_rollouts.counted_in(WORLD, 3, given) == (9, 2)
    given.chunks = 2
    with pytest.raises(ConfigError, match="--chunks is 2: expected 3 or more"):
        spans_rollouts.counted_in(WORLD, 3, given)
