"""Hundreds of frames at equal bytes, against the true ones: does the room stay?

    python training/data.py --recipe training/rooms.json --walks 0 --turns 48 --out /tmp/turns
    python -m benchmarks.memory_long --walks /tmp/turns --device cuda --windows 18 --equal-bytes \\
        --csv rows.csv
    python -m benchmarks.memory_long --walks /tmp/turns --count 2 --frames 96 --methods bf16 \\
        --windows 24 123

`--turns 48` records walkers who stand still and turn left for 48 frames, once around, back right
for as many, and so on, so that every frame but those of the first turn has been seen before. The
cache is given the first `--prime` (96) true frames of every walk, and `--frames` (720) more are
generated with the walk's own buttons. They are held against the true ones in parts of `--part`
frames: PSNR over the part in common, LPIPS as the mean of every `--stride`-th frame, and how far
colour and sharpness have drifted from the first part's, less the true frames' own drift (the
"excess" of docs/long-horizon.md). Windows and bytes are as in benchmarks.memory. The table shows
the first, middle and last parts; differences are paired, over walks, from `--against`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory_table
from benchmarks.files import in_one_line
from benchmarks.memory import add_settings, run, with_reference
from benchmarks.memory_bench import Rollouts, Setting
from benchmarks.memory_table import cell
from benchmarks.memory_walks import Moment, read_tracks
from steadykv.errors import ConfigError
from steadykv.evaluation.metrics.drift import drift
from steadykv.evaluation.metrics.horizon import windowed_psnr
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.world import WorldModel

Row = dict[str, Any]
TITLES = {"psnr": ("PSNR, dB", 2), "lpips": ("LPIPS", 3), "gradient_energy": ("sharpness", 2)}


def beginnings(folder: Path, prime: int, frames: int, count: int | None) -> list[Moment]:
    """The first frames of the walks of a folder; ConfigError where one is too short."""
    tracks = read_tracks(folder)[:count]
    for one in tracks:
        if one.length < prime + frames:
            raise ConfigError(
                f"{one.name}: got {one.length} frames, expected {prime + frames} for --prime and "
                "--frames; ask for fewer"
            )
    return [Moment(one, prime, prime, (), ()) for one in tracks]


def measured(
    made: torch.Tensor, true: torch.Tensor, given: argparse.Namespace
) -> Iterator[tuple[str, Sequence[int], torch.Tensor]]:
    """(measure, parts, values [B, N]) of videos uint8 [B, T, H, W, 3] on the device that works.

    A part is named by its first frame.
    """
    found = windowed_psnr(true, made, 0, given.part)
    yield "psnr", found.starts, found.psnr
    batch = 8 if made.device.type == "cpu" else 128
    distance = lpips_by_frame(true[:, :: given.stride], made[:, :: given.stride], batch=batch)
    share = given.part // given.stride
    kept = distance[:, : len(found.starts) * share]
    yield "lpips", found.starts, kept.unflatten(1, (-1, share)).mean(-1)
    for name, one in drift(made, true, start=0, window=given.part).items():
        assert one.excess is not None
        yield f"{name}.excess", one.starts, one.excess
        if name == "gradient_energy":  # relative to the true frames of the same part
            real = drift(true, start=0, window=given.part)[name]
            yield name, one.starts, one.values / real.values


class Long(Rollouts):
    """Rollouts from the beginning of walks, in parts."""

    def name_of(self, moment: Moment) -> str:
        return moment.track.name

    def rows(self, setting: Setting) -> list[Row]:
        """A row a walk, seed, part and measure; bytes are those of one rollout of a batch."""
        given, rows = self.given, list[Row]()
        chunks = (given.prime + given.frames) / self.world.config.chunk_frames
        for part, true, made, cost in self.batches(setting):
            own = cost | {
                "method": setting.method, "window": setting.window,
                "budget_window": "" if setting.budget is None else setting.budget,
                "batch": len(part), "seconds_a_chunk": cost["seconds"] * len(part) / chunks,
            }  # fmt: skip
            keys = [{"walk": self.moments[row].track.name, "seed": seed} for row, seed in part]
            found = measured(made.to(self.device), true.to(self.device), given)
            for measure, starts, values in found:
                for key, by_part in zip(keys, values.tolist(), strict=True):
                    rows += [
                        key | own | {"part": start, "measure": measure, "value": value}
                        | self.shared
                        for start, value in zip(starts, by_part, strict=True)
                    ]  # fmt: skip
        return rows


def by_walk(
    rows: Sequence[memory_table.Row], measure: str, part: int
) -> dict[tuple[str, int], dict[str, float]]:
    """Method and window -> walk -> mean over seeds."""
    chosen = [r for r in rows if r["measure"] == measure and int(r["part"]) == part]
    return memory_table.by_walk([{**row, "start": 0} for row in chosen], "value")


def table(rows: Sequence[memory_table.Row], against: tuple[str, int]) -> str:
    """Markdown: a line a setting and shown part, means and paired differences over walks."""
    parts = sorted({int(row["part"]) for row in rows})
    shown = sorted({parts[0], parts[len(parts) // 2], parts[-1]})
    bytes_of = {(str(r["method"]), int(r["window"])): int(r["resident_bytes"]) for r in rows}
    titles = [title for title, _ in TITLES.values()]
    lines = [["method", "window", "MiB", "from frame", *titles, "PSNR, difference",
              "LPIPS, difference"]]  # fmt: skip
    lines.append(["---"] * len(lines[0]))
    walks = 0
    for part in shown:
        means = {name: by_walk(rows, name, part) for name in TITLES}
        for setting, size in bytes_of.items():
            cells = [cell(list(means[n][setting].values()), d) for n, (_, d) in TITLES.items()]
            apart = ["", ""]
            if setting != against:
                apart = [
                    cell([means[n][setting][w] - base for w, base in means[n][against].items()],
                         TITLES[n][1], "+")
                    for n in ("psnr", "lpips")
                ]  # fmt: skip
            walks = len(means["psnr"][setting])
            head = [setting[0], str(setting[1]), f"{size / 2**20:.2f}", str(part)]
            lines.append([*head, *cells, *apart])
    said = [f"| {' | '.join(line)} |" for line in lines]
    said.append(f"{walks} walks; differences are from {against[0]} with {against[1]} frames")
    return "\n".join(said + memory_table.caveats(walks))


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(arguments)

    def prepare(world: WorldModel) -> tuple[Rollouts, list[Row]]:
        moments = beginnings(given.walks, given.prime, given.frames, given.count)
        return Long(world, moments, given), []

    run(given, prepare, table)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_settings(parser)
    add = parser.add_argument
    add("--prime", type=int, default=96, help="true frames before the generated ones")
    add("--frames", type=int, default=720, help="generated frames")
    add("--part", type=int, default=96, help="frames measured together")
    add("--stride", type=int, default=8, help="every so many frames have their LPIPS taken")
    add("--count", type=int, help="so many walks; default: all")
    given = with_reference(parser, parser.parse_args(arguments))
    if given.stride < 1 or given.part < 1 or given.part % given.stride:
        parser.error(f"--part {given.part} is no multiple of --stride {given.stride}")
    if given.part > given.frames:
        parser.error(f"--part {given.part} is more than the {given.frames} of --frames")
    return given


if __name__ == "__main__":
    in_one_line(main)
