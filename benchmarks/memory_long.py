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

import numpy as np
import torch

from benchmarks.memory import add_settings, against_of, settings, with_reference
from benchmarks.memory_bench import Setting, attention_of
from benchmarks.memory_table import cell
from benchmarks.memory_walks import Moment, load_moments, read_tracks
from benchmarks.memory_windows import planned_bytes
from steadykv.cli.common import checked_device
from steadykv.cli.session import network_dtype
from steadykv.errors import ConfigError
from steadykv.evaluation.metrics.drift import drift
from steadykv.evaluation.metrics.horizon import windowed_psnr
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.evaluation.protocol import FEW_EPISODES
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv
from steadykv.evaluation.rollouts import run_batch, warm_up
from steadykv.world import WorldModel, load_world

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


def measured(made: torch.Tensor, true: torch.Tensor, given: argparse.Namespace) -> Iterator[Row]:
    """(part, measure, value) of one video; both uint8 [T, H, W, 3], a part named by its frame."""
    found = windowed_psnr(true, made, 0, given.part)
    yield from _rows("psnr", found.starts, found.psnr)
    batch = 8 if given.device == "cpu" else 128
    distance = lpips_by_frame(
        true[:: given.stride].to(given.device), made[:: given.stride].to(given.device), batch=batch
    ).cpu()
    share = given.part // given.stride
    means = [distance[at : at + share].mean() for at in range(0, len(found.starts) * share, share)]
    yield from _rows("lpips", found.starts, torch.stack(means))
    of_true = drift(true, start=0, window=given.part)
    for name, one in drift(made, true, start=0, window=given.part).items():
        assert one.excess is not None
        yield from _rows(f"{name}.excess", one.starts, one.excess)
        if name == "gradient_energy":  # relative to the true frames of the same part
            yield from _rows(name, one.starts, one.values / of_true[name].values)


def _rows(measure: str, parts: Sequence[int], values: torch.Tensor) -> Iterator[Row]:
    for part, value in zip(parts, values.tolist(), strict=True):
        yield {"part": part, "measure": measure, "value": value}


class Long:
    """Rollouts of all walks and seeds, a batch at a time, with any setting."""

    def __init__(
        self, world: WorldModel, moments: Sequence[Moment], given: argparse.Namespace
    ) -> None:
        self.world, self.moments, self.given = world, moments, given
        self.episodes, self.true = load_moments(moments, given.frames)
        self.plan = [(row, seed) for seed in given.seeds for row in range(len(moments))]
        facts = environment(next(world.parameters()).device)
        self.shared = {
            "prime": given.prime, "generated": given.frames, "span_chunks": given.span_chunks,
            "world": given.world, "torch": facts["torch"], "device": facts["device"],
            "commit": facts["commit"],
        }  # fmt: skip

    def rows(self, setting: Setting) -> list[Row]:
        """A row a walk, seed, part and measure; bytes are those of one rollout of a batch."""
        given, rows = self.given, list[Row]()
        for at in range(0, len(self.plan), given.batch):
            part = self.plan[at : at + given.batch]
            numbers, seeds = [row for row, _ in part], [seed for _, seed in part]
            attention = attention_of(setting)
            if at == 0 and given.device != "cpu":  # kernels are compiled before seconds are counted
                chunk = self.world.config.chunk_frames
                warm_up(self.world, self.episodes, setting.config, frames=chunk,
                        attention=attention)  # fmt: skip
            video, cost = run_batch(
                self.world, self.episodes.select(numbers), seeds, setting.config,
                frames=given.frames, first_packed_frame=0, method=setting.method,
                attention=attention,
            )  # fmt: skip
            total = given.prime + given.frames
            planned = planned_bytes(setting.config, self.world.config, total, len(part)).end
            agrees = "as planned" if planned == cost.resident_bytes else "NOT AS PLANNED"
            print(
                f"{setting.method} with {setting.window} frames: rollouts {at + len(part)} of "
                f"{len(self.plan)}, {cost.seconds:.0f} s; {cost.resident_bytes:,} bytes, {agrees}",
                flush=True,
            )
            own = {
                "method": setting.method, "window": setting.window,
                "budget_window": "" if setting.budget is None else setting.budget,
                "resident_bytes": round(cost.resident_bytes / len(part)),
                "bits_per_element": cost.bits_per_element,
                "batch": len(part), "seconds_a_chunk": cost.seconds
                / ((given.prime + given.frames) / self.world.config.chunk_frames),
            }  # fmt: skip
            for (row, seed), made in zip(part, video, strict=True):
                name = self.moments[row].track.name
                self._keep(setting, name, seed, made)
                key = {"walk": name, "seed": seed} | own
                found = measured(made[given.prime :], self.true[row, given.prime :], given)
                rows += [key | one | self.shared for one in found]
        return rows

    def _keep(self, setting: Setting, walk: str, seed: int, video: torch.Tensor) -> None:
        if self.given.videos is not None:
            self.given.videos.mkdir(parents=True, exist_ok=True)
            method = setting.method.replace(":", "+")
            np.save(self.given.videos / f"{walk}-{method}-{setting.window}-{seed}.npy", video)


def by_walk(
    rows: Sequence[Row], measure: str, part: int
) -> dict[tuple[str, int], dict[str, float]]:
    """Method and window -> walk -> mean over seeds."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in rows:
        if row["measure"] == measure and int(row["part"]) == part:
            setting = str(row["method"]), int(row["window"])
            walks = found.setdefault(setting, {})
            walks.setdefault(str(row["walk"]), []).append(float(row["value"]))
    return {s: {w: float(np.mean(v)) for w, v in walks.items()} for s, walks in found.items()}


def table(rows: Sequence[Row], against: tuple[str, int]) -> str:
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
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text += f"\n{walks} walks; differences are from {against[0]} with {against[1]} frames"
    if walks < FEW_EPISODES:
        text += f"\n{walks} walks are few: intervals are a hint, or there are none"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(arguments)
    torch.set_num_threads(given.threads)
    device = checked_device(given.device)
    world = load_world(given.world, device=device, dtype=network_dtype(device))
    chosen = settings(world.config, given)
    against = against_of(given, chosen)
    long = Long(world, beginnings(given.walks, given.prime, given.frames, given.count), given)
    rows: list[Row] = []
    for setting in chosen:
        rows += long.rows(setting)
        if given.csv is not None:  # after every setting, so that an interruption loses one
            given.csv.parent.mkdir(parents=True, exist_ok=True)
            write_csv(given.csv, rows)
    print(table(rows, against))


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
    given = with_reference(parser.parse_args(arguments))
    if given.stride < 1 or given.part < 1 or given.part % given.stride:
        parser.error(f"--part {given.part} is no multiple of --stride {given.stride}")
    if given.part > given.frames:
        parser.error(f"--part {given.part} is more than the {given.frames} of --frames")
    return given


if __name__ == "__main__":
    main()
