"""`steadykv bench`: rows that say what they claim, and no time for what is wrong."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from steadykv import ops
from steadykv.cli.main import main
from steadykv.config import CacheConfig, CodecConfig, preset
from steadykv.errors import ConfigError, SteadyKVError
from steadykv.evaluation.bench import COLUMNS, Size, bench, default_size, works
from steadykv.evaluation.bench.rivals import Release, best_attention
from steadykv.evaluation.bench.timing import Rates, Timing, measure, peak_bytes
from steadykv.evaluation.bench.works import Bench, Task, relative_error
from steadykv.evaluation.store import read_store
from steadykv.report.bench import bench_table, headline

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--heads", "1", "--tokens", "96", "--queries", "24", "--seconds", "0"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dated folders."""
    monkeypatch.chdir(tmp_path)


def test_every_work_has_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file, plot = tmp_path / "rows.csv", tmp_path / "bench.png"
    files = ["--rows", str(rows_file), "--plot", str(plot)]
    assert main(["bench", *SMALL, *files, "--methods", "qvg", "quantwm", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    rows, folder = outcome["rows"], tmp_path / outcome["folder"]
    assert {path.name for path in folder.iterdir()} == {"bench.json", "report.html", "runs.jsonl"}
    assert json.loads((folder / "bench.json").read_text())["rows"] == rows
    assert [entry["row"] for entry in read_store(folder / "runs.jsonl")] == rows
    assert all(tuple(row) == COLUMNS for row in rows)
    found = [(row["work"], row["method"]) for row in rows]
    assert found == [
        ("copy", "machine"),
        ("matmul", "machine"),
        ("encode", "qvg"),
        ("encode", "quantwm"),
        ("kmeans", "all"),
        ("decode", "qvg"),
        ("decode", "quantwm"),
        ("attend", "bf16"),
        ("attend", "qvg"),
        ("attend", "qvg small"),
        ("attend", "quantwm"),
        ("attend", "quantwm small"),
    ]
    for row in rows:
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["share_of_limit"] == row["limit_ms"] / row["median_ms"]
        assert row["shape"] == "1x96x64 q24"
        assert row["peak_bytes"] is None
    for row in rows[2:7]:
        assert row["error"] <= row["error_bound"]
    packed = sum(codec.payload_nbytes(1, 1, 96, 64) for codec in both(preset("qvg")))
    assert rows[5]["nbytes"] == 2 * 2 * 96 * 64 + packed
    copy, matmul = rows[0]["gb_per_s"], rows[1]["tflop_per_s"]
    assert rows[5]["limit_ms"] == pytest.approx(rows[5]["nbytes"] / copy / 1e6)
    flops = 4 * 24 * 120 * 64
    assert rows[7]["limit_ms"] >= flops / matmul / 1e9 * 0.999
    assert rows[8]["baseline_ms"] == pytest.approx(rows[8]["speedup"] * rows[8]["median_ms"])
    with rows_file.open(newline="") as file:
        assert [row["work"] for row in csv.DictReader(file)] == [row["work"] for row in rows]
    assert Image.open(plot).width > 500


def both(config: CacheConfig) -> tuple[CodecConfig, CodecConfig]:
    return config.keys, config.values


def test_the_table_of_a_few_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--works", "decode", "--methods", "qvg"]) == 0
    printed = capsys.readouterr().out
    assert "decode  qvg" in printed
    assert "GB/s" in printed
    assert "attend" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--works", "fly"], "works are fly: expected some of encode kmeans decode attend"),
        (["--methods", "bf16"], "'bf16' keeps a side dense"),
        (["--methods", "nothing"], "unknown method 'nothing'"),
        (["--rows", "."], "--rows: got ., which exists"),
    ],
)
def test_mistakes_get_one_line(arguments, message, capsys) -> None:
    assert main(["bench", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("results").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_go_on(capsys) -> None:
    assert main(["bench"]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding that is off by one part in a hundred."""
    right = ops.decode.decode_clustered

    def wrong(tensors, out, *arguments, **options) -> None:
        right(tensors, out, *arguments, **options)
        if out.dtype == torch.bfloat16:
            out.mul_(1.01)

    monkeypatch.setattr(ops, "decode_clustered", wrong)
    with pytest.raises(SteadyKVError, match=r"decode qvg: error 0\.0"):
        bench(CPU, Size(1, 96, 24, 64), ["qvg"], ["decode"], seconds=0)


def test_a_task_without_an_error_that_is_a_number_is_wrong() -> None:
    task = Task("qvg", [], 0, 0, "", error=float("nan"), bound=1.0)
    with pytest.raises(SteadyKVError, match="encode qvg: error nan"):
        task.check("encode")


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="works are none"):
        bench(CPU, default_size(CPU), works=[])
    with pytest.raises(ConfigError, match="methods are none"):
        bench(CPU, default_size(CPU), methods=[])


def test_measuring_takes_input_sets_in_turn() -> None:
    used: list[int] = []
    timing = measure([lambda n=n: used.append(n) for n in range(3)], CPU, 0.0)
    assert used == [0, 1, 2, 0, 1, 2, 0, *(n % 3 for n in range(timing.calls))]
    assert 0 < timing.p20 <= timing.median <= timing.p80
    assert peak_bytes(lambda: None, CPU) is None


def test_limits_are_those_of_memory_or_of_products() -> None:
    rates = Rates(Timing(1, 1, 1, 1), Timing(1, 1, 1, 1), 1e9, 1e12)
    assert rates.limit_ms(2e6, 1e9) == 2.0
    assert rates.limit_ms(2e6, 4e9) == 4.0


def test_sample_tokens_differ_and_repeat() -> None:
    state = Bench(CPU, Size(2, 96, 24, 64), Rates(*2 * [Timing(1, 1, 1, 1)], 1, 1), 0)
    assert len(state.pairs) == works.SETS
    assert torch.equal(state.pairs[1][0], state.tokens(2))
    assert relative_error(state.pairs[0][0], state.pairs[0][1]) > 0.5
    assert state.backend("decode") == "reference"


def test_a_rival_that_cannot_run_is_left_out() -> None:
    assert Release.find(CPU) is None
    q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    name, timing, call = best_attention(q, q, q, 0.0)
    assert name in ("flash", "efficient", "cudnn", "math")
    assert call().shape == q.shape
    assert timing.median > 0


@pytest.mark.cuda
def test_rows_on_a_gpu() -> None:
    rows = bench(torch.device("cuda"), Size(4, 2048, 512, 128), seconds=0.02)
    assert {row["method"] for row in rows if row["work"] == "attend"} >= {"bf16 in host memory"}
    for row in rows[2:]:
        assert row["peak_bytes"] >= 0
    assert "GB/s" in headline(rows)
    assert bench_table(rows).row_count == len(rows) - 2
