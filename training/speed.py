"""How fast the world model runs with a BF16 cache, one walk at a time.

python training/speed.py --weights src/steadykv/world/assets/world.safetensors --device cpu
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from checkpoint import load_any

from steadykv import KVCache, preset
from steadykv.evaluation.rollouts import new_cache
from steadykv.world import Episodes, WorldModel, rollout


def own_cache(world: WorldModel) -> KVCache:
    """A BF16 cache with the model's own window."""
    config = world.config
    policy = {"window_frames": config.window_frames, "sink_frames": config.sink_frames}
    return new_cache(world, preset("bf16", **policy))


def speed(world: WorldModel) -> dict[str, float]:
    """Seconds of a chunk once the window is full (median), and frames a second from the start.

    Black first frames and no buttons: what is drawn does not change the time. The first rollout
    warms up; the second is timed.
    """
    config, stamps = world.config, [0.0]
    full = config.window_frames // config.chunk_frames
    frames = (full + 8) * config.chunk_frames
    shape = (1, config.chunk_frames, config.image_height, config.image_width, 3)
    actions = torch.zeros(1, config.chunk_frames + frames, dtype=torch.uint8)
    still = Episodes(torch.zeros(shape, dtype=torch.uint8), actions, ("still",))
    for _ in range(2):
        stamps = [time.perf_counter()]

        def note(_done: int, _total: int, stamps: list[float] = stamps) -> None:
            stamps.append(time.perf_counter())

        rollout(world, still, own_cache(world), frames, on_chunk=note)
    return {
        "seconds_a_chunk_window_full": float(np.median(np.diff(stamps)[full:])),
        "frames_per_second": frames / (stamps[-1] - stamps[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    world = load_any(arguments.weights, arguments.device, dtype)
    print(json.dumps({"threads": torch.get_num_threads(), **speed(world)}))


if __name__ == "__main__":
    main()
