"""What the world model must show on held-out walks, in numbers.

    python training/evaluate.py --walks /tmp/walks --weights /tmp/run/average.safetensors \\
        --out /tmp/run --sweep

Prints one line a measure and writes `evaluation.json`, `episodes.zip` (the fixed held-out list:
three true frames and the actions that follow) and `rollouts.png`. Weights are the float checkpoint
of training or the shipped file.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from checkpoint import load_any
from speed import own_cache, speed

from steadykv.evaluation.metrics import frame_mse, psnr_from_mse
from steadykv.game import FORWARD, LEFT, PATCH_TURN_DEGREES, RIGHT, TICS_PER_FRAME
from steadykv.world import Episodes, WorldConfig, WorldModel, rollout
from steadykv.world.episodes import save_episodes

EPISODES, EPISODE_FRAMES = 64, 99
# (flow times, commit time), None for the model's own; one pass shows what history alone tells
SWEEP: tuple[tuple[tuple[float, ...] | None, float | None], ...] = (
    ((0.0,), None),
    (None, None),
    (None, 0.9),
    (None, 0.95),
    ((0.0, 0.6, 0.95), None),
    ((0.0, 0.4, 0.75, 0.93, 0.98), None),
    ((0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.995), None),
)


def held_out(folder: Path, offset: int) -> tuple[Episodes, torch.Tensor, torch.Tensor]:
    """64 held-out walks from frame `offset` on.

    Returns (episodes, true frames [64,99,H,W,3], 1,000 held-out frames).
    """
    walks, bank = [], []
    for path in sorted(folder.glob("heldout-*.npz")):
        with np.load(path) as file:
            firsts = np.concatenate(([0], np.cumsum(file["lengths"])[:-1]))
            frames, actions, lengths = file["frames"], file["actions"], file["lengths"]
            poses = file.get("poses")
        for number, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
            part = slice(first + offset, first + length)
            name = f"{path.stem.removeprefix('heldout-')}-{number:02d}"
            # an offset walk repeats its first actions (and poses) at the end
            held = np.resize(actions[part], length)
            stood = None if poses is None else np.resize(poses[part], (length, 3))
            walks.append((name, frames[part][:EPISODE_FRAMES], held, stood))
            bank.append(frames[first : first + 130])
    every = np.concatenate(bank)
    walks.sort(key=lambda walk: walk[0][-2:])  # by number, so that the maps take turns
    picks = walks[:EPISODES]
    names, seen, held_actions, stands = zip(*picks, strict=True)
    true = torch.from_numpy(np.stack(seen))
    held_poses = None if stands[0] is None else torch.from_numpy(np.stack(stands))
    beginnings = Episodes(
        true[:, :3].clone(), torch.from_numpy(np.stack(held_actions)), names, held_poses
    )
    chosen = torch.from_numpy(every[np.linspace(0, len(every) - 1, 1000).round().astype(int)])
    return beginnings, true, chosen


def horizontal_motion(video: np.ndarray) -> np.ndarray:
    """Shift in pixels between neighbouring frames by phase correlation.

    [T,H,W,3] -> [T-1], positive to the right.
    """
    gray = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY).astype(np.float32) for frame in video]
    window = cv2.createHanningWindow(gray[0].shape[::-1], cv2.CV_32F)
    return np.array([cv2.phaseCorrelate(a, b, window)[0][0] for a, b in itertools.pairwise(gray)])


def obedience(videos: torch.Tensor, actions: torch.Tensor, frames: int = 48) -> float:
    """Share of turning frames whose image moves against the turn.

    Over the first `frames` generated frames.
    """
    hits = []
    for video, held in zip(videos.numpy(), actions.numpy(), strict=True):
        motion = horizontal_motion(video[2 : 3 + frames])
        held = held[3 : 3 + frames]
        # left turns move the image right
        turn = ((held & LEFT) > 0).astype(int) - ((held & RIGHT) > 0).astype(int)
        hits.append((np.sign(motion) == turn)[turn != 0])
    return float(np.concatenate(hits).mean())


def turned_copies(
    videos: torch.Tensor, actions: torch.Tensor, pixels: int, frames: int = 48
) -> float:
    """PSNR of frames that turn against the frame before, shifted by the turn: the median, in dB.

    Over the first `frames` generated frames that turn without walking; for worlds in which a turn
    shifts the picture by so many `pixels`.
    """
    values = []
    for video, held in zip(videos.float(), actions.tolist(), strict=True):
        for i in range(3, min(3 + frames, len(video))):
            side = bool(held[i] & LEFT) - bool(held[i] & RIGHT)
            if side and not held[i] & FORWARD:
                before, now = (video[i - 1], video[i]) if side > 0 else (video[i], video[i - 1])
                values.append((before[:, :-pixels] - now[:, pixels:]).square().mean())
    return float(psnr_from_mse(torch.stack(values).double()).median())


def gradient_energy(frames: torch.Tensor) -> torch.Tensor:
    """Mean squared difference of neighbouring pixels, both ways: [N,H,W,3] -> scalar."""
    x = frames.float()
    return (x.diff(dim=1).square().mean() + x.diff(dim=2).square().mean()) / 2


def nearest_share(frames: torch.Tensor, bank: torch.Tensor) -> float:
    """Largest share of `frames` that have one and the same nearest neighbour in `bank`.

    By pixel distance.
    """
    nearest = torch.cdist(frames.float().flatten(1), bank.float().flatten(1)).argmin(1)
    return float(torch.bincount(nearest).max() / len(frames))


def measures(
    config: WorldConfig,
    video: torch.Tensor,
    true: torch.Tensor,
    episodes: Episodes,
    bank: torch.Tensor,
) -> dict[str, float]:
    """Everything but the long run, of rollouts [64, 3+T, H, W, 3] against the true frames.

    A model that is told where it looks moves its picture with the turn even untrained, so that
    there copies of the frame before are what says whether it obeys.
    """
    length = video.shape[1]
    by_chunk = frame_mse(true[:, :length], video).unflatten(1, (-1, 3)).mean(2)
    decibels = psnr_from_mse(by_chunk).median(dim=0).values.tolist()
    chunks = [c for c in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if c < len(decibels)]
    out = {f"psnr_chunk_{c}": decibels[c] for c in chunks}
    last = min(length, EPISODE_FRAMES) - 1
    for name, frame in (("_chunk_1", 5), ("", last)):
        energy = gradient_energy(video[:, frame]) / gradient_energy(true[:, frame])
        out[f"gradient_energy{name}"] = float(energy)
    between = video[:, last].float().std(0).mean() / true[:, last].float().std(0).mean()
    out["between_deviation"] = float(between)
    out["nearest_share"] = nearest_share(video[:, last], bank)
    out["nearest_share_real"] = nearest_share(true[:, last], bank)
    if config.view_degrees:
        pixels = round(
            TICS_PER_FRAME * PATCH_TURN_DEGREES / config.view_degrees * config.image_width
        )
        copies = [turned_copies(x, episodes.actions, pixels) for x in (video, true)]
        return out | dict(zip(("turned_copy_psnr", "turned_copy_psnr_real"), copies, strict=True))
    real, generated = obedience(true, episodes.actions), obedience(video, episodes.actions)
    return out | {"obedience": generated / real, "obedience_real": real}


def with_sampling(world: WorldModel, levels: tuple[float, ...], commit_time: float) -> WorldModel:
    """The same weights, sampled differently."""
    world.config = dataclasses.replace(world.config, noise_levels=levels, commit_time=commit_time)
    return world


def long_run(
    world: WorldModel, episodes: Episodes, bank: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """A rollout of 1,000 frames, or as many as there are actions for: measures and video.

    Finite, not one colour, as sharp as real frames (`bank`) all the way, and memory that stays flat
    after the window is full.
    """
    cache, size = own_cache(world), world.config.chunk_frames
    frames = min(999, episodes.actions.shape[1] - size) // size * size
    full = world.config.window_frames // size
    sizes: list[tuple[int, int]] = []

    def watch(done: int, total: int) -> None:
        used = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        sizes.append((cache.ledger().resident_bytes, used))

    video = rollout(world, episodes, cache, frames, on_chunk=watch)
    tail = video[:, -96:].float()
    sharpness = [
        float(gradient_energy(part.flatten(0, 1)) / gradient_energy(bank))
        for part in video[:, size:].split(100, dim=1)
    ]
    return {
        "frames": frames,
        "deviation_within_frames": float(tail.std(dim=(2, 3)).mean()),
        "smallest_deviation_within": float(tail.flatten(2).std(-1).mean(1).min()),
        "between_deviation_levels": float(video[:, -1].float().std(0).mean()),
        "gradient_energy_levels": float(gradient_energy(video[:, -1])),
        "gradient_energy_by_100_frames": sharpness,
        "chunk_of_a_full_window": full,
        "cache_bytes_full": sizes[full][0],
        "cache_bytes_end": sizes[-1][0],
        "device_bytes_full": sizes[full][1],
        "device_bytes_end": sizes[-1][1],
    }, video


def contact_sheet(path: Path, videos: torch.Tensor, columns: Iterable[int]) -> None:
    """Rows of videos, some of their frames side by side."""
    rows = [
        np.concatenate([video[i] for i in columns if i < len(video)], 1) for video in videos.numpy()
    ]
    cv2.imwrite(str(path), np.concatenate(rows)[..., ::-1])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--walks", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--sweep", action="store_true", help="compare step schedules and commit times first"
    )
    parser.add_argument("--quick", action="store_true", help="stop after the comparison")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    return parser.parse_args()


def sweep(world: WorldModel, walks: Path) -> list[dict[str, Any]]:
    """The same measures under each sampling of SWEEP, on other beginnings than the list's."""
    episodes, true, bank = held_out(walks, 12)
    rows, own = [], world.config
    for times, committed in SWEEP:
        levels = own.noise_levels if times is None else times
        commit = own.commit_time if committed is None else committed
        video = rollout(with_sampling(world, levels, commit), episodes, own_cache(world), 72)
        numbers = measures(own, video, true[:, :75], episodes, bank)
        rows.append({"levels": levels, "commit": commit, **numbers})
        printed = {"commit": commit, **numbers}
        print("sweep:", levels, commit, {k: round(v, 3) for k, v in printed.items()}, flush=True)
    world.config = own
    return rows


