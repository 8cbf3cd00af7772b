"""Any two videos against each other: metrics by frame, added up while the files are read.

Metrics see raw uint8 frames in chunks (`video_pair`); what stays is one number a frame and metric.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from steadykv.errors import ConfigError
from steadykv.evaluation.fingerprint import file_hash
from steadykv.evaluation.measure_checks import MEASURE_VERSION, STEPS
from steadykv.evaluation.metrics import (
    flicker,
    flicker_by_step,
    frame_mse,
    lpips,
    ms_ssim,
    psnr_from_mse,
    ssim_by_frame,
)
from steadykv.evaluation.metrics.ssim import WINDOW
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.video_excerpt import Excerpt
from steadykv.evaluation.video_file import PICTURES_FPS
from steadykv.evaluation.video_pair import VideoPair

TAIL = 0.05

ByFrame = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Metric:
    """``first``: frame of the first value (1: a step from frame 0). ``higher``: is better."""

    title: str
    unit: str
    higher: bool
    first: int = 0


METRICS = {
    "psnr": Metric("PSNR", "dB", higher=True),
    "ssim": Metric("SSIM (luma)", "", higher=True),
    "ms_ssim": Metric("MS-SSIM (luma)", "", higher=True),
    "lpips": Metric("LPIPS (AlexNet)", "", higher=False),
    "flicker_error": Metric("flicker error", "", higher=False, first=1),
    "flicker_index_a": Metric("flicker index of A", "", higher=False, first=1),
    "flicker_index_b": Metric("flicker index of B", "", higher=False, first=1),
}


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured. ``window``: also one row a window of that many frames. Raises ConfigError.

    PSNR, SSIM and flicker error always are; ``ms_ssim`` where frames are large enough for it.
    """

    lpips: bool = False
    ms_ssim: bool = True
    flicker_index: bool = True
    window: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"--window: got {self.window}, expected 1 frame or more")


@dataclass
class _Steps:
    """Flicker error over chunks: the step from the last frame of one into the next is kept."""

    last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = []
        if self.last is not None:
            first, second = (torch.stack((x, y[0])) for x, y in zip(self.last, (a, b), strict=True))
            parts.append(flicker_by_step(first, second))
        if len(a) > 1:
            parts.append(flicker_by_step(a, b))
        self.last = a[-1].clone(), b[-1].clone()  # no view: it would keep the chunk
        return torch.cat(parts) if parts else torch.empty(0)


@dataclass
class _Index:
    """The no-reference flicker index of one of the two: it looks at three frames in a row."""

    side: int
    function: Callable[[torch.Tensor], torch.Tensor]
    last: torch.Tensor | None = None

    def __call__(self, *videos: torch.Tensor) -> torch.Tensor:
        frames = videos[self.side]
        joined = frames if self.last is None else torch.cat((self.last, frames))
        self.last = joined[-2:].clone()
        return self.function(joined) if len(joined) > 2 else torch.empty(0)


