"""The embedded worlds by name: where their weights and held-out walks lie."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from steadykv.errors import ConfigError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

WORLDS = {
    "mazes": {"weights": "world.safetensors", "episodes": "episodes.zip"},
    "rooms": {"weights": "rooms.safetensors", "episodes": "rooms-episodes.zip"},
}
"""Each world's files; `mazes`, the first one, is the default."""
DEFAULT_WORLD = "mazes"
NAMES = " or ".join(repr(name) for name in WORLDS)

Part = Literal["weights", "episodes"]


def assets() -> Traversable:
    """The folder of everything that ships with the worlds."""
    return resources.files("steadykv.world") / "assets"


def chosen_file(choice: str | Path | None, part: Part) -> Traversable | Path:
    """A part of the world that `choice` names (None: the default), or the file that it is.

    A string is a name first; "./rooms" or a Path is always a file. Raises ConfigError for a name
    whose file is not installed, and for a string that is neither a name nor a file.
    """
    choice = DEFAULT_WORLD if choice is None else choice
    if isinstance(choice, Path) or (choice not in WORLDS and Path(choice).is_file()):
        return Path(choice)
    wanted = "world weights" if part == "weights" else "an archive of episodes"
    if choice not in WORLDS:
        raise ConfigError(
            f"world: got {choice!r}, which is no file; expected {wanted} or the name {NAMES}"
        )
    file = assets() / WORLDS[choice][part]
    if not file.is_file():
        there = [name for name in WORLDS if (assets() / WORLDS[name][part]).is_file()]
        raise ConfigError(
            f"world: got {choice!r}, whose {file.name} is not installed; expected {wanted} or the "
            f"name of an installed world: {', '.join(map(repr, there)) or 'none is'}"
        )
    return file


def walks_of(world: str | None, walks: Path | None) -> str | Path | None:
    """What `load_episodes` takes: `walks` if given, else the named world's own, else the default.

    Weights in a file have no walks of their own.
    """
    if walks is not None:
        return walks
    return world if world in WORLDS else None
