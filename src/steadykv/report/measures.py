"""The columns of every table of results: where a number lies in a row, how it is shown and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadykv.evaluation.protocol import PSNR_CEILING_DB
from steadykv.report.text import packed_rows

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """One column.

    title, unit: its head; short: the same in a terminal. path: names that lead to the number in a
    row of ``metrics.json``, to its interval and to its paired difference. digits: decimals shown.
    better: min or max, None where neither end is better. scale: from the stored number to the
    shown one. after: printed behind it. is_size: a property of the cache, not of the video.
    has_bar: drawn as a length as well.
    """

    title: str
    unit: str
    short: str
    path: tuple[str, ...]
    meaning: str
    digits: int
    better: Callable[[Sequence[float]], float] | None = None
    scale: float = 1.0
    after: str = ""
    is_size: bool = False
    has_bar: bool = False

    @property
    def is_psnr(self) -> bool:
        """Whether this is a PSNR, which has a ceiling."""
        return self.path[0] == "psnr_windows"

    def value(self, row: Row) -> float | None:
        """The number as shown, None where the row has none."""
        found = _find(row, self.path)
        return None if found is None else self.scale * float(found)

    def interval(self, row: Row) -> str:
        """The interval of the mean as text, empty where there is none or it says nothing."""
        found = _find(row["intervals"], self.path)
        value = self.value(row)
        if found is None or value is None or self._is_at_ceiling(value):
            return ""
        low, high = (self.show(self.scale * bound) for bound in found)
        return "" if low == high else f"{low}–{high}"

    def detail(self, row: Row) -> str:
        """The small line below the number: its interval, or the mean over time of a final value."""
        if self.path == ("compression",):
            return f"mean {self.show(row['compression_mean'])}"
        if self.path == ("bits_per_element",):
            mean = row.get("bits_per_element_mean")
            text = "" if mean is None else self.show(mean)
            return f"mean {text}" if text not in ("", self.show(row["bits_per_element"])) else ""
        return self.interval(row)

    def paired(self, row: Row) -> tuple[str, str] | None:
        """Mean difference to the method that ``paired`` names, and its interval, as text."""
        found = _find(row["paired"], self.path)
        if found is None:
            return None
        bounds = [] if found["interval"] is None else found["interval"]
        mean, *ends = (self._signed(number) for number in [found["mean"], *bounds])
        return mean, " to ".join(ends)

    def verdict(self, row: Row) -> str:
        """What `steadykv.evaluation.verdict` says of that difference; empty in an old file."""
        found = _find(row["paired"], self.path) or {}
        return str(found.get("verdict", ""))

    def shown(self, row: Row) -> str:
        """The row's number as text; ∞ for a PSNR of pictures that are the same in every rollout.

        Rows count it as their ceiling, which others only reach, or pass, by hardly differing.
        """
        value = self.value(row)
        if value is None:
            return "–"
        if not self._is_at_ceiling(value):
            return self.show(value)
        last = int(self.path[-1].rpartition("-")[2])  # of the window's frames
        changed = row["first_changed_frame"]
        return "∞" if changed is None or changed > last else f"≥ {self.show(PSNR_CEILING_DB)}"

    def show(self, value: float) -> str:
        """A number as text, with this column's decimals."""
        return f"{value:,.{self.digits}f}{self.after}"

    def _is_at_ceiling(self, value: float) -> bool:
        return self.is_psnr and value >= PSNR_CEILING_DB - 0.5 * 10**-self.digits

    def _signed(self, stored: float) -> str:
        return f"{self.scale * stored:+,.{self.digits}f}".replace("-", "−")


def is_best(measure: Measure, row: Row, rows: Sequence[Row]) -> bool:
    """Whether no other packing method has a better number, and at least one has a worse one.

    Sizes are facts. A measured quality is best only if the rows say that it is better than that of
    every other packing method: see `steadykv.evaluation.verdict`.
    """
    packed = packed_rows(rows)
    values = [value for value in map(measure.value, packed) if value is not None]
    if measure.better is None or row not in packed or len(set(values)) < 2:
        return False
    if measure.value(row) != measure.better(values):
        return False
    if measure.is_size:
        return True
    beaten = row.get("better_than", {}).get(".".join(measure.path), ())
    return all(other is row or other["method"] in beaten for other in packed)


def measures(rows: Sequence[Row]) -> list[Measure]:
    """The columns for these rows; the windows of PSNR are theirs."""
    first_packed = rows[0]["configuration"]["first_packed_frame"]
    windows = [(label, label.replace("-", "–")) for label in rows[0]["psnr_windows"]]
    return [
        Measure(
            title="bits",
            unit="per number",
            short="bits",
            path=("bits_per_element",),
            meaning="Stored bits per number of the packed part of the cache, with everything that "
            "unpacking needs: codes, scales, centroids, indices, corrections.",
            digits=3,
            better=min,
            is_size=True,
        ),
        Measure(
            title="compression",
            unit="times smaller",
            short="smaller",
            path=("compression",),
            meaning="BF16 bytes of everything in the cache, divided by the bytes really held at "
            "the end (small: averaged over the walk). Lower than 16 / bits, because the newest "
            "frames wait unpacked and because statistics are held.",
            digits=2,
            better=max,
            after="×",
            is_size=True,
        ),
        Measure(
            title="resident",
            unit="MiB",
            short="MiB",
            path=("resident_bytes",),
            meaning="Memory that the cache of one walk holds at the end.",
            digits=2,
            better=min,
            scale=2**-20,
            is_size=True,
            has_bar=True,
        ),
        Measure(
            title="peak",
            unit="MiB",
            short="peak MiB",
            path=("peak_bytes",),
            meaning="Largest memory of the cache and of its temporary buffers at any moment of one "
            "walk; the network's weights and activations are not counted.",
            digits=2,
            better=min,
            scale=2**-20,
            is_size=True,
        ),
        *(
            Measure(
                title="PSNR",
                unit=f"dB, {shown}",
                short=f"dB {shown}",
                path=("psnr_windows", label),
                meaning=f"Closeness to the original over frames {shown}: more is closer. Frame "
                f"{first_packed} is the first that can differ.",
                digits=1,
                better=max,
            )
            for label, shown in windows
        ),
        Measure(
            title="SSIM",
            unit="at most 1",
            short="SSIM",
            path=("ssim",),
            meaning="Structural similarity to the original over the longest window; 1 is the same.",
            digits=4,
            better=max,
        ),
        Measure(
            title="flicker",
            unit="error ×1000",
            short="flicker ×1000",
            path=("flicker_error",),
            meaning="How much the change from frame to frame differs from the original's, in "
            "thousandths of the full range of a pixel: 0 is the same motion.",
            digits=2,
            better=min,
            scale=1000.0,
        ),
        Measure(
            title="shift",
            unit="top-1, %",
            short="shift %",
            path=("top1_shift",),
            meaning="Share of lookups that find another remembered patch than with the original "
            "cache.",
            digits=1,
            better=min,
            scale=100.0,
        ),
        Measure(
            title="time",
            unit="s a walk",
            short="s",
            path=("seconds",),
            meaning="Wall-clock seconds of one walk on the device named below, packing included.",
            digits=1,
        ),
    ]


def _find(place: Any, path: Sequence[str]) -> Any:
    for name in path:
        place = place.get(name) if isinstance(place, Mapping) else None
    return place
