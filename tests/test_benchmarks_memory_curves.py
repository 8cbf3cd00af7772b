"""`python -m benchmarks.memory_curves` on made-up rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import memory_curves
from steadykv.errors import ConfigError
from steadykv.evaluation.results import write_csv

CHANNELS = ("red", "green", "blue")
MEASURES = [f"{name}_{channel}.excess" for name in ("mean", "std") for channel in CHANNELS]
MEASURES += ["saturation.excess", "gradient_energy", "psnr", "lpips"]


def rows_of(method: str, window: int, values: dict[str, float]) -> list[dict[str, Any]]:
    """Two walks, two seeds whose mean is the walk's value, two parts; the walk b has twice it."""
    return [
        {"method": method, "window": window, "walk": walk, "seed": seed, "part": part,
         "measure": name, "resident_bytes": 2**20,
         "value": values.get(name, 0.0) * (part > 0) * (1 + (walk == "b")) + seed - 0.5}
        for walk in "ab" for seed in (0, 1) for part in (0, 48) for name in MEASURES
    ]  # fmt: skip


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    values = {"mean_red.excess": -6.0, "mean_green.excess": 3.0, "std_blue.excess": 3.0,
              "saturation.excess": -0.25, "gradient_energy": 0.5, "psnr": 20.0}  # fmt: skip
    return rows_of("bf16", 18, values) + rows_of("steady", 114, {"gradient_energy": 1.0})


def test_drift_counts_either_way_over_channels_and_walks(rows: list[dict[str, Any]]) -> None:
    text = memory_curves.table(rows, ("bf16", 18))
    # colour: (6 + 3) / 3 of the walk a, twice that of b; energy: |0.5 - 1| and |1 - 1|
    assert "| bf16 | 18 | 4.5 (3.0 to 6.0) |  | 1.5 (1.0 to 2.0) |  | 0.375 (0.250 to" in text
    assert "| 0.25 (0.00 to 0.50) |  |" in text
    # steady: no drift but in sharpness, |1 - 1| and |2 - 1|
    assert "| steady | 114 | 0.0 (0.0 to 0.0) | -4.5 (-6.0 to -3.0) |" in text
    assert "| 0.50 (0.00 to 1.00) | +0.25 (-0.50 to +1.00) |" in text
    assert "2 walks, generated frames from 48 on; differences are from bf16 with 18" in text


def test_curves_are_drawn_in_the_colour_of_each_method(
    rows: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, image = tmp_path / "rows.csv", tmp_path / "pages" / "curves.png"
    write_csv(path, rows)
    memory_curves.main([str(path), "--against", "bf16", "18", "--image", str(image)])
    assert "| steady | 114 |" in capsys.readouterr().out
    with Image.open(image) as picture:
        seen = {
            tuple(pixel) for pixel in np.asarray(picture.convert("RGB")).reshape(-1, 3).tolist()
        }
    for colour in (memory_curves.OWN, memory_curves.COLOURS[0]):
        assert tuple(bytes.fromhex(colour[1:])) in seen
    figure = memory_curves.draw(rows)
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["bf16, 18 frames", "steady, 114 frames"]
    assert np.allclose(np.array(lines[0].get_xydata()), [[24, 0], [72, 30]])


def test_what_is_no_such_file_is_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_csv(path, rows)
    with pytest.raises(ConfigError, match="expected one of: bf16 18, steady 114"):
        memory_curves.main([str(path), "--against", "bf16", "24"])
    write_csv(path, [{"method": "bf16"}])
    with pytest.raises(ConfigError, match=r"expected those of benchmarks\.memory_long"):
        memory_curves.main([str(path), "--against", "bf16", "18"])
