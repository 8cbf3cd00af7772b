"""A long walk that keeps turning left and back right: does the place stay the same?

    python -m benchmarks.horizon --csv rows.csv                  # walk 61, 720 frames, qvg
    python -m benchmarks.horizon --walks 61 14 --methods floor qvg quantwm --csv rows.csv
    python -m benchmarks.horizon --device cuda --videos raw --features --csv rows.csv

Every walk starts with its three true frames and then turns `--sweep` frames left, as many right,
and so on. Methods are caches; bf16, which all are compared with, always runs, and "floor" is bf16
with another implementation of attention. All walks and seeds are one batch. Measures are those of
docs/long-horizon.md: PSNR against bf16 and drift by windows of one there-and-back, so that every
window sees the same headings; revisit consistency within and beyond the model's window of frames.
`--videos` keeps the raw frames in a folder (WALK-METHOD-SWEEP-SEED.npy) and takes those that are
there, if long enough: frames do not depend on later ones. `--features` adds the proxy's drift
(extra `features`), of every fourth frame.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steadykv.cli.common import checked_device
from steadykv.cli.session import network_dtype
from steadykv.config import CachePolicy
from steadykv.evaluation.metrics.drift import drift
from steadykv.evaluation.metrics.horizon import revisit_consistency, windowed_psnr
from steadykv.evaluation.protocol import FLOOR, Protocol, first_packed_frame
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv
from steadykv.evaluation.revisits import Revisit, revisits, scripted, there_and_back, turn_poses
from steadykv.evaluation.rollouts import run_batch
from steadykv.world import Episodes, WorldModel, load_episodes, load_world

REFERENCE = "bf16"
Rollout = tuple[int, int]
"""Number of a walk, and seed."""
FEATURE_STRIDE = 4
"""Every so many frames go through the proxy: 0.6 s each on a busy core."""


def scripted_walks(world: WorldModel, numbers: Sequence[int], frames: int, sweep: int) -> Episodes:
    """Held-out walks whose buttons are replaced after their true frames."""
    walks = load_episodes(numbers)
    context = world.config.chunk_frames
    turns = there_and_back(frames, sweep)
    actions = np.stack([scripted(own[:context].numpy(), turns) for own in walks.actions])
    return Episodes(walks.frames, torch.from_numpy(actions), walks.names)


def roll_out(
    world: WorldModel,
    walks: Episodes,
    seeds: Sequence[int],
    method: str,
    policy: CachePolicy,
    frames: int,
) -> torch.Tensor:
    """Raw frames, uint8 [B, T, H, W, 3], of all walks at a time; prints how fast they come."""
    name = REFERENCE if method == FLOOR else method
    config = Protocol((name,), policy=policy, shift=None).configurations()[name]
    began = time.perf_counter()

    def on_chunk(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            seconds = time.perf_counter() - began
            print(f"{len(walks)} of {method}: chunk {done}/{total}, {seconds:.0f} s", flush=True)

    video, _ = run_batch(
        world, walks, seeds, config,
        frames=frames,
        first_packed_frame=first_packed_frame(policy, world.config.chunk_frames),
        method=method,
        attention="math" if method == FLOOR else "sdpa",
        on_chunk=on_chunk,
    )  # fmt: skip
    return video


class Videos:
    """Raw frames by method, walk and seed: kept in a folder, made where they are not there."""

    def __init__(self, world: WorldModel, policy: CachePolicy, given: argparse.Namespace) -> None:
        self.world, self.policy, self.given = world, policy, given
        self.length = world.config.chunk_frames + given.frames

    def of(self, method: str) -> dict[Rollout, torch.Tensor]:
        """uint8 [T, H, W, 3] of every walk and seed."""
        wanted = [(walk, seed) for seed in self.given.seeds for walk in self.given.walks]
        kept = ((which, self._kept(method, which)) for which in wanted)
        found = {which: video for which, video in kept if video is not None}
        missing = [which for which in wanted if which not in found]
        if missing:
            numbers, seeds = zip(*missing, strict=True)
            walks = scripted_walks(self.world, numbers, self.given.frames, self.given.sweep)
            made = roll_out(self.world, walks, seeds, method, self.policy, self.given.frames)
            for which, video in zip(missing, made, strict=True):
                found[which] = video
                if self.given.videos is not None:
                    self.given.videos.mkdir(parents=True, exist_ok=True)
                    np.save(self._path(method, which), video.numpy())
        return found

    def _path(self, method: str, which: Rollout) -> Path:
        walk, seed = which
        name = f"{walk}-{method.replace(':', '+')}-{self.given.sweep}-{seed}.npy"
        folder: Path = self.given.videos
        return folder / name

    def _kept(self, method: str, which: Rollout) -> torch.Tensor | None:
        if self.given.videos is None or not self._path(method, which).exists():
            return None
        video = np.load(self._path(method, which))
        return torch.from_numpy(video[: self.length]) if len(video) >= self.length else None


def rows_of(
    video: torch.Tensor,
    reference: torch.Tensor | None,
    visits: Sequence[Revisit],
    *,
    start: int,
    window: int,
    features: bool,
) -> Iterator[dict[str, Any]]:
    """(measure, part, unit, value) of one video; part is a window's first frame, or which pairs."""
    if reference is not None:
        found = windowed_psnr(reference, video, start, window)
        for first, value in zip(found.starts, found.psnr.tolist(), strict=True):
            yield {"measure": "psnr", "part": first, "unit": "dB", "value": value}
    for name, one in drift(video, reference, start=start, window=window).items():
        for column in ("values", "change", "excess"):
            numbers = getattr(one, column)
            for first, value in zip(one.starts, [] if numbers is None else numbers.tolist(),
                                    strict=numbers is not None):  # fmt: skip
                yield {"measure": f"{name}.{column}", "part": first, "unit": one.unit,
                       "value": value}  # fmt: skip
    for kind, one in revisit_consistency(video, visits).items():
        counts = {"pairs": one.pairs, "controls": one.paired, "gap": one.gap}
        for name, value in counts.items():
            unit = "frames" if name == "gap" else "pairs"
            yield {"measure": f"revisit.{name}", "part": kind, "unit": unit, "value": value}
        for side, likeness in (("same", one.revisits), ("control", one.controls)):
            if likeness is not None:
                yield {"measure": f"revisit.{side}.psnr", "part": kind, "unit": "dB",
                       "value": likeness.psnr}  # fmt: skip
                yield {"measure": f"revisit.{side}.ssim", "part": kind, "unit": "1",
                       "value": likeness.ssim}  # fmt: skip
    if features:
        yield from feature_rows(video, reference, start, window)


