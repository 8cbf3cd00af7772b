"""Walks through random houses that leave rooms, come back, and look again at what they saw.

The walker is steered by the simulator's position along the rooms' passages (houses.py): it makes
excursions of one or two rooms, returns, and then often faces where it faced before, so that a view
comes back after some 60 to 110 frames. It presses the buttons of the first world's walker (forward,
turn left, turn right), one combination for each frame. Every walk has a house of its own.

    python training/house_walks.py --walks /tmp/walks       # how often a pose comes back
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from data import FORWARD, LEFT, RIGHT, TICS_PER_FRAME, File, Walk, new_game
from houses import House, Point, make_house, write_wad

from steadykv.evaluation.revisits import RETURN_FRAMES, returning

if TYPE_CHECKING:
    import vizdoom


@dataclass(frozen=True)
class Goal:
    """Reach a point, or face a direction (degrees), or hold still, or turn for some frames."""

    point: Point | None = None
    heading: float | None = None
    still: int = 0
    turn: int = 0
    button: int = LEFT


def difference(a: float, b: float) -> float:
    """Degrees from b to a, -180 to 180."""
    return (a - b + 180) % 360 - 180


class Visitor:
    """The policy: from the pose to the buttons to hold."""

    def __init__(self, house: House, rng: np.random.Generator):
        self.house, self.rng, self.room = house, rng, house.start
        self.trail: list[int] = []  # the rooms to go back through
        self.looks: dict[int, list[float]] = {}  # headings faced in each room
        self.goals: deque[Goal] = deque()
        self.past: deque[Point] = deque(maxlen=8)
        self.pushes = 0  # frames in a row with the forward button
        self._look()

    def act(self, x: float, y: float, angle: float) -> int:
        """Buttons for the next frame."""
        self.past.append((x, y))
        moved = math.dist(self.past[0], (x, y))
        if self.pushes >= 8 and moved < 4:
            self._free(x, y)
        buttons = self._pursue(x, y, angle)
        self.pushes = self.pushes + 1 if buttons & FORWARD else 0
        return buttons

    def _pursue(self, x: float, y: float, angle: float) -> int:
        while True:
            if not self.goals:
                self._plan()
            goal = self.goals[0]
            if goal.still or goal.turn:
                left = Goal(None, None, max(0, goal.still - 1), max(0, goal.turn - 1), goal.button)
                self.goals[0] = left
                if not (left.still or left.turn):
                    self.goals.popleft()
                return goal.button if goal.turn else 0
            if goal.point is not None:
                if math.dist(goal.point, (x, y)) < 20:
                    self.goals.popleft()
                    continue
                wanted = math.degrees(math.atan2(goal.point[1] - y, goal.point[0] - x))
                error = difference(wanted, angle)
                near = math.dist(goal.point, (x, y)) < 64
                buttons = FORWARD if abs(error) < (25 if near else 45) else 0
            else:
                assert goal.heading is not None
                error, buttons = difference(goal.heading, angle), 0
                if abs(error) <= 6:
                    self.goals.popleft()
                    continue
            if abs(error) > 6:
                buttons |= LEFT if error > 0 else RIGHT
            return buttons

    def _plan(self) -> None:
        """At the hub of `room`, with nothing left to do: the next trip, and a look around."""
        rng, ways = self.rng, self.house.passages[self.room]
        returns = bool(self.trail) and rng.random() < (0.75, 1.0)[len(self.trail) - 1]
        if returns:
            following = self.trail[-1]
        else:
            came = self.trail[-1:] if len(ways) > 1 else []
            following = int(rng.choice([room for room in ways if room not in came]))
        if not returns and rng.random() < 0.45:
            self._peek(ways[following])
            return
        if returns:
            self.trail.pop()
        else:
            self.trail.append(self.room)
            if rng.random() < 0.1:
                self.trail.clear()  # moves on for good
        self.goals.extend(Goal(point) for point in ways[following])
        self.room = following
        self.goals.append(Goal(self.house.rooms[following].hub))
        self._look()

    def _peek(self, way: tuple[Point, ...]) -> None:
        """Go through the passage, turn around there and come back to the hub of `room`."""
        self.goals.extend(Goal(point) for point in way)
        (x0, y0), (x1, y1) = way
        ahead = math.degrees(math.atan2(y1 - y0, x1 - x0))
        self.goals.append(Goal(heading=ahead + float(self.rng.uniform(-90, 90))))
        self.goals.extend((Goal(way[0]), Goal(self.house.rooms[self.room].hub)))
        self._look()

    def _look(self) -> None:
        """Face something in `room`: often again what was faced there before."""
        rng, known = self.rng, self.looks.setdefault(self.room, [])
        if known and rng.random() < 0.85:
            self.goals.append(Goal(heading=known[-1 - int(rng.integers(min(2, len(known))))]))
        else:
            heading = float(rng.uniform(-180, 180))
            known.append(heading)
            self.goals.append(Goal(heading=heading))
        if rng.random() < 0.2:
            self.goals.append(Goal(still=int(rng.integers(2, 7))))
        if rng.random() < 0.15:
            button = LEFT if rng.random() < 0.5 else RIGHT
            self.goals.append(Goal(turn=int(rng.integers(4, 16)), button=button))
        if rng.random() < 0.1:
            x, y = self.house.rooms[self.room].hub
            shift = rng.uniform(-40, 40, 2)
            self.goals.extend((Goal((x + shift[0], y + shift[1])), Goal((x, y))))

    def _free(self, x: float, y: float) -> None:
        """Something is in the way: turn aside, step, and go to the hub of the room around."""
        self.goals.clear()
        button = LEFT if self.rng.random() < 0.5 else RIGHT
        self.goals.append(Goal(turn=int(self.rng.integers(6, 16)), button=button))
        for number, room in enumerate(self.house.rooms):
            if room.holds(x, y):
                self.room = number
                self.trail.clear()
        self.goals.append(Goal(self.house.rooms[self.room].hub))
        self.pushes = 0


def seed_of(file: File, number: int) -> list[int]:
    """Of the `number`-th walk of a file; held-out walks share none with training."""
    return [file.seed, int(file.held_out), file.index, number]


def record_houses(file: File) -> list[Walk]:
    """The walks of a file, each through its own house, with poses."""
    import vizdoom

    generators = [np.random.default_rng(seed_of(file, number)) for number in range(file.walks)]
    houses = [make_house(rng) for rng in generators]
    with tempfile.TemporaryDirectory() as folder:
        wad = Path(folder) / "houses.wad"
        write_wad(wad, [house.text for house in houses])
        game = new_game("freedoom2.wad", wad, "map01", file.index)
        for variable in ("POSITION_X", "POSITION_Y", "ANGLE"):
            game.add_available_game_variable(getattr(vizdoom.GameVariable, variable))
        game.init()
        walks = []
        for number, (house, rng) in enumerate(zip(houses, generators, strict=True)):
            game.set_doom_map(f"map{number + 1:02d}")
            game.set_seed(number)
            game.new_episode()
            walks.append(_record(game, Visitor(house, rng), file))
        game.close()
    return walks


def _record(game: vizdoom.DoomGame, visitor: Visitor, file: File) -> Walk:
    """One walk from the start of the episode that has just begun."""
    import cv2

    unseen, buttons = int(visitor.rng.integers(file.prelude + 1)), 0
    frames, actions, poses = [], [], []
    for i in range(unseen + file.steps):
        state = game.get_state()
        pose = state.game_variables
        if i >= unseen:
            frames.append(cv2.resize(state.screen_buffer, file.size, interpolation=cv2.INTER_AREA))
            actions.append(buttons)
            poses.append(pose)
        buttons = visitor.act(*(float(p) for p in pose))
        held = [bool(buttons & b) for b in (FORWARD, LEFT, RIGHT)] + [False]
        game.make_action(held, TICS_PER_FRAME)
    return Walk(np.stack(frames), np.array(actions, np.uint8), np.array(poses, np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--walks", type=Path, required=True)
    arguments = parser.parse_args()
    shortest, longest = RETURN_FRAMES
    for kind in ("heldout", "train"):
        share, with_one, count = [], [], 0
        for path in sorted(arguments.walks.glob(f"{kind}-*.npz")):
            with np.load(path) as file:
                poses = np.split(file["poses"], np.cumsum(file["lengths"])[:-1])
            for walk in poses:
                share.append(returning(walk)[longest:] >= 0)
                with_one.append(bool(share[-1].any()))
                count += len(walk)
        if share:
            print(
                f"{kind}: {len(share)} walks, {count} frames; "
                f"{np.concatenate(share).mean():.1%} of the frames after the first {longest} "
                f"show a view left {shortest} to {longest} frames ago; "
                f"{np.mean(with_one):.1%} of the walks have one"
            )


if __name__ == "__main__":
    main()
