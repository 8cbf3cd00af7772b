"""Random houses for the second world: maps of rooms that no walk shares with another.

A house is a grid of 3 or 4 by 3 or 4 rooms of different sizes. Short open passages join them along
a random tree and some loops. Every room has walls, floor and ceiling of its own, its own height and
light, and pillars and furniture that stand still, so that it can be recognised. The same seed makes
the same house.

The map is text (UDMF, https://zdoom.org/wiki/Universal_Doom_Map_Format) in a WAD without nodes:
the engine builds them when it loads the map. A WAD is a header of 12 bytes, lumps, and a directory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Point = tuple[float, float]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Pictures of freedoom2.wad: opaque, still, and unlike each other in colour or pattern.
WALLS = _words(
    "REDWALL REDWALL1 STONEW5 BRICK11 DOGLDIR DOKGRIR GRAY1 BRICK3 DOGRMSC STARG1 STWALL STARBR1 "
    "AQMETL33 AQBRIK03 CEMENT1 TANROCK7 AQCONC12 SMSTONE6 TANROCK2 AQMETL13 SHAWN03 ICKWALL6 "
    "STARTAN3 CEMENT8 ZIMMER7 AQTRIM07 ESPIGR1 AQCONC17 ZIMMER2 BSTONE3 AQCONC05 SHAWN02 AQSECT09 "
    "STONE6 STARTAN1 ESPIG2 MURAL2 AROCK3 ESPIBR2 CEMENT9 AQBRIK02 TANROCK3 STARG4 ESPIG3 "
    "AQMETL14 AQRUST09 AQCONC14 AQSECT06 AQCONC04 GSTONE2 STONE5 TEKGREN1 BIGBRIK3 PANEL3 CAVERN4 "
    "TEKGREN5 GRAYWARN SILVER2 BASE GRAYDANG AQSECT02 METAL7"
)
FLOORS = _words(
    "AQF025 AQF022 RROCK01 RROCK11 AQF048 FLAT10 RROCK02 AQF057 FLOOR7_1 FLOOR3_3 AQF067 CEIL5_1 "
    "RROCK20 FLAT8 FLAT5_3 SLIME16 FLOOR7_2 DEM1_6 FLAT1 FLOOR5_4 AQF047 FLOOR4_6 SLIME13 AQF018 "
    "FLAT9 FLAT5_8 MFLR8_3 FLOOR1_1 AQF068 AQF005"
)
CEILINGS = _words(
    "AQF014 FLAT17 FLAT2 FLAT22 FLOOR1_7 FLAT23 CEIL3_5 CEIL3_6 AQF035 AQF037 AQF039 AQF041 AQF043 "
    "AQF025 AQF022 RROCK11 AQF048 FLAT10 AQF057 AQF067 CEIL5_1 FLAT8 FLAT5_3 SLIME16 FLOOR5_4 "
    "AQF047 FLAT1 RROCK20 FLOOR3_3 MFLR8_3"
)
TRIMS = _words("METAL SUPPORT3 BROWN96 WOOD1 GRAY7 STONE2")
# editor numbers of furniture without moving pictures: columns, trees, a lamp, a candelabrum
FURNITURE = (30, 31, 32, 33, 35, 43, 47, 48, 54, 2028)
PLAYER_START = 1
PLAYER_RADIUS = 16.0


@dataclass
class Room:
    """A rectangle with openings; `hub` is where walkers meet."""

    left: float
    bottom: float
    right: float
    top: float
    hub: Point
    paths: list[tuple[Point, Point]] = field(default_factory=list)  # kept free of furniture
    openings: dict[str, tuple[float, float]] = field(default_factory=dict)  # by side

    def holds(self, x: float, y: float) -> bool:
        """Whether the point lies inside."""
        return self.left <= x <= self.right and self.bottom <= y <= self.top


@dataclass(frozen=True)
class House:
    """`text` is the map; `passages[a][b]` are the points on the way from room a's hub to b's."""

    text: str
    rooms: tuple[Room, ...]
    passages: dict[int, dict[int, tuple[Point, ...]]]
    start: int


class MapText:
    """Collects the blocks of a UDMF map."""

    def __init__(self) -> None:
        self.blocks = ['namespace = "zdoom";']
        self.counts = {"vertex": 0, "sidedef": 0, "sector": 0, "linedef": 0, "thing": 0}

    def add(self, kind: str, **values: float | str | bool) -> int:
        """One block; returns its number among those of its kind."""
        lines = []
        for name, value in values.items():
            if isinstance(value, bool):
                shown = "true" if value else "false"
            else:
                shown = f'"{value}"' if isinstance(value, str) else f"{value:g}"
            lines.append(f"{name} = {shown};")
        self.blocks.append(f"{kind} {{ {' '.join(lines)} }}")
        self.counts[kind] += 1
        return self.counts[kind] - 1

    def wall(self, start: Point, end: Point, sector: int, texture: str) -> None:
        """A solid wall; its room lies to the right of the way from `start` to `end`."""
        side = self.add("sidedef", sector=sector, texturemiddle=texture)
        self._line(start, end, sidefront=side, blocking=True)

    def opening(self, start: Point, end: Point, front: int, back: int, texture: str) -> None:
        """The open border of two sectors; `texture` is the wall above it, seen from `front`."""
        sides = {
            "sidefront": self.add("sidedef", sector=front, texturetop=texture),
            "sideback": self.add("sidedef", sector=back, texturetop=texture),
        }
        self._line(start, end, **sides, twosided=True)

    def _line(self, start: Point, end: Point, **values: float | bool) -> None:
        v1, v2 = (self.add("vertex", x=x, y=y) for x, y in (start, end))
        self.add("linedef", v1=v1, v2=v2, **values)

    def thing(self, number: int, place: Point, angle: float) -> None:
        """Furniture or the player's start."""
        skills: dict[str, bool] = {f"skill{i}": True for i in range(1, 6)}
        x, y = place
        self.add("thing", x=x, y=y, angle=angle, type=number, single=True, **skills)