def judge_held_out(
    world: WorldModel, episodes: Episodes, true: torch.Tensor, bank: torch.Tensor, out: Path
) -> dict[str, float]:
    """The measures of 96 generated frames; six walks and their rollouts go to `rollouts.png`."""
    video = rollout(world, episodes, own_cache(world), 96)
    numbers = measures(world.config, video, true, episodes, bank)
    picks = list(range(0, len(episodes), max(1, len(episodes) // 6)))
    sheet = torch.stack((true[picks], video[picks]), 1).flatten(0, 1)
    contact_sheet(out / "rollouts.png", sheet, (2, 3, 5, 8, 14, 26, 38, 50, 74, 98))
    print("held out:", json.dumps(numbers, indent=1), flush=True)
    return numbers


def judge_long_run(
    world: WorldModel, episodes: Episodes, bank: torch.Tensor, out: Path
) -> dict[str, Any]:
    """A quarter of the rows for 1,000 frames; six of them go to `long.png`."""
    numbers, video = long_run(world, episodes.select(range(0, len(episodes), 4)), bank)
    contact_sheet(out / "long.png", video[:6], (2, *range(98, video.shape[1], 100)))
    text = json.dumps(numbers, indent=1)
    print("long:", text, flush=True)
    return {"long_run": numbers}


def main() -> None:
    arguments = parse_arguments()
    on_gpu = arguments.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    world = load_any(arguments.weights, arguments.device, dtype)
    report: dict[str, Any] = {
        "weights": arguments.weights.name,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }
    report["speed"] = speed(world)
    print("speed:", json.dumps(report["speed"]), flush=True)
    if arguments.sweep:
        report["sweep"] = sweep(world, arguments.walks)
    if arguments.quick:
        (arguments.out / "quick.json").write_text(json.dumps(report, indent=1))
        return

    episodes, true, bank = held_out(arguments.walks, 0)
    report["episodes_bytes"] = save_episodes(arguments.out / "episodes.zip", episodes)
    rows = list(range(0, EPISODES, EPISODES // arguments.episodes))
    episodes, true = episodes.select(rows), true[rows]
    report["held_out"] = judge_held_out(world, episodes, true, bank, arguments.out)
    if on_gpu:
        report |= judge_long_run(world, episodes, bank, arguments.out)
    (arguments.out / "evaluation.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
