"""The closed loop runs, its BF16 is what a plain loop computes, and its rows add up."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import closed_loop
from benchmarks.closed_loop import ALLOWANCE, COLUMNS, CacheBytes, bytes_row
from benchmarks.generator import (
    PASSES,
    SHAPES,
    chunk_noise,
    generate_chunk,
    new_generator,
)
from benchmarks.loop_caches import WAYS, Memory, fill, full_attention, new_memory
from steadykv.cache import LayerLedger, Ledger
from steadykv.config import parse_method, preset

CPU = torch.device("cpu")
CPU_TINY = ["--device", "cpu", "--tiny"]
TINY = SHAPES["tiny"]
FRAMES = 9
CHUNKS = 5  # two more than the window has


class Concatenation:
    """What a cache has to equal: lists of chunks, joined in every pass."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.past: list[dict[int, tuple[Tensor, Tensor]]] = []
        self.open: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.open[layer] = (k, v)
        chunks = [*self.past, self.open][-self.slots :]
        keys, values = (torch.cat([c[layer][side] for c in chunks], 1) for side in (0, 1))
        return full_attention(q, keys, values)

    def commit(self) -> None:
        self.past.append(self.open)
        self.open = {}

    def ledger(self) -> None:
        return None


@torch.no_grad()
def video(memory: Memory, start: int = 0) -> Tensor:
    network = new_generator(TINY, CPU)
    chunks = []
    for chunk in range(start, start + CHUNKS):
        chunks.append(generate_chunk(network, chunk_noise(TINY, chunk, CPU), memory.attention))
        memory.commit()
    return torch.cat(chunks, 1)


