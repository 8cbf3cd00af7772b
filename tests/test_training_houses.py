"""Random houses: closed rooms that are joined, and walkers that leave them and come back."""

from __future__ import annotations

import itertools
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from data import TURN_FRAMES, File, plan
from house_walks import SCREEN, VIEW_DEGREES, Turner, Visitor, record_houses, turn_of
from houses import PLAYER_START, House, make_house, write_wad
from recipe import Recording

from steadykv.evaluation.revisits import returning
from steadykv.game import FORWARD, LEFT, RIGHT
from steadykv.world.pose import walk_poses

SEEDS = range(12)


def house_of(seed: int) -> House:
    return make_house(np.random.default_rng(seed))


def blocks(text: str, kind: str) -> list[dict[str, str]]:
    found = re.findall(rf"^{kind} \{{ (.*) \}}$", text, re.MULTILINE)
    return [dict(re.findall(r'(\w+) = "?([^";]*)"?;', block)) for block in found]


def edges(text: str) -> list[list[tuple[complex, complex]]]:
    """Of each sector: its borders, each with the sector on the right of the way along it."""
    points = [complex(float(v["x"]), float(v["y"])) for v in blocks(text, "vertex")]
    sides = [int(side["sector"]) for side in blocks(text, "sidedef")]
    out: list[list[tuple[complex, complex]]] = [[] for _ in blocks(text, "sector")]
    for line in blocks(text, "linedef"):
        start, end = points[int(line["v1"])], points[int(line["v2"])]
        assert start != end
        out[sides[int(line["sidefront"])]].append((start, end))
        assert ("sideback" in line) == ("twosided" in line) != ("blocking" in line)
        if "sideback" in line:
            out[sides[int(line["sideback"])]].append((end, start))
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_sectors_are_closed_and_lie_on_the_right_of_their_walls(seed: int) -> None:
    house = house_of(seed)
    sectors = edges(house.text)
    for number, borders in enumerate(sectors):
        assert sorted((a.real, a.imag) for a, _ in borders) == sorted(
            (b.real, b.imag) for _, b in borders
        )
        area = -sum((a.conjugate() * b).imag for a, b in borders) / 2  # clockwise is positive
        if number < len(house.rooms):
            room = house.rooms[number]
            full = (room.right - room.left) * (room.top - room.bottom)
            assert full - 2 * 48**2 <= area <= full  # all but its pillars
        else:
            assert area >= 80 * 16  # a passage
    ways = sum(len(ways) for ways in house.passages.values()) // 2
    assert len(sectors) == len(house.rooms) + ways


@pytest.mark.parametrize("seed", SEEDS)
def test_rooms_are_joined_and_look_different(seed: int) -> None:
    house = house_of(seed)
    reached, fresh = {house.start}, [house.start]
    while fresh:
        fresh = [b for a in fresh for b in house.passages[a] if b not in reached]
        reached |= set(fresh)
    assert reached == set(range(len(house.rooms)))
    sectors = blocks(house.text, "sector")[: len(house.rooms)]
    for part in ("texturefloor", "textureceiling"):
        assert len({sector[part] for sector in sectors}) == len(sectors)


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_nothing_stands_in_the_way(seed: int) -> None:
    """Along all paths of walkers, 26 units around furniture and 16 around walls are free."""
    house = house_of(seed)
    things = blocks(house.text, "thing")
    start = [t for t in things if int(t["type"]) == PLAYER_START]
    assert [(float(t["x"]), float(t["y"])) for t in start] == [house.rooms[house.start].hub]
    solid = [line for line in blocks(house.text, "linedef") if "blocking" in line]
    points = [(float(v["x"]), float(v["y"])) for v in blocks(house.text, "vertex")]
    for a, ways in house.passages.items():
        for b, way in ways.items():
            stops = (house.rooms[a].hub, *way, house.rooms[b].hub)
            for (x0, y0), (x1, y1) in itertools.pairwise(stops):
                for share in np.linspace(0, 1, 17):
                    x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
                    for thing in things:
                        if int(thing["type"]) != PLAYER_START:
                            away = math.dist((x, y), (float(thing["x"]), float(thing["y"])))
                            assert away >= 16 + 16
                    for line in solid:
                        (xa, ya), (xb, yb) = points[int(line["v1"])], points[int(line["v2"])]
                        dx = max(min(xa, xb) - x, 0, x - max(xa, xb))
                        dy = max(min(ya, yb) - y, 0, y - max(ya, yb))
                        assert max(dx, dy) >= 16


