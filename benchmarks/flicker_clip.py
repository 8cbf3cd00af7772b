"""Records ViZDoom frames of a steady camera motion, one tic a frame: a clip to judge metrics by.

    python -m benchmarks.flicker_clip --clip tests/data/walk-and-turn.mp4   # the committed one
    python -m benchmarks.flicker_clip --folder /tmp/clips                   # all of them, as .npy

Needs `pip install vizdoom opencv-python-headless`. Every second frame is the same path at twice the
speed. Frames are rendered at 640 x 480 and averaged to 128 x 96, as those of the embedded model
are averaged down, and stored without loss. Artwork: Freedoom (NOTICE).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SIZE = (128, 96)
# Map units and degrees a tic.
MOTIONS = {"walk": (8.0, 0.0), "turn": (0.0, 1.75), "both": (8.0, 1.0)}
MAPS = ("my_way_home", "deathmatch", "multi_deathmatch")
SEEDS = (11, 12)
COMMITTED = ("deathmatch", 12, "both", 21)


def record(level: str, seed: int, motion: str, frames: int) -> np.ndarray:
    """uint8 [T, 96, 128, 3]."""
    import cv2
    import vizdoom

    root = Path(vizdoom.__file__).parent
    game = vizdoom.DoomGame()
    game.set_doom_game_path(str(root / "freedoom2.wad"))
    game.set_doom_scenario_path(str(root / f"scenarios/{level}.wad"))
    game.set_doom_map("map01")
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_640X480)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    for hide in ("hud", "weapon", "crosshair", "decals", "particles", "messages", "corpses"):
        getattr(game, f"set_render_{hide}")(False)
    buttons = vizdoom.Button.MOVE_FORWARD_BACKWARD_DELTA, vizdoom.Button.TURN_LEFT_RIGHT_DELTA
    game.set_available_buttons(list(buttons))
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_episode_timeout(0)
    game.set_seed(seed)
    game.add_game_args("-nomonsters +sv_cheats 1")
    game.init()
    game.send_game_command("iddqd")
    for _ in range(10):  # the player has landed by then
        game.make_action([0, 0], 1)
    found = []
    for _ in range(frames):
        picture = game.get_state().screen_buffer
        found.append(cv2.resize(picture, SIZE, interpolation=cv2.INTER_AREA))
        game.make_action(list(MOTIONS[motion]), 1)
    game.close()
    return np.stack(found)


def write_clip(path: Path, frames: np.ndarray) -> None:
    """H.264 of RGB without loss."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=35)
        stream.options = {"qp": "0", "preset": "veryslow"}
        stream.width, stream.height, stream.pix_fmt = *SIZE, "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())


def read_clip(path: Path) -> np.ndarray:
    """uint8 [T, H, W, 3]."""
    import av

    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clip", type=Path, help="the committed clip, as MP4")
    parser.add_argument("--folder", type=Path, help="33 frames of every map, seed and motion")
    given = parser.parse_args(arguments)
    clip, folder = (path and path.resolve() for path in (given.clip, given.folder))
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # the engine writes into its working directory
        if clip is not None:
            frames = record(*COMMITTED)
            write_clip(clip, frames)
            if not np.array_equal(read_clip(clip), frames):
                raise SystemExit(f"{clip} is not what was recorded")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for level in MAPS:
                for seed in SEEDS:
                    for motion in MOTIONS:
                        name = f"{level}-{seed}-{motion}.npy"
                        np.save(folder / name, record(level, seed, motion, 33))
        os.chdir("/")


if __name__ == "__main__":
    main()