def memory_of(way: str, method: str = "bf16") -> Memory:
    return new_memory(TINY, preset(method, span_chunks=2), way, FRAMES, CPU)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def test_reading_bf16_is_the_plain_loop_bit_for_bit() -> None:
    want = video(Concatenation(FRAMES // TINY.chunk_frames))
    assert bool(want.isfinite().all())
    assert torch.equal(video(memory_of("read")), want)
    shorter = video(Concatenation(FRAMES // TINY.chunk_frames - 1))
    assert error(shorter, want) > 0.02  # a chunk that is not attended to would show


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_bf16_differs_by_rounding_alone(way: str) -> None:
    """After a fill as well, which leaves the same window in all of them."""
    read, other = memory_of("read"), memory_of(way)
    for memory in (read, other):
        fill(memory, TINY, 4, CPU)
    assert error(video(other, start=4), video(read, start=4)) < 0.01


def test_from_host_memory_comes_what_is_on_the_device() -> None:
    assert torch.equal(video(memory_of("host")), video(memory_of("ring")))


def test_the_last_pass_of_a_chunk_is_the_clean_one() -> None:
    """Every pass visits every layer; only what the last one wrote stays."""
    network, calls = new_generator(TINY, CPU), list[int]()

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(layer)
        assert q.shape == k.shape == v.shape == (1, 48, 2, 64)
        return full_attention(q, k, v)

    with torch.no_grad():
        generate_chunk(network, chunk_noise(TINY, 0, CPU), attention)
    assert calls == [0, 1] * PASSES


def test_weights_come_from_a_private_generator() -> None:
    before = torch.get_rng_state()
    first, second = (new_generator(TINY, CPU).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {t.dtype for t in first.values()} == {torch.bfloat16}


def test_rows_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    methods = ["qvg@centroids=8", "steady@centroids=8", "bf16"]
    arguments = [*CPU_TINY, "--windows", "9", "15", "--chunks", "2", "--ways", "ring", "read"]
    closed_loop.main([*arguments, "--csv", str(path), "--methods", *methods])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["method"] for row in rows] == ["bf16", "bf16", *methods[:2]] * 2
    assert [row["way"] for row in rows] == ["ring", "read", "read", "read"] * 2
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    chunk = TINY.layers * 2 * 2 * TINY.chunk_tokens * TINY.width
    for row in rows:
        assert row["outcome"] == "ok"
        assert 0 < float(row["seconds_p20"]) <= float(row["seconds"]) <= float(row["seconds_p80"])
        assert row["torch"] == torch.__version__
        assert row["gpu"]
        assert row["peak_bytes"] == row["within_bound"] == ""  # no allocator to ask
        if row["way"] == "ring":
            assert row["overhead"] == row["resident_bytes"] == ""
            continue
        ratio = float(row["seconds"]) / float(row["baseline_seconds"]) - 1
        assert float(row["overhead"]) == pytest.approx(ratio)
        assert row["baseline"].startswith("bf16 ")
        if row["method"] == "bf16":
            assert row["bound_bytes"] == ""
            assert int(row["resident_bytes"]) // chunk == int(row["window_frames"]) // 3
            continue
        assert 0.001 < float(row["difference"]) < 0.5
        assert int(row["open_waiting_bytes"]) == 2 * chunk
        parts = int(row["packed_bytes"]) + int(row["open_waiting_bytes"])
        assert int(row["bound_bytes"]) == parts + ALLOWANCE
        assert parts < int(row["resident_bytes"]) < int(row["ledger_peak_bytes"])
        if row["method"] == methods[0]:  # spans that begin before the window are held whole
            spans = {"9": 1, "15": 2}[row["window_frames"]]
            payload = parse_method(methods[0]).payload_nbytes(1, TINY.heads, 96, TINY.head_dim)
            assert int(row["packed_bytes"]) == spans * TINY.layers * payload


def test_the_bound_counts_what_is_packed_open_and_waiting() -> None:
    def ledger(**parts: int) -> Ledger:
        return Ledger((LayerLedger(0, parts, 1, 1, 1, 1, 1, 1, 16),) * 3, peak_bytes=9000)

    packed = ledger(codes=100, ids=20, open=7, waiting=5, query_moment=1000, counters=8)
    assert CacheBytes.of(packed) == CacheBytes(3 * 1140, 3 * 120, 3 * 12)
    bound = 3 * 132 + ALLOWANCE
    emptier = ledger(codes=110, query_moment=1000)
    for peak, holds in ((bound, True), (bound + 1, False), (None, None)):
        row = bytes_row([emptier, packed], peak)
        assert (row["bound_bytes"], row["within_bound"]) == (bound, holds)
        assert (row["resident_bytes"], row["ledger_peak_bytes"]) == (3 * 1140, 9000)
    dense = bytes_row([ledger(dense=50, open=7)], 10)
    assert dense["bound_bytes"] is dense["within_bound"] is None
    assert bytes_row([], 10) == {}


def test_what_does_not_fit_says_so_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = closed_loop.new_memory

    def new(*arguments: object) -> Memory:
        if arguments[2] == "ring":
            raise torch.cuda.OutOfMemoryError("no room")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(closed_loop, "new_memory", new)
    path = tmp_path / "rows.csv"
    arguments = [*CPU_TINY, "--chunks", "2", "--methods", "bf16", "--layers", "1"]
    closed_loop.main([*arguments, "--csv", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == ["out of memory", "ok", "ok"]
    assert rows[0]["seconds"] == rows[1]["baseline"] == ""
    assert rows[2]["baseline"] == "bf16 read"
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.cuda
def test_on_a_gpu_every_way_is_measured_with_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    arguments = ["--tiny", "--chunks", "2", "--methods", "bf16", "kivi", "--ways", *WAYS]
    closed_loop.main([*arguments, "--csv", str(path)])
    with path.open(newline="") as file:
        rows = {(row["method"], row["way"]): row for row in csv.DictReader(file)}
    assert all(row["outcome"] == "ok" for row in rows.values())
    held = 5 * TINY.layers * 2 * 2 * TINY.chunk_tokens * TINY.width
    assert int(rows["bf16", "ring"]["peak_bytes"]) >= held
    assert rows["kivi", "attend"]["within_bound"] == "True"
    assert float(rows["bf16", "host"]["difference"]) < 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--windows 20", "multiples of 3"),
        ("--chunks 3", "multiple of the span, 2"),
        ("--layers 0", "1 or more"),
        ("--ways rings", "invalid choice"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    wrong: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        closed_loop.main([*CPU_TINY, *wrong.split()])
    assert message in capsys.readouterr().err