def feature_rows(
    video: torch.Tensor, reference: torch.Tensor | None, start: int, window: int
) -> Iterator[dict[str, Any]]:
    """Drift of the proxy's features from the first window, and from the reference's windows."""
    from steadykv.evaluation.metrics.features import NAME, feature_drift, features_by_frame

    own = features_by_frame(video[start::FEATURE_STRIDE])
    sides = {"own": None}
    if reference is not None:
        sides["reference"] = features_by_frame(reference[start::FEATURE_STRIDE])
    for side, other in sides.items():
        found = feature_drift(own, other, window=window // FEATURE_STRIDE).tolist()
        for number, value in enumerate(found):
            yield {"measure": f"{NAME}.{side}", "part": start + number * window,
                   "unit": "1 - cosine", "value": value}  # fmt: skip


def measure(
    world: WorldModel, methods: Sequence[str], given: argparse.Namespace
) -> list[dict[str, Any]]:
    """All rows, bf16 first."""
    shape = world.config
    policy = CachePolicy(
        span_chunks=2, window_frames=shape.window_frames, sink_frames=shape.sink_frames
    )
    facts = environment(next(world.parameters()).device)
    shared = {
        "frames": given.frames, "sweep": given.sweep, "window": 2 * given.sweep,
        "torch": facts["torch"], "device": facts["device"], "commit": facts["commit"],
    }  # fmt: skip
    videos = Videos(world, policy, given)
    references: dict[Rollout, torch.Tensor] = {}
    rows = []
    for method in methods:
        found = videos.of(method)
        for (walk, seed), video in found.items():
            scripted_one = scripted_walks(world, [walk], given.frames, given.sweep)
            visits = revisits(
                turn_poses(scripted_one.actions[0].numpy(), start=shape.chunk_frames),
                window_frames=shape.window_frames,
                chunk_frames=shape.chunk_frames,
                sink_frames=shape.sink_frames,
            )
            own = rows_of(
                video, references.get((walk, seed)), visits,
                window=2 * given.sweep,
                features=given.features,
                start=first_packed_frame(policy, shape.chunk_frames),
            )  # fmt: skip
            named = {"walk": walk, "episode": scripted_one.names[0], "seed": seed}
            rows += [{"method": method} | row | named | shared for row in own]
        if method == REFERENCE:
            references = found
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A few lines a method: the ends of the curves, and the revisits."""
    lines = []
    for which in dict.fromkeys((row["walk"], row["seed"], row["method"]) for row in rows):
        own = [r for r in rows if (r["walk"], r["seed"], r["method"]) == which]
        values = {(r["measure"], r["part"]): r["value"] for r in own}
        lines.append("walk {}, seed {}, {}, {} frames".format(*which, own[0]["frames"]))
        for kind in ("within", "beyond"):
            if ("revisit.same.psnr", kind) in values:
                same, other = (values.get((f"revisit.{side}.psnr", kind), math.nan)
                               for side in ("same", "control"))  # fmt: skip
                lines.append(
                    f"  {kind:<7}{values['revisit.pairs', kind]:>5} revisits: {same:.2f} dB, "
                    f"controls {other:.2f} dB"
                )
        for name in dict.fromkeys(r["measure"] for r in own):
            if name.startswith("revisit") or name.endswith(".change"):
                continue
            curve = [r["value"] for r in own if r["measure"] == name]
            lines.append(f"  {name:<28} {curve[0]:10.3f} ... {curve[-1]:10.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(arguments)
    torch.set_num_threads(given.threads)
    methods = [REFERENCE, *(name for name in given.methods if name != REFERENCE)]
    device = checked_device(given.device)
    world = load_world(device=device, dtype=network_dtype(device))
    rows = measure(world, methods, given)
    print(table(rows))
    if given.csv is not None:
        given.csv.parent.mkdir(parents=True, exist_ok=True)
        write_csv(given.csv, rows)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--walks", type=int, nargs="+", default=[61], help="held-out walks")
    parser.add_argument("--methods", nargs="+", default=["qvg"], help="floor, presets, keys:values")
    parser.add_argument("--frames", type=int, default=720, help="generated, a multiple of 3")
    parser.add_argument("--sweep", type=int, default=24, help="frames of a turn to one side")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu", help="of the rollouts: cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--features", action="store_true", help="also the proxy's drift")
    parser.add_argument("--videos", type=Path, help="folder of raw frames, kept and taken again")
    parser.add_argument("--csv", type=Path, help="where the rows go")
    given = parser.parse_args(arguments)
    if given.frames < 2 * given.sweep + given.sweep or given.sweep < 1:
        parser.error(
            f"--frames {given.frames} is less than three sweeps of {given.sweep}; make it longer"
        )
    return given


if __name__ == "__main__":
    main()
