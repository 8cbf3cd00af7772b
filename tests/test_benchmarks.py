"""The benchmark scripts run, and their rows say what they claim."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import costs, encode_cpu, oracle, paired, query_energy, warm_start
from steadykv.capture import Selection
from steadykv.config import preset
from steadykv.evaluation.world_capture import capture_world
from tests.codecs import sample_tokens
from tests.oracle import INSTALL
from tests.worlds import tiny_episodes, tiny_world

SMALL = ["--heads", "2", "--tokens", "96", "--head-dim", "32", "--repeats", "2", "--threads", "1"]


def test_encode_cpu_writes_a_row_for_each_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows" / "encode.csv"
    encode_cpu.main([*SMALL, "--methods", "steady", "--csv", str(path)])
    printed = capsys.readouterr().out
    assert "steady   keys" in printed
    assert "target" not in printed  # another shape than the target's
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["tensor"] for row in rows] == ["keys", "values"]
    assert [row["codec"] for row in rows] == ["qvg4", "qvg"]
    for row, codec in zip(rows, (preset("steady").keys, preset("steady").values), strict=True):
        assert int(row["payload_bytes"]) == codec.payload_nbytes(1, 2, 96, 32)
        assert int(row["input_bytes"]) == 2 * 2 * 96 * 32
        assert 0 < float(row["seconds_p20"]) <= float(row["seconds"]) <= float(row["seconds_p80"])
        assert float(row["cpu_seconds"]) > 0
        assert row["config"] == json.dumps(codec.to_dict())
    encode_cpu.append(path, rows)
    assert len(path.read_text().splitlines()) == 1 + 4
    with pytest.raises(SystemExit, match="other columns"):
        encode_cpu.append(path, [{"method": "qvg"}])


def test_encode_cpu_knows_its_targets() -> None:
    def row(method: str, tensor: str, seconds: float, peak: float | None) -> dict[str, object]:
        times = dict.fromkeys(("seconds", "seconds_p20", "seconds_p80", "cpu_seconds"), seconds)
        shape = encode_cpu.TARGET_SHAPE
        return {"method": method, "tensor": tensor, "shape": shape, "peak_over_input": peak} | times

    rows = [row("qvg", "keys", 1.0, 5.0), row("qvg", "values", 1.9, 6.0)]
    text = encode_cpu.table(rows)
    assert "2.90, target 3 s met" in text
    assert "at most 6.00" in text
    assert "target 6 met" in text
    rows += [row("quantwm", "keys", 5.0, 6.1), row("quantwm", "values", 1.1, None)]
    text = encode_cpu.table(rows)
    assert "6.10, target 6 s missed" in text
    assert "target 6 missed" in text


def test_encode_cpu_refuses_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--methods", "qgv"], ["--repeats", "0"], ["--tokens", "many"]):
        with pytest.raises(SystemExit):
            encode_cpu.main(wrong)
        assert wrong[1] in capsys.readouterr().err


def test_costs_are_told_beside_those_of_quantwm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    faded = "qvg4@centroid_format=fp8+refinement=2"
    tiny = ["--device", "cpu", "--tiny", "--rounds", "2", "--calls", "1"]
    costs.main([*tiny, "--methods", faded, "--csv", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [(work, method) for work in costs.WORKS for method in (faded, "quantwm")]
    assert [(row["work"], row["method"]) for row in rows] == expected
    for row in rows:
        (baseline,) = (r for r in rows if r["work"] == row["work"] and r["method"] == "quantwm")
        ratio = float(row["seconds"]) / float(baseline["seconds"])
        assert float(row["ratio"]) == pytest.approx(ratio)
        assert 0 < float(row["seconds_p20"]) <= float(row["seconds"]) <= float(row["seconds_p80"])
        assert row["kernels"] == "False"
    newest, older = (float(rows[0][f"error_{age}"]) for age in ("newest", "older"))
    assert 0 < newest < 0.3 * older < 0.15
    assert float(rows[0]["bits_newest"]) == pytest.approx(float(rows[0]["bits_older"]) + 2)
    assert rows[1]["error_newest"] == rows[1]["error_older"]
    assert float(rows[0]["seconds"]) > 0
    printed = capsys.readouterr().out
    assert f"{1e3 * float(rows[0]['seconds']):.4f}" in printed
    for wrong, named in ((["--methods", "qgv"], "qgv"), (["--rounds", "0"], "expected 1 or more")):
        with pytest.raises(SystemExit):
            costs.main([*tiny, *wrong])
        assert named in capsys.readouterr().err


def test_the_peak_is_that_of_the_call() -> None:
    """Memory that lives only during the call counts; what was there before does not."""
    held = bytearray(64 << 20)
    peak, result = encode_cpu.peak_growth(lambda: len(bytearray(b"x" * (48 << 20))))
    assert result == 48 << 20
    assert len(held) == 64 << 20
    if peak is not None:  # two copies live at once: the literal and the array
        assert 90 << 20 < peak < 120 << 20


def test_warm_start_compares_every_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walk, path = tmp_path / "walk.safetensors", tmp_path / "rows.csv"
    capture_world(tiny_world(), tiny_episodes(1), walk, Selection(), frames=9)
    warm_start.main([str(walk), "--centroids", "8", "--csv", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * len(warm_start.ITERATIONS)
    error = {(r["tensor"], r["start"], r["iterations"]): float(r["error"]) for r in rows}
    assert all(0 < value < 1 for value in error.values())
    for side in ("k", "v"):  # from another start, other clusters
        assert len({error[side, start, "2"] for start in warm_start.STARTS}) == 3
        assert error[side, "cold", "16"] < error[side, "cold", "0"]
    assert all(float(r["seconds"]) > 0 for r in rows)
    assert f"{error['k', 'ids', '1']:.4f}" in capsys.readouterr().out


def test_query_energy_is_the_share_of_the_leading_directions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moment = torch.diag(torch.tensor([1.0, 6.0, 0.0, 3.0]))
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).Q
    shares = query_energy.energy_shares(torch.stack((moment, turn @ moment @ turn.T)))
    expected = torch.tensor([0.6, 0.9, 1.0, 1.0], dtype=torch.float64).expand(2, 4)
    torch.testing.assert_close(shares, expected, rtol=0, atol=1e-6)
    walk, path = tmp_path / "walk.safetensors", tmp_path / "rows.csv"
    capture_world(tiny_world(), tiny_episodes(1), walk, Selection(), frames=9)
    query_energy.main([str(walk), "--csv", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["0", "1"]
    for row in rows:
        found = [float(row[f"rank_{rank}"]) for rank in query_energy.RANKS]
        assert found == sorted(found)
        assert found[-1] == pytest.approx(1.0)  # all 32 directions
    printed = capsys.readouterr().out
    assert f"{float(rows[1]['rank_8']):.3f}" in printed


def test_paired_tells_two_methods_of_a_finished_comparison_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = [
        {"method": method, "episode": walk, "seed": seed, "mse_by_frame": [0.0, mse, 2 * mse],
         "ssim_by_frame": [1.0, 0.9, 0.8], "flicker_by_step": [mse, 0.0],
         "top1_shift": None, "top5_shift": None}
        for method, mse in (("a", 10.0), ("b", 100.0)) for walk in "xyz" for seed in (0, 1)
    ]  # fmt: skip
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps(rollouts))
    paired.main([str(path), "a", "b", "--first-frame", "1"])
    printed = capsys.readouterr().out
    assert "frames 1-2" in printed
    assert "+10.0000  (+10.0000 to +10.0000)" in printed
    with pytest.raises(SystemExit, match="no rollouts of"):
        paired.main([str(path), "a", "c"])


def test_oracle_says_in_one_line_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        oracle.main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "quant_videogen", None)  # as if it were not installed
    with pytest.raises(SystemExit, match=re.escape(INSTALL)) as error:
        oracle.main([])
    assert "\n" not in str(error.value)
    with pytest.raises(SystemExit):
        oracle.main(["--centroids", "300"])
    assert "expected 1 to 256" in capsys.readouterr().err


def test_oracle_reads_the_tensors_of_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "DEVICE", torch.device("cpu"))
    path = tmp_path / "walk.safetensors"
    k, v = (sample_tokens(1, 2, 20, 64, seed=seed) for seed in (0, 1))
    save_file({"k": k, "v": v.float()}, path)
    for side, x in (("k", k), ("v", v)):
        ((key, found),) = oracle.tensors(path, side)
        assert (key.tensor, found.dtype) == ({"k": "key", "v": "value"}[side], torch.bfloat16)
        assert torch.equal(found, x)
    save_file({"k": k[..., :48].clone(), "v": v[..., :48].clone()}, path)
    with pytest.raises(SystemExit, match="head dim is 48, expected a power of two from 64"):
        list(oracle.tensors(path, "k"))


@pytest.mark.cuda
def test_oracle_writes_a_row_for_each_position_of_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("quant_videogen")
    monkeypatch.setattr(oracle, "SYNTHETIC", (1, 2, 300, 128))
    path = tmp_path / "rows.csv"
    oracle.main(["--centroids", "16", "--csv", str(path)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["tensor"], row["switch"]) for row in rows] == [
        (method, side, switch)
        for method in oracle.METHODS
        for side in ("k", "v")
        for switch in ("off", "on")
    ]
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert float(on["both_equal"]) >= 0.9999 > float(off["both_equal"]) > 0.8
        assert float(on["error_between"]) < 1e-3 < float(off["error_between"])
        assert float(off["error_ours"]) == pytest.approx(float(on["error_ours"]), rel=0.01)
        assert (off["quant_videogen"], off["source"]) == ("0.1.0", "synthetic")
        assert off["triton"]
    assert f"{float(rows[0]['both_equal']):.4%}" in capsys.readouterr().out