def make_house(rng: np.random.Generator) -> House:
    """A house drawn from `rng`."""
    columns, rows = (int(n) for n in rng.integers(3, 5, 2))
    rooms = _place_rooms(rng, columns, rows)
    text = MapText()
    count = len(rooms)
    walls = [WALLS[i] for i in rng.permutation(len(WALLS))]
    floors = [FLOORS[i] for i in rng.permutation(len(FLOORS))]
    ceilings = [CEILINGS[i] for i in rng.permutation(len(CEILINGS))]
    heights = rng.integers(14, 23, count) * 8
    lights = rng.integers(18, 33, count) * 8 - 1
    for i in range(count):
        text.add(
            "sector",
            heightfloor=0,
            heightceiling=int(heights[i]),
            texturefloor=floors[i],
            textureceiling=ceilings[i],
            lightlevel=int(lights[i]),
        )
    passages: dict[int, dict[int, tuple[Point, ...]]] = {i: {} for i in range(count)}
    for a, b in _joined(rng, columns, rows):
        light = int(lights[a] + lights[b]) // 2
        ways = _add_passage(text, rng, rooms[a], rooms[b], (a, b), (walls[a], walls[b]), light)
        passages[a][b], passages[b][a] = ways, ways[::-1]
    for i, room in enumerate(rooms):
        accent = walls[count + i] if rng.random() < 0.6 else walls[i]
        _add_walls(text, room, i, walls[i], accent, str(rng.choice(list(SIDES))))
        _furnish(text, rng, room, i, walls[2 * count + i])
    start = int(rng.integers(count))
    text.thing(PLAYER_START, rooms[start].hub, int(rng.integers(8)) * 45)
    return House("\n".join(text.blocks) + "\n", tuple(rooms), passages, start)


SIDES = {"left": "right", "right": "left", "bottom": "top", "top": "bottom"}


