"""Record wandering walks through Freedoom maps with ViZDoom: frames and the actions between them.

    python training/data.py --recipe training/version2.json --out /tmp/walks

A walk begins at the map's own start, wanders unseen for up to `prelude` frames, and is then
recorded for `steps` (held-out walks for longer, so that a rollout can be steered for that long).
One file holds the walks of one engine process: `frames` uint8 [N, H, W, 3] (RGB), `actions`
uint8 [N] and `lengths` int64 [walks]; `actions[i]` is the bit mask of the buttons held between
frame i-1 and frame i (bit 0 forward, 1 turn left, 2 turn right, 3 use). Walks through random houses
(the map "houses", see house_walks.py) have `poses` float32 [N, 3] too: x, y, angle in degrees.
Held-out walks have seeds and files of their own, named `heldout-*`; training never reads those.

The walker is steered by the depth buffer: it turns to the deeper side where the way ahead is short,
turns at random now and then, and opens doors, so that it leaves rooms instead of staring at walls.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from steadykv.game import FORWARD, LEFT, RIGHT, TICS_PER_FRAME, USE

if TYPE_CHECKING:
    import vizdoom
    from recipe import Recording

HIDDEN = (
    "hud", "weapon", "crosshair", "decals", "particles", "messages", "corpses", "screen_flashes"
)  # fmt: skip
# name -> (wad, map); a map must belong to its wad: a wrong pair hangs at init.
MAPS = {
    "E1M1": ("freedoom1.wad", "E1M1"),
    "E1M2": ("freedoom1.wad", "E1M2"),
    "MAP01": ("freedoom2.wad", "MAP01"),
    "my_way_home": ("scenarios/my_way_home.wad", "map01"),
    "deathmatch": ("scenarios/deathmatch.wad", "map01"),
    "multi_deathmatch": ("scenarios/multi_deathmatch.wad", "map01"),
}
HOUSES = "houses"  # the name of random houses (houses.py) among a recipe's maps
HELD_OUT_FILES, HELD_OUT_WALKS_A_FILE = 6, 11
FRAMES_A_FILE = 2600
TURN_FRAMES = 48  # of 7.5 degrees: once around


def new_game(base: str, wad: Path | None, level: str, seed: int) -> vizdoom.DoomGame:
    """A headless game without monsters, not started yet.

    `base` is one of the engine's own WADs, `wad` another that holds the map.
    """
    import vizdoom

    game = vizdoom.DoomGame()
    game.set_doom_game_path(str(Path(vizdoom.__file__).parent / base))
    if wad is not None:
        game.set_doom_scenario_path(str(wad))
    game.set_doom_map(level)
    # much larger than the frames: averaging then leaves no aliasing, which nothing could predict
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_320X240)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    for hide in HIDDEN:
        getattr(game, f"set_render_{hide}")(False)
    game.set_available_buttons(
        [
            vizdoom.Button.MOVE_FORWARD,
            vizdoom.Button.TURN_LEFT,
            vizdoom.Button.TURN_RIGHT,
            vizdoom.Button.USE,
        ]
    )
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_episode_timeout(0)
    game.set_seed(seed)
    game.add_game_args("-nomonsters +sv_cheats 1")
    return game


def open_game(map_name: str, seed: int) -> vizdoom.DoomGame:
    """Start a game on one of the MAPS; the player cannot die."""
    import vizdoom

    wad, level = MAPS[map_name]
    if wad.startswith("scenarios/"):
        path = Path(vizdoom.__file__).parent / wad
        game = new_game("freedoom2.wad", path, level, seed)
    else:
        game = new_game(wad, None, level, seed)
    game.set_depth_buffer_enabled(True)
    game.init()
    game.send_game_command("iddqd")
    return game


class Wanderer:
    """The policy.

    Looks at the mean depth on the left, ahead and on the right; returns the buttons to hold.
    """

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.turn_left, self.turn_steps, self.press_use = True, 0, False

    def act(self, depth: np.ndarray) -> int:
        band = depth[100:140].astype(np.float32)
        left, ahead, right = band[:, :100].mean(), band[:, 120:200].mean(), band[:, 220:].mean()
        buttons = 0
        if self.turn_steps > 0:
            self.turn_steps -= 1
            buttons |= LEFT if self.turn_left else RIGHT
            if ahead > 9:
                buttons |= FORWARD
        elif ahead < 9:
            self.turn_left = bool(left > right)
            self.turn_steps = int(self.rng.integers(6, 21))
            buttons |= (LEFT if self.turn_left else RIGHT) | USE
        elif self.rng.random() < 0.05:
            self.turn_left = bool(self.rng.random() < 0.5)
            self.turn_steps = int(self.rng.integers(3, 13))
            buttons |= FORWARD
        else:
            buttons |= FORWARD
            if self.rng.random() < 0.05:
                buttons |= USE
        return buttons


@dataclass(frozen=True)
class File:
    """One file to record: `walks` walks through one map."""

    name: str
    map_name: str
    index: int
    walks: int
    steps: int  # recorded frames of a walk
    prelude: int  # most frames walked before recording
    size: tuple[int, int]  # width and height of a frame
    held_out: bool
    seed: int = 0  # the recipe's; it chooses houses
    turns: int = 0  # frames of a turn, see Turner; 0: a visitor


class Walk(NamedTuple):
    """frames uint8 [N,H,W,3], actions uint8 [N], poses float32 [N,3]: x, y, degrees, if known."""

    frames: np.ndarray
    actions: np.ndarray
    poses: np.ndarray | None = None


def record_walk(game: vizdoom.DoomGame, seed: int, file: File) -> Walk:
    """One walk of up to `steps` frames; shorter if the map ends."""
    import cv2

    rng = np.random.default_rng(seed)
    walker = Wanderer(rng)
    game.set_seed(seed)
    game.new_episode()
    game.send_game_command("iddqd")
    unseen, buttons, frames, actions = int(rng.integers(file.prelude + 1)), 0, [], []
    for i in range(unseen + file.steps):
        if game.is_episode_finished():
            break
        state = game.get_state()
        if i >= unseen:
            frames.append(cv2.resize(state.screen_buffer, file.size, interpolation=cv2.INTER_AREA))
            actions.append(buttons)
        buttons = walker.act(state.depth_buffer)
        game.make_action([bool(buttons & b) for b in (FORWARD, LEFT, RIGHT, USE)], TICS_PER_FRAME)
    if not frames:
        return Walk(np.empty((0, *file.size[::-1], 3), np.uint8), np.empty(0, np.uint8))
    return Walk(np.stack(frames), np.array(actions, np.uint8))


def record_maps(file: File, attempt: int) -> list[Walk]:
    """The walks of a file through one of the MAPS."""
    game = open_game(file.map_name, file.index)
    walks: list[Walk] = []
    seed = 10_000_019 * (attempt + 1) + 1000 * file.index + 5_000_000 * file.held_out
    shortest = file.steps if file.held_out else min(60, file.steps)
    while len(walks) < file.walks:
        seed += 1
        walk = record_walk(game, seed, file)
        if len(walk.frames) >= shortest:  # a map may end early
            walks.append(walk)
    game.close()
    return walks


def plan(recording: Recording, size: tuple[int, int], seed: int, turns: int = 0) -> list[File]:
    """Every file of a data set, the held-out ones first; the maps take turns."""
    prelude, steps = recording.prelude, recording.steps
    each = max(1, FRAMES_A_FILE // steps)

    def turned(index: int, held_out: bool) -> int:
        share = 0.0 if held_out else recording.turners
        return turns or TURN_FRAMES * (int((index + 1) * share) > int(index * share))

    def files(kind: str, count: int, walks: int, length: int) -> list[File]:
        maps = enumerate(itertools.islice(itertools.cycle(recording.maps), count))
        held_out = kind == "heldout"
        return [
            File(
                f"{kind}-{m}-{i:03d}", m, i, walks, length, prelude, size, held_out, seed,
                turned(i, held_out),
            )
            for i, m in maps
        ]  # fmt: skip

    return [
        *files("heldout", HELD_OUT_FILES, HELD_OUT_WALKS_A_FILE, recording.held_out_steps),
        *files("train", recording.walks // each, each, steps),
    ]


def _work(files: list[File], out: Path, attempt: int) -> None:
    """Record files in this process, in a folder of its own.

    The engine writes into its working directory.
    """
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for file in files:
            signal.alarm(200)  # the default action ends the process; its parent starts another
            if file.map_name == HOUSES:
                from house_walks import record_houses  # it imports this file

                walks = record_houses(file)
            else:
                walks = record_maps(file, attempt)
            signal.alarm(0)
            temporary = out / f".{file.name}.npz"
            arrays = {
                "frames": np.concatenate([walk.frames for walk in walks]),
                "actions": np.concatenate([walk.actions for walk in walks]),
                "lengths": np.array([len(walk.frames) for walk in walks]),
            }
            poses = [walk.poses for walk in walks if walk.poses is not None]
            if len(poses) == len(walks):
                arrays["poses"] = np.concatenate(poses)
            with open(temporary, "wb") as handle:
                np.savez(handle, **arrays)
            temporary.rename(out / f"{file.name}.npz")


def record_all(files: list[File], out: Path, workers: int) -> int:
    """Record every file; returns how many there are in the end.

    A process that dies (the engine does, now and then) is replaced, three times.
    """
    began = time.time()
    context = multiprocessing.get_context("spawn")
    for attempt in range(4):
        missing = [file for file in files if not (out / f"{file.name}.npz").exists()]
        processes = []
        for worker in range(min(workers, len(missing))):
            mine = missing[worker::workers]
            process = context.Process(target=_work, args=(mine, out, attempt), daemon=True)
            process.start()
            processes.append(process)
        while any(process.is_alive() for process in processes):
            time.sleep(2)
            done = len(list(out.glob("[!.]*.npz")))
            print(f"data: {done} of {len(files)} files, {time.time() - began:.0f} s", flush=True)
    return len(list(out.glob("[!.]*.npz")))


def main() -> None:
    from recipe import read_recipe  # not above: it brings torch, and every worker imports this file

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--walks", type=int, help="another number of walks than the recipe's")
    parser.add_argument(
        "--turns",
        type=int,
        default=0,
        help="walkers that turn left for so many frames, back right for as many, and so on",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    recording = recipe.recording
    if arguments.walks is not None:
        recording = dataclasses.replace(recording, walks=arguments.walks)
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    size = (recipe.world.image_width, recipe.world.image_height)
    if (arguments.turns or recording.turners) and set(recording.maps) != {HOUSES}:
        raise SystemExit(f"data: turning needs a recipe of {HOUSES} alone, got {recording.maps}")
    files = plan(recording, size, recipe.seed, arguments.turns)
    recorded = record_all(files, out, arguments.workers)
    (out / "DONE").write_text(f"{recorded} of {len(files)} files\n")
    if recorded < len(files):
        raise SystemExit(
            f"data: got {recorded} files, expected {len(files)}; run the same command again"
        )


if __name__ == "__main__":
    main()