def test_houses_follow_their_seed(tmp_path: Path) -> None:
    texts = [house_of(seed).text for seed in SEEDS]
    assert len(set(texts)) == len(texts)
    assert texts == [house_of(seed).text for seed in SEEDS]
    write_wad(tmp_path / "a.wad", texts)
    data = (tmp_path / "a.wad").read_bytes()
    kind, count, directory = struct.unpack("<4sii", data[:12])
    assert (kind, count, directory + 16 * count) == (b"PWAD", 3 * len(texts), len(data))
    lumps = []
    for at in range(directory, len(data), 16):
        offset, size, name = struct.unpack("<ii8s", data[at : at + 16])
        lumps.append((name.rstrip(b"\0").decode(), data[offset : offset + size].decode()))
    expected = []
    for number, text in enumerate(texts, 1):
        expected += [(f"MAP{number:02d}", ""), ("TEXTMAP", text), ("ENDMAP", "")]
    assert lumps == expected
    for wrong in ([], texts[:1] * 100):
        with pytest.raises(ValueError, match="expected 1 to 99"):
            write_wad(tmp_path / "b.wad", wrong)


def stroll(seed: int, frames: int) -> tuple[np.ndarray, House]:
    """Poses of a visitor in a house without walls, at the game's speeds."""
    rng = np.random.default_rng(seed)
    house = make_house(rng)
    visitor = Visitor(house, rng)
    (x, y), angle = house.rooms[house.start].hub, 0.0
    poses = []
    for _ in range(frames):
        poses.append((x, y, angle))
        buttons = visitor.act(x, y, angle)
        assert buttons in (0, FORWARD, LEFT, RIGHT, FORWARD | LEFT, FORWARD | RIGHT)
        angle = (angle + 7 * (bool(buttons & LEFT) - bool(buttons & RIGHT))) % 360
        if buttons & FORWARD:
            x += 11 * math.cos(math.radians(angle))
            y += 11 * math.sin(math.radians(angle))
    return np.array(poses, np.float32), house


def test_visitors_leave_rooms_and_come_back() -> None:
    shares = []
    for seed in SEEDS:
        poses, house = stroll(seed, 600)
        rooms = [next((i for i, r in enumerate(house.rooms) if r.holds(x, y)), -1)
                 for x, y, _ in poses]  # fmt: skip
        assert len(set(rooms) - {-1}) >= 3
        assert np.mean(np.array(rooms) == -1) < 0.3  # the passages
        shares.append((returning(poses)[110:] >= 0).mean())
    assert np.mean(shares) > 0.2


def test_a_stuck_visitor_tries_something_else() -> None:
    """It turns, but never gets anywhere: forward is let go of again and again."""
    rng = np.random.default_rng(1)
    visitor = Visitor(make_house(rng), rng)
    x, y = visitor.house.rooms[visitor.house.start].hub
    angle, held = 0.0, []
    for _ in range(400):
        held.append(visitor.act(x + 60, y, angle))
        angle = (angle + 7 * (bool(held[-1] & LEFT) - bool(held[-1] & RIGHT))) % 360
    pushes = np.array(held) & FORWARD > 0
    assert pushes.any()
    rests = [0, *np.flatnonzero(~pushes), len(pushes)]
    assert np.diff(rests).max() <= 10


def test_returning_needs_an_absence_of_the_right_length() -> None:
    here, there = [(0, 0, 0)] * 5, [(500, 0, 0)]

    def shown(*parts: list[tuple[int, int, int]]) -> list[int]:
        poses = np.array([pose for part in parts for pose in part], np.float32)
        return np.flatnonzero(returning(poses) >= 0).tolist()

    assert shown(here, 30 * there, here) == shown(here, 120 * there, here) == []
    assert shown(here, 60 * there, here) == list(range(65, 70))
    assert shown(here, 100 * there, here) == list(range(105, 110))
    # seen 35 frames ago as well: no long absence
    assert shown(here, 60 * there, here, 30 * there, here) == list(range(65, 70))
    assert shown(300 * there) == []


