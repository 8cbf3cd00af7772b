"""Walks through random houses that leave rooms, come back, and look again at what they saw.

The walker is steered by the simulator's position along the rooms' passages (houses.py): it makes
excursions of one or two rooms, returns, and then often faces where it faced before, so that a view
comes back after some 60 to 110 frames. It presses the buttons of the first world's walker (forward,
turn left, turn right), one combination for each frame. Every walk has a house of its own.

A frame is part of a panorama of 90 degrees (panorama.py), and a frame of turning turns by one patch
of 8 pixels, at once and always: `steadykv.world.pose` reckons headings from the buttons alone.
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from data import File, Walk, new_game
from houses import House, Point, make_house, write_wad
from panorama import Panorama

from steadykv.game import FORWARD, LEFT, PATCH_TURN_DEGREES, RIGHT, TICS_PER_FRAME

if TYPE_CHECKING:
    import vizdoom

SCREEN, VIEW_DEGREES = (320, 240), 90.0  # what the engine draws
COASTING = 4.8  # frames' ways that a walker still goes after letting go of forward
SETTLING = 5  # frames of an episode before the engine obeys


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
                away = math.dist(goal.point, (x, y))
                aims = abs(error) < (25 if away < 64 else 45)
                buttons = FORWARD if aims and away > self._slide(goal.point, wanted) else 0
            else:
                assert goal.heading is not None
                error, buttons = difference(goal.heading, angle), 0
                if abs(error) <= 6:
                    self.goals.popleft()
                    continue
            if abs(error) > 6:
                buttons |= LEFT if error > 0 else RIGHT
            return buttons

    def _slide(self, point: Point, heading: float) -> float:
        """How far it still goes after letting go, or 0 if it goes on that way from `point`.

        A walker that lets go in time does not end in a wall, where its place is no longer known
        from its buttons.
        """
        after = self.goals[1].point if len(self.goals) > 1 else None
        if after is not None:
            onward = math.degrees(math.atan2(after[1] - point[1], after[0] - point[0]))
            if abs(difference(onward, heading)) < 40:
                return 0.0
        return COASTING * math.dist(self.past[-1], self.past[max(-2, -len(self.past))])

    def _plan(self) -> None:
        """At the hub of `room`, with nothing left to do: the next trip, and a look around."""
        rng, ways = self.rng, self.house.passages[self.room]
        returns = bool(self.trail) and rng.random() < (0.75, 1.0)[len(self.trail) - 1]
        if returns:
            following = self.trail[-1]
        else:
            came = self.trail[-1:] if len(ways) > 1 else []
            following = int(rng.choice([room for room in ways if room not in came]))
        if not returns and rng.random() < 0.6:
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


class Turner:
    """The policy of a walker that stays where it is and looks left and back right, on and on."""

    def __init__(self, frames: int):
        self.frames, self.taken = frames, 0

    def act(self, _x: float, _y: float, _angle: float) -> int:
        """Buttons for the next frame."""
        self.taken += 1
        return LEFT if (self.taken - 1) // self.frames % 2 == 0 else RIGHT


def turn_of(file: File, rng: np.random.Generator) -> int:
    """Frames of a turn: as the file says in held-out walks, half to twice as many in training."""
    if file.held_out:
        return file.turns
    return int(rng.integers(file.turns // 2, 2 * file.turns + 1))


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
        # held keys turn at half their speed at first: a turn in degrees a tic does not
        game.set_available_buttons(
            [vizdoom.Button.MOVE_FORWARD, vizdoom.Button.TURN_LEFT_RIGHT_DELTA]
        )
        for variable in ("POSITION_X", "POSITION_Y", "ANGLE"):
            game.add_available_game_variable(getattr(vizdoom.GameVariable, variable))
        game.init()
        walks, look = [], Panorama(SCREEN, file.size, VIEW_DEGREES)
        for number, (house, rng) in enumerate(zip(houses, generators, strict=True)):
            game.set_doom_map(f"map{number + 1:02d}")
            game.set_seed(number)
            game.new_episode()
            if file.turns:
                turner = Turner(turn_of(file, rng))
                walks.append(_record(game, turner, 0, file.steps, look))
            else:
                visitor = Visitor(house, rng)
                unseen = int(rng.integers(file.prelude + 1))
                walks.append(_record(game, visitor, unseen, file.steps, look))
        game.close()
    return walks


def _record(
    game: vizdoom.DoomGame, walker: Visitor | Turner, unseen: int, steps: int, look: Panorama
) -> Walk:
    """One walk of `steps` frames after `unseen` ones, in the episode that has just begun."""
    for _ in range(SETTLING):
        game.make_action([0, 0], TICS_PER_FRAME)
    buttons, frames, actions, poses = 0, [], [], []
    for i in range(unseen + steps):
        state = game.get_state()
        pose = state.game_variables
        if i >= unseen:
            frames.append(look(state.screen_buffer))
            actions.append(buttons)
            poses.append(pose)
        buttons = walker.act(*(float(p) for p in pose))
        turn = bool(buttons & RIGHT) - bool(buttons & LEFT)  # the engine's is clockwise
        game.make_action(
            [float(bool(buttons & FORWARD)), turn * PATCH_TURN_DEGREES], TICS_PER_FRAME
        )
    return Walk(np.stack(frames), np.array(actions, np.uint8), np.array(poses, np.float32))
