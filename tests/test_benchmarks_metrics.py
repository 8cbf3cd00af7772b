"""The benchmark of the metrics runs, and its rows say what they claim."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import metrics

SMALL = ["--width", "64", "--height", "48", "--frames", "2", "--threads", "1", "--repeats", "2"]


@pytest.fixture(autouse=True)
def own_threads():  # type: ignore[no-untyped-def]
    """The benchmark sets the number of threads of its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_metric_gets_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in metrics.METRICS if name not in (*metrics.OPTIONAL, "ms_ssim")]
    path = tmp_path / "rows.csv"
    metrics.main([*SMALL, "--metrics", *names, "--csv", str(path)])
    printed = capsys.readouterr().out
    assert "target" not in printed  # another size than the targets'
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["metric"] for row in rows] == names
    for row in rows:
        assert (row["size"], row["threads"], row["device"]) == ("64x48", "1", "cpu")
        assert float(row["frames_per_second"]) * float(row["ms_per_frame"]) == pytest.approx(1e3)
        assert 0 < float(row["ms_least"]) <= float(row["ms_p20"]) <= float(row["ms_per_frame"])
        assert float(row["processor_ms_per_frame"]) > 0


def test_the_table_knows_the_targets() -> None:
    times = dict.fromkeys(("ms_per_frame", "ms_p20", "ms_p80", "processor_ms_per_frame"), 1.0)
    row = {"metric": "basic", "size": metrics.TARGET_SIZE, "load_average": 0.0} | times
    for device, rate, verdict in (
        ("cpu", 15.0, "target 15 frames/s met"),
        ("cpu", 14.9, "target 15 frames/s missed"),
        ("cuda", 199.0, "target 200 frames/s missed"),
    ):
        assert verdict in metrics.table([row | {"frames_per_second": rate}], device)


def test_it_refuses_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--metrics", "snr"], ["--frames", "1"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            metrics.main(wrong)
        assert wrong[1] in capsys.readouterr().err