def test_a_turn_by_a_patch_moves_a_panorama_by_a_patch() -> None:
    """A painted cylinder, drawn on the engine's plane and back: turning shifts what it shows."""
    pytest.importorskip("cv2")
    from panorama import Panorama

    width, height = SCREEN
    look = Panorama(SCREEN, (96, 72), VIEW_DEGREES)
    x = (np.arange(width) + 0.5 - width / 2) / (width / 2)
    y = (np.arange(height) + 0.5 - height / 2)[:, None] / (width / 2)

    def screen(heading: float) -> np.ndarray:
        angle = np.arctan(x) + np.radians(heading)
        slope = y * np.cos(np.arctan(x))  # of the ray, on a cylinder around the eye
        wave = np.stack([np.sin(6 * angle) + np.cos(9 * slope), np.cos(11 * angle + 4 * slope),
                         np.sin(15 * angle) * np.cos(7 * slope)], -1)  # fmt: skip
        return np.clip(128 + 50 * wave, 0, 255).round().astype(np.uint8)

    ahead, right = (look(screen(heading)).astype(int) for heading in (0.0, 90 * 8 / 96))
    assert ahead.shape == (72, 96, 3)
    assert np.abs(ahead[:, 8:] - right[:, :-8]).max() <= 3
    assert np.abs(ahead - right).mean() > 15
    plane = [screen(heading)[:, 106:214] for heading in (0.0, 90 * 8 / 96)]
    bent = np.abs(plane[0][:, 27:].astype(int) - plane[1][:, :-27]).mean()
    assert bent > 3  # the engine's own picture bends


def test_a_turner_looks_left_and_back_right_on_and_on() -> None:
    turner = Turner(3)
    buttons = [turner.act(0.0, 0.0, 0.0) for _ in range(14)]
    assert buttons == [LEFT] * 3 + [RIGHT] * 3 + [LEFT] * 3 + [RIGHT] * 3 + [LEFT] * 2


def test_recorded_turns_come_back_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vizdoom")
    pytest.importorskip("cv2")
    monkeypatch.chdir(tmp_path)
    file = File("heldout-houses-000", "houses", 0, 1, 40, 10, (96, 72), True, seed=2, turns=12)
    (walk,) = record_houses(file)
    assert walk.actions.tolist() == [0] + [LEFT] * 12 + [RIGHT] * 12 + [LEFT] * 12 + [RIGHT] * 3
    assert np.array_equal(walk.frames[:16], walk.frames[24:])
    assert not np.array_equal(walk.frames[0], walk.frames[12])
    assert len(np.unique(walk.poses[:, :2], axis=0)) == 1


def test_a_share_of_the_training_files_turns_on_the_spot() -> None:
    recording = Recording(("houses",), walks=64, steps=1300, turners=0.25)
    files = plan(recording, (96, 72), 2)
    held_out = [file for file in files if file.held_out]
    training = [file for file in files if not file.held_out]
    assert {file.turns for file in held_out} == {0}
    assert [file.turns for file in training] == [0, 0, 0, TURN_FRAMES] * 8
    assert {file.turns for file in plan(recording, (96, 72), 2, turns=12)} == {12}
    rng = np.random.default_rng(0)
    drawn = {turn_of(training[3], rng) for _ in range(400)}
    assert min(drawn) == TURN_FRAMES // 2
    assert max(drawn) == 2 * TURN_FRAMES
    assert turn_of(plan(recording, (96, 72), 2, turns=12)[0], rng) == 12


def test_recording_processes_do_without_pytorch() -> None:
    """Dozens of them start at once."""
    pytest.importorskip("cv2")
    program = "import sys, data, house_walks; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1] / "training",
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_recorded_walks_follow_their_seed_and_buttons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vizdoom")
    pytest.importorskip("cv2")
    monkeypatch.chdir(tmp_path)  # the engine writes into its working directory
    file = File("train-houses-007", "houses", 7, 2, 60, 10, (96, 72), False, seed=2)
    walks = record_houses(file)
    assert [walk.frames.shape for walk in walks] == [(60, 72, 96, 3)] * 2
    for walk, again in zip(walks, record_houses(file), strict=True):
        for one, other in zip(walk, again, strict=True):
            assert np.array_equal(one, other)
        turned = (np.diff(walk.poses[:, 2]) + 180) % 360 - 180
        left, right = walk.actions[1:] & LEFT > 0, walk.actions[1:] & RIGHT > 0
        assert (turned[left] > 0).all()
        assert (turned[right] < 0).all()
        assert not turned[~left & ~right].any()
        steps = np.hypot(*np.diff(walk.poses[:, :2], axis=0).T)
        held = walk.actions[1:] & FORWARD > 0
        assert steps[held].mean() > 3
        assert np.ptp(walk.poses[:, :2], axis=0).max() > 50  # it gets somewhere
        reckoned = walk_poses(torch.from_numpy(walk.actions[None, 1:]))[0, :, 2].numpy()
        away = (reckoned - (walk.poses[1:, 2] - walk.poses[0, 2]) + 180) % 360 - 180
        assert np.abs(away).max() < 1e-3
        assert walk.frames.reshape(60, -1).std(1).min() > 5  # no frame is one colour
    assert not np.array_equal(walks[0].frames[0], walks[1].frames[0])