@dataclass
class Measured:
    """Numbers by frame of a finished measurement; ``mse`` is what PSNR is made of."""

    start: int
    fps: float
    sources: list[dict[str, Any]]
    notes: list[str]
    times: array[float] = field(default_factory=lambda: array("d"))
    series: dict[str, array[float]] = field(default_factory=dict)

    @property
    def frames(self) -> int:
        """How many frames were compared."""
        return len(self.times)

    def values(self, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """FP64 [N], fewer for steps and frames between two others; PSNR of equal frames is inf."""
        values = np.asarray(self.series["mse" if metric == "psnr" else metric], np.float64)
        return psnr_from_mse(torch.from_numpy(values)).numpy() if metric == "psnr" else values

    def mean(self, metric: str, start: int, end: int) -> float | None:
        """Over frames ``start`` .. ``end`` - 1 of those compared; None where there is no value.

        PSNR comes from the mean squared error of the window. A step belongs to the frame that it
        ends in.
        """
        lost = METRICS[metric].first
        name = "mse" if metric == "psnr" else metric
        part = np.asarray(self.series[name], np.float64)[max(start - lost, 0) : max(end - lost, 0)]
        part = part[~np.isnan(part)]
        if not len(part):
            return None
        mean = float(part.mean())
        return (
            float(psnr_from_mse(torch.tensor(mean, dtype=torch.float64)))
            if metric == "psnr"
            else mean
        )

    def tail(self, metric: str) -> dict[str, Any] | None:
        """The worst frame, and the value that 5 % of the frames do not reach; None without any."""
        values, kind = self.values(metric), METRICS[metric]
        places = np.flatnonzero(~np.isnan(values))
        if not len(places):
            return None
        values = values[places]
        place = int(values.argmin() if kind.higher else values.argmax())
        share = TAIL if kind.higher else 1.0 - TAIL
        return {
            "worst": plain(float(values[place])),
            "worst_frame": self.start + int(places[place]) + kind.first,
            "quantile": plain(float(np.quantile(values, share, method="inverted_cdf"))),
        }

    @property
    def metrics(self) -> list[str]:
        """Names of what was measured, in the order of METRICS."""
        return [name for name in METRICS if ("mse" if name == "psnr" else name) in self.series]

    def windows(self, length: int) -> list[dict[str, Any]]:
        """Means of consecutive windows of ``length`` frames; the last one may be shorter."""
        return [
            {
                "start": self.start + at,
                "end": self.start + min(at + length, self.frames),
                **{m: plain(self.mean(m, at, min(at + length, self.frames))) for m in self.metrics},
            }
            for at in range(0, self.frames, length)
        ]

    def by_frame(self, metric: str) -> list[float | str | None]:
        """Values as JSON holds them: N, N - 1 for steps; null where a frame of N has none."""
        values = [plain(value) for value in self.values(metric).tolist()]
        if metric in STEPS:
            return values
        front = [None] * METRICS[metric].first
        return [*front, *values, *[None] * (self.frames - len(values) - len(front))]

    def rows(self) -> list[dict[str, Any]]:
        """One row a frame of A; a step stands beside the frame that it ends in."""
        columns = {name: self.by_frame(name) for name in self.metrics}
        for name in STEPS & columns.keys():
            columns[name] = [None, *columns[name]]
        return [
            {"frame": self.start + i, "seconds": self.times[i], "mse": self.series["mse"][i]}
            | {name: values[i] for name, values in columns.items()}
            for i in range(self.frames)
        ]


def plain(value: float | None) -> float | str | None:
    """A number as strict JSON holds it: infinity as "inf", NaN as null."""
    if value is None or np.isnan(value):
        return None
    return "inf" if np.isposinf(value) else value


def measure(
    pair: VideoPair,
    options: MeasureOptions,
    *,
    excerpt: Excerpt | None = None,
    on_progress: Progress | None = None,
) -> Measured:
    """Read both videos once and measure every pair of frames.

    ``excerpt`` also receives the frames. Besides them, memory does not depend on the length: two
    chunks of frames, 8 bytes a frame and metric. Raises what VideoPair.chunks and the metrics do.
    """
    width, height = pair.size
    notes: list[str] = []
    meters = _meters(min(width, height), options, notes)
    measured = Measured(
        pair.options.start, pair.first.fps or pair.second.fps or PICTURES_FPS, [], notes
    )
    measured.series = {name: array("d") for name in meters}
    total = pair.expected
    for chunk in pair.chunks():
        a, b = (torch.from_numpy(frames).to(options.device) for frames in (chunk.a, chunk.b))
        for name, meter in meters.items():
            measured.series[name].extend(meter(a, b).tolist())
        measured.times.extend(chunk.times)
        if excerpt is not None:
            excerpt.add(chunk.a, chunk.b)
        if on_progress is not None:
            on_progress(measured.frames, max(total, measured.frames), "measuring")
    measured.sources = [
        file.to_dict() | {"sha256": file_hash(file.path)} for file in (pair.first, pair.second)
    ]
    measured.notes = [*pair.notes, *notes]
    return measured


def _meters(side: int, options: MeasureOptions, notes: list[str]) -> dict[str, ByFrame]:
    """What is computed for every chunk; what the frames are too small for is noted."""

    def fits(name: str, least: int) -> bool:
        if side < least:
            notes.append(f"{name} was left out: the shorter side has {side} pixels, not {least}")
        return side >= least

    meters: dict[str, ByFrame] = {"mse": frame_mse}
    if fits("SSIM", WINDOW):
        meters["ssim"] = partial(ssim_by_frame, channels="luma")
    if options.ms_ssim and fits("MS-SSIM", ms_ssim.SMALLEST):
        meters["ms_ssim"] = partial(ms_ssim.ms_ssim_by_frame, channels="luma")
    if options.lpips and fits("LPIPS", lpips.SMALLEST):
        meters["lpips"] = partial(lpips.lpips_by_frame, model=lpips.LPIPS(options.device))
    meters["flicker_error"] = _Steps()
    if options.flicker_index and fits("the flicker index", flicker.SMALLEST):
        meters |= {
            f"flicker_index_{letter}": _Index(number, flicker.flicker_index)
            for number, letter in enumerate("ab")
        }
    return meters


def measurement_data(
    measured: Measured,
    options: MeasureOptions,
    pair: VideoPair,
    *,
    command: str,
    excerpt: Excerpt | None = None,
) -> dict[str, Any]:
    """The object that ``measure.json`` holds; docs/measure.md describes its fields."""
    count, chosen = measured.frames, pair.options
    return {
        "version": MEASURE_VERSION,
        "sources": measured.sources,
        "frames": count,
        "fps": measured.fps,
        "start": measured.start,
        "end": chosen.end,
        "width": pair.size[0],
        "height": pair.size[1],
        "match": chosen.match,
        "shortest": chosen.shortest,
        "resize": chosen.resize,
        "summary": {name: plain(measured.mean(name, 0, count)) for name in measured.metrics},
        "tails": {name: measured.tail(name) for name in measured.metrics},
        "windows": measured.windows(options.window) if options.window else [],
        "by_frame": {name: measured.by_frame(name) for name in measured.metrics},
        "notes": measured.notes,
        "excerpt": None if excerpt is None else excerpt.to_dict(),
        "command": command,
        "environment": environment(options.device),
    }


STORED_ROW = ("sources", "frames", "fps", "width", "height", "summary", "tails", "notes")
STORED_CONFIGURATION = ("start", "end", "match", "shortest", "resize")


def stored(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of a measurement in a result store, and its configuration; no values by frame."""
    configuration = {name: data[name] for name in STORED_CONFIGURATION}
    return (
        {name: data[name] for name in STORED_ROW},
        configuration | {"metrics": list(data["summary"])},
    )
