"""Do packed caches flicker more than BF16? The no-reference index of paired rollouts.

    python -m benchmarks.flicker_rollouts --device cuda --episodes 64 --batch 32 --seeds 4 5 \\
        --methods bf16 floor qvg quantwm --videos /tmp/flicker --csv rows.csv

Held-out episodes of the embedded world model, the same actions and noise for every method; spans of
two chunks and 32 centroids, as `steadykv compare` has them; "floor" is BF16 with another
implementation of attention. Videos are kept in --videos, one batch of episodes a file, so that an
interrupted run continues and another index needs no new rollouts; those that are not there are
made. Judged are --judged frames from the first that reads packed data on (an element of the index
needs its two neighbours, so the frames before and behind are touched as well), by default one
chunk: the farther the paired videos have parted, the more they differ by what they show.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from steadykv.cli.common import checked_device
from steadykv.config import CachePolicy
from steadykv.evaluation.bootstrap import bootstrap_interval
from steadykv.evaluation.metrics.flicker import flicker_index_of
from steadykv.evaluation.metrics.temporal import flicker_error
from steadykv.evaluation.protocol import FLOOR, Protocol, first_packed_frame
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv
from steadykv.evaluation.rollouts import run_batch
from steadykv.world import WorldModel, load_episodes, load_world

METHODS = ("bf16", "qvg", "quantwm")


class Rollouts:
    """Videos by method, made where they are missing."""

    def __init__(
        self,
        folder: Path,
        frames: int,
        dtype: torch.dtype,
        methods: Sequence[str],
        device: torch.device | str = "cpu",
        batch: int = 4,
    ):
        self.folder, self.frames, self.dtype, self.device = folder, frames, dtype, device
        self.batch, self.methods = batch, tuple(methods)
        self.world: WorldModel | None = None
        shape = load_world(dtype=dtype).config
        self.context = shape.chunk_frames
        policy = CachePolicy(
            span_chunks=2, window_frames=shape.window_frames, sink_frames=shape.sink_frames
        )
        names = tuple(dict.fromkeys("bf16" if name == FLOOR else name for name in methods))
        self.configs = Protocol(names, (0,), frames, policy, shift=None).configurations()
        self.first_packed = first_packed_frame(policy, shape.chunk_frames)
        folder.mkdir(parents=True, exist_ok=True)

    def video(self, method: str, first: int, seed: int) -> torch.Tensor:
        """uint8 [B, T, H, W, 3] of the B episodes from `first` on."""
        path = self.folder / f"{method}-{first}-{seed}.safetensors"
        total = self.context + self.frames
        if path.exists():
            held = load_file(path)["video"]
            if held.shape[1] >= total:
                return held[:, :total]  # causal: a longer rollout begins with the shorter one
        if self.world is None:
            self.world = load_world(device=self.device, dtype=self.dtype)
        rows = load_episodes(range(first, first + self.batch))
        made, _ = run_batch(
            self.world, rows, [seed] * self.batch,
            self.configs["bf16" if method == FLOOR else method],
            frames=self.frames,
            first_packed_frame=self.first_packed,
            method=method,
            attention="math" if method == FLOOR else "sdpa",
        )  # fmt: skip
        part = path.with_suffix(".part")
        save_file({"video": made.contiguous()}, part)
        part.rename(path)
        print(f"made {path.name}", flush=True)
        return made


def measure(
    rollouts: Rollouts, episodes: int, seeds: Sequence[int], judged: int
) -> list[dict[str, Any]]:
    """A row for each method, episode and seed."""
    rows = []
    facts = environment(rollouts.device)
    names = load_episodes(episodes).names
    for seed in seeds:
        for first in range(0, episodes, rollouts.batch):
            reference = None
            for method in rollouts.methods:
                video = rollouts.video(method, first, seed)
                reference = video if reference is None else reference
                start = rollouts.first_packed
                index = flicker_index_of(video.to(rollouts.device), start, start + judged)
                error = flicker_error(reference, video, start, start + judged)
                for row in range(rollouts.batch):
                    rows.append(
                        {
                            "method": method,
                            "episode": names[first + row],
                            "seed": seed,
                            "flicker_index": index[row].item(),
                            "flicker_error": error[row].item(),
                            "first_frame": start,
                            "judged": judged,
                            "frames": video.shape[1],
                            "world_dtype": str(rollouts.dtype).removeprefix("torch."),
                            **facts,
                        }
                    )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Means, and each method's pairs with the first one."""
    index: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        key = row["episode"], row["seed"]
        index.setdefault(row["method"], {})[key] = row["flicker_index"]
    reference, *others = index
    lines = [f"{reference:<9} mean {_mean(index[reference].values()):.5f}"]
    for method in others:
        pairs = [(index[method][key], value) for key, value in index[reference].items()]
        higher = sum(own > plain for own, plain in pairs)
        ratios = [own / plain for own, plain in pairs]
        by_episode: dict[str, list[float]] = {}
        for key, value in index[reference].items():
            by_episode.setdefault(key[0], []).append(index[method][key] - value)
        interval = bootstrap_interval(list(by_episode.values()))
        lines.append(
            f"{method:<9} mean {_mean(index[method].values()):.5f}  higher than {reference} in "
            f"{higher} of {len(pairs)} pairs ({higher / len(pairs):.0%}), median ratio "
            f"{sorted(ratios)[len(ratios) // 2]:.2f}, difference "
            f"{float(interval.low):+.5f} to {float(interval.high):+.5f}"
        )
    return "\n".join(lines)


def _mean(values: Any) -> float:
    return sum(values) / len(values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=32, help="a multiple of --batch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--frames", type=int, default=9, help="generated ones")
    parser.add_argument("--judged", type=int, default=3, help="frames of the index")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="the first is the reference")
    parser.add_argument("--device", default="cpu", help="of the rollouts: cpu, cuda or cuda:N")
    parser.add_argument("--batch", type=int, default=4, help="episodes that are made at a time")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--videos", type=Path, required=True, help="folder that keeps rollouts")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args(arguments)
    if given.batch < 1 or given.episodes < given.batch or given.episodes % given.batch:
        parser.error(f"--episodes is {given.episodes}: expected a multiple of {given.batch}")
    torch.set_num_threads(1)
    dtype, device = getattr(torch, given.dtype), checked_device(given.device)
    rollouts = Rollouts(given.videos, given.frames, dtype, given.methods, device, given.batch)
    with torch.no_grad():
        rows = measure(rollouts, given.episodes, given.seeds, given.judged)
    print(summary(rows))
    if given.csv is not None:
        write_csv(given.csv, rows)


if __name__ == "__main__":
    main()
