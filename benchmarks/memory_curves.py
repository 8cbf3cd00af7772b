"""How far rollouts drift over hundreds of frames: a picture of curves, a table of the last part.

    python -m benchmarks.memory_curves rows.csv --against bf16 18 --image curves.png

Rows are those of benchmarks.memory_long. Drift is how far a statistic of the frames has moved from
its value in the first part, less what the true frames' own has (the "excess" of
docs/long-horizon.md), either way; colour and contrast are the mean over red, green and blue of the
drift of their mean and of their deviation, in levels of 255. Sharpness is how far the gradient
energy is from the true frames', relative. Less is better. The seeds of a walk are averaged first;
intervals (95 %) are bootstrapped over walks, differences paired.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.curve_figure import DIM, DPI, INK, OWN, PAPER, style
from benchmarks.files import csv_rows, in_one_line
from benchmarks.memory_long import by_walk
from benchmarks.memory_table import Row, Setting, caveats, cell
from steadykv.errors import ConfigError
from steadykv.evaluation.bootstrap import bootstrap_interval

CHANNELS = ("red", "green", "blue")
DRIFTS: Mapping[str, tuple[tuple[str, ...], float, int]] = {
    "colour": (tuple(f"mean_{channel}.excess" for channel in CHANNELS), 0.0, 1),
    "contrast": (tuple(f"std_{channel}.excess" for channel in CHANNELS), 0.0, 1),
    "saturation": (("saturation.excess",), 0.0, 3),
    "sharpness": (("gradient_energy",), 1.0, 2),
}
"""Title -> measures, the value without drift, digits shown."""
PANELS = (("psnr", "PSNR against the true frames, dB"), ("lpips", "LPIPS, less is better"))
COLOURS = (INK, "#2f6fb3", "#3a8a4d", "#8a5bb0", DIM)  # of the report's style sheet, without OWN


def settings_of(rows: Sequence[Row]) -> list[Setting]:
    """In the order of the rows."""
    return list(dict.fromkeys((str(row["method"]), int(row["window"])) for row in rows))


def drifts(rows: Sequence[Row], title: str, part: int) -> dict[Setting, dict[str, float]]:
    """Setting -> walk -> how far it drifted, the mean over channels."""
    measures, still, _ = DRIFTS[title]
    found = [by_walk(rows, measure, part) for measure in measures]
    return {
        setting: {
            walk: float(np.mean([abs(one[setting][walk] - still) for one in found]))
            for walk in found[0][setting]
        }
        for setting in found[0]
    }


def table(rows: Sequence[Row], against: Setting) -> str:
    """Markdown: a line a setting, of the last part."""
    part = max(int(row["part"]) for row in rows)
    settings = settings_of(rows)
    if against not in settings:
        known = ", ".join(f"{method} {window}" for method, window in settings)
        raise ConfigError(f"--against: got {against[0]} {against[1]}, expected one of: {known}")
    found = {title: drifts(rows, title, part) for title in DRIFTS}
    lines = [["method", "window", *(text for name in DRIFTS for text in (name, "difference"))]]
    lines.append(["---"] * len(lines[0]))
    for setting in settings:
        line = [setting[0], str(setting[1])]
        for title, (_, _, digits) in DRIFTS.items():
            own, base = found[title][setting], found[title][against]
            line.append(cell(list(own.values()), digits))
            apart = cell([own[walk] - base[walk] for walk in own], digits, "+")
            line.append("" if setting == against else apart)
        lines.append(line)
    walks = len(found["colour"][against])
    said = [f"| {' | '.join(line)} |" for line in lines]
    said.append(
        f"{walks} walks, generated frames from {part} on; differences are from {against[0]} with "
        f"{against[1]} frames"
    )
    return "\n".join(said + caveats(walks))


def draw(rows: Sequence[Row]) -> Figure:
    """A panel a measure, a line a setting with its interval, over the generated frames."""
    parts = sorted({int(row["part"]) for row in rows})
    middle = np.array(parts) + (parts[1] - parts[0]) / 2 if len(parts) > 1 else np.array(parts)
    figure = Figure(figsize=(9.6, 3.8), dpi=DPI, facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    settings = settings_of(rows)
    others = [setting for setting in settings if setting[0] != "steady"]
    for number, (measure, title) in enumerate(PANELS):
        axes = figure.add_subplot(1, len(PANELS), number + 1)
        style(axes, title, "generated frames, measured together in parts")
        by_part = [by_walk(rows, measure, part) for part in parts]
        for setting in settings:
            own = setting[0] == "steady"
            colour = OWN if own else COLOURS[others.index(setting) % len(COLOURS)]
            values = np.array([list(one[setting].values()) for one in by_part])  # [parts, walks]
            found = [bootstrap_interval(part[:, None]) for part in values]
            low, high = ([float(getattr(one, end)) for one in found] for end in ("low", "high"))
            axes.fill_between(middle, low, high, color=colour, alpha=0.15, lw=0)
            name = f"{setting[0]}, {setting[1]} frames"
            axes.plot(middle, values.mean(1), color=colour, lw=2.2 if own else 1.5, label=name)
        axes.set_ylim(bottom=0 if measure == "lpips" else None)
        if not number:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="CSV of benchmarks.memory_long, .gz or not")
    parser.add_argument("--against", nargs=2, required=True, metavar=("METHOD", "WINDOW"))
    parser.add_argument("--image", type=Path, help="where the picture of the curves goes")
    given = parser.parse_args(arguments)
    rows = csv_rows(given.rows)
    if not rows or not {"method", "window", "walk", "seed", "part", "measure", "value"} <= set(
        rows[0]
    ):
        raise ConfigError(
            f"{given.rows}: got no such rows, expected those of benchmarks.memory_long"
        )
    print(table(rows, (given.against[0], int(given.against[1]))))
    if given.image is not None:
        given.image.parent.mkdir(parents=True, exist_ok=True)
        draw(rows).savefig(given.image, metadata={"Software": None})


if __name__ == "__main__":
    in_one_line(main)