def _place_rooms(rng: np.random.Generator, columns: int, rows: int) -> list[Room]:
    """Rooms row by row from the bottom left, each somewhat smaller than its cell."""
    widths, heights = (rng.integers(13, 21, n) * 16.0 for n in (columns, rows))
    xs, ys = np.concatenate(([0.0], widths.cumsum())), np.concatenate(([0.0], heights.cumsum()))
    rooms = []
    for row in range(rows):
        for column in range(columns):
            left, bottom, right, top = rng.choice([8.0, 8.0, 16.0, 24.0], 4)
            left, right = float(xs[column] + left), float(xs[column + 1] - right)
            bottom, top = float(ys[row] + bottom), float(ys[row + 1] - top)
            shift = rng.integers(-16, 17, 2)
            hub = float((left + right) // 2 + shift[0]), float((bottom + top) // 2 + shift[1])
            rooms.append(Room(left, bottom, right, top, hub))
    return rooms


def _joined(rng: np.random.Generator, columns: int, rows: int) -> list[tuple[int, int]]:
    """Neighbours with a passage between them: a random tree, and a third of the other pairs."""
    pairs = [(i, i + 1) for i in range(columns * rows) if (i + 1) % columns]
    pairs += [(i, i + columns) for i in range(columns * (rows - 1))]
    group = list(range(columns * rows))
    joined = []
    for number in rng.permutation(len(pairs)):
        a, b = pairs[number]
        if group[a] != group[b]:
            old, new = group[a], group[b]
            group = [new if g == old else g for g in group]
            joined.append((a, b))
        elif rng.random() < 0.33:
            joined.append((a, b))
    return joined


def _add_passage(
    text: MapText,
    rng: np.random.Generator,
    first: Room,
    second: Room,
    sectors: tuple[int, int],
    textures: tuple[str, str],
    light: int,
) -> tuple[Point, Point]:
    """An opening from `first` to `second`, which lies to the right of it or above it.

    Returns the points in front of both ends.
    """
    upright = second.bottom >= first.top
    if upright:
        low, high = max(first.left, second.left), min(first.right, second.right)
        near, far = first.top, second.bottom
        sides = "top", "bottom"
    else:
        low, high = max(first.bottom, second.bottom), min(first.top, second.top)
        near, far = first.right, second.left
        sides = "right", "left"
    width = float(rng.choice([80.0, 96.0, 112.0]))
    begin = float(rng.integers(int(low) + 16, int(high - width) - 15))
    end = begin + width

    def place(along: float, across: float) -> Point:
        return (along, across) if upright else (across, along)

    passage = text.add(
        "sector",
        heightfloor=0,
        heightceiling=int(rng.choice([80, 88, 96])),
        texturefloor="FLOOR0_1",
        textureceiling="CEIL3_5",
        lightlevel=light,
    )
    # `wall` and `opening` want the inside on the right: a passage upwards is walked the other way
    turn = slice(None, None, 1 if upright else -1)
    trim = str(rng.choice(TRIMS))
    text.wall(*(place(begin, near), place(begin, far))[turn], passage, trim)
    text.wall(*(place(end, far), place(end, near))[turn], passage, trim)
    text.opening(*(place(begin, near), place(end, near))[turn], sectors[0], passage, textures[0])
    text.opening(*(place(end, far), place(begin, far))[turn], sectors[1], passage, textures[1])
    middle = (begin + end) / 2
    points = place(middle, near - 32), place(middle, far + 32)
    for room, side, point in zip((first, second), sides, points, strict=True):
        room.openings[side] = begin, end
        room.paths.append((room.hub, point))
    return points


def _add_walls(
    text: MapText, room: Room, sector: int, main: str, accent: str, accented: str
) -> None:
    """The four walls, clockwise, without their openings; the `accented` one looks different."""
    left, bottom, right, top = room.left, room.bottom, room.right, room.top
    corners = {
        "left": ((left, bottom), (left, top)),
        "top": ((left, top), (right, top)),
        "right": ((right, top), (right, bottom)),
        "bottom": ((right, bottom), (left, bottom)),
    }
    for side, (start, end) in corners.items():
        texture = accent if side == accented else main
        if side not in room.openings:
            text.wall(start, end, sector, texture)
            continue
        axis = 1 if side in ("left", "right") else 0
        gap = sorted(room.openings[side], reverse=end[axis] < start[axis])
        stops = [(p, start[1]) if axis == 0 else (start[0], p) for p in gap]
        text.wall(start, stops[0], sector, texture)
        text.wall(stops[1], end, sector, texture)


def _distance(point: Point, path: tuple[Point, Point]) -> float:
    """Of a point from a straight path."""
    p, a, b = (np.array(x) for x in (point, *path))
    along = np.clip((p - a) @ (b - a) / max((b - a) @ (b - a), 1e-9), 0, 1)
    return float(np.linalg.norm(p - a - along * (b - a)))


def _furnish(text: MapText, rng: np.random.Generator, room: Room, sector: int, wall: str) -> None:
    """Up to two pillars and three pieces of furniture, away from the walkers' paths."""
    taken: list[tuple[Point, float]] = []
    pillars = int(rng.integers(0, 3))
    for number in range(pillars + int(rng.integers(1, 4))):
        half = float(rng.choice([12.0, 16.0, 24.0])) if number < pillars else PLAYER_RADIUS
        reach = half * 2**0.5 if number < pillars else half
        for _ in range(12):
            x = float(rng.integers(int(room.left + half) + 8, int(room.right - half) - 7))
            y = float(rng.integers(int(room.bottom + half) + 8, int(room.top - half) - 7))
            free = PLAYER_RADIUS + reach + 10
            if all(_distance((x, y), path) > free for path in room.paths) and all(
                np.hypot(x - at[0], y - at[1]) > reach + other + 8 for at, other in taken
            ):
                taken.append(((x, y), reach))
                if number < pillars:
                    low, high = (x - half, y - half), (x + half, y + half)
                    corners = [low, (high[0], low[1]), high, (low[0], high[1])]
                    for start, end in zip(corners, corners[1:] + corners[:1], strict=True):
                        text.wall(start, end, sector, wall)
                else:
                    text.thing(int(rng.choice(FURNITURE)), (x, y), 0)
                break


def write_wad(path: Path, maps: list[str]) -> None:
    """The maps as MAP01, MAP02, ... of one WAD; 99 at most, as the engine counts them."""
    if not 1 <= len(maps) <= 99:
        raise ValueError(f"houses: got {len(maps)} maps, expected 1 to 99 in a WAD")
    body, directory = bytearray(), bytearray()
    for number, text in enumerate(maps, 1):
        lumps = ((f"MAP{number:02d}", b""), ("TEXTMAP", text.encode()), ("ENDMAP", b""))
        for name, data in lumps:
            directory += struct.pack("<ii8s", 12 + len(body), len(data), name.encode())
            body += data
    count = 3 * len(maps)
    path.write_bytes(struct.pack("<4sii", b"PWAD", count, 12 + len(body)) + body + directory)
