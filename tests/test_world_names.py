"""The embedded worlds by name, in Python and on the command line."""

from __future__ import annotations

import dataclasses
import io
import math
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from steadykv.capture import open_capture
from steadykv.cli.main import main
from steadykv.errors import ConfigError, PayloadError
from steadykv.world import load_episodes, load_world, shipped
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.worlds import TINY, tiny_episodes, tiny_world


@pytest.fixture(scope="module")
def two_worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny worlds with walks of different lengths."""
    place = tmp_path_factory.mktemp("worlds")
    state = tiny_world().state_dict()
    for name, frames, factor in (("mazes", 60, 1.0), ("rooms", 33, 1.1)):
        files = shipped.WORLDS[name]
        save_world(place / files["weights"], TINY, {n: factor * p for n, p in state.items()}, {})
        save_episodes(place / files["episodes"], tiny_episodes(3, frames))
    return place


@pytest.fixture
def folder(two_worlds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the assets."""
    place = tmp_path / "assets"
    shutil.copytree(two_worlds, place)
    monkeypatch.setattr(shipped, "assets", lambda: place)
    return place


def weights(name: str | Path | None) -> torch.Tensor:
    return load_world(name).head.weight


def test_a_name_chooses_weights_and_walks(folder: Path) -> None:
    assert load_episodes(2).actions.shape == load_episodes(2, "mazes").actions.shape == (2, 60)
    assert load_episodes(2, "rooms").actions.shape == (2, 33)
    assert torch.equal(weights(None), weights("mazes"))
    assert not torch.equal(weights(None), weights("rooms"))
    assert torch.equal(weights("rooms"), weights(folder / "rooms.safetensors"))
    assert torch.equal(weights("rooms"), weights(str(folder / "rooms.safetensors")))


def test_a_file_that_is_called_like_a_world(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string is the name first; a Path, and "./rooms", are the file."""
    monkeypatch.chdir(folder)
    (folder / "world.safetensors").rename("rooms")
    assert torch.equal(weights("./rooms"), weights(Path("rooms")))
    assert not torch.equal(weights("rooms"), weights("./rooms"))


@pytest.mark.parametrize("load", [load_world, lambda name: load_episodes(1, name)])
def test_a_world_that_is_not_there_is_refused(load, folder: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"'attic', which is no file.*'mazes' or 'rooms'$") as bad:
        load("attic")
    assert "\n" not in str(bad.value)
    for file in shipped.WORLDS["rooms"].values():
        (folder / file).unlink()
    with pytest.raises(
        ConfigError, match=r"'rooms', whose rooms\S+ is not.*world: 'mazes'$"
    ) as bad:
        load("rooms")
    assert "\n" not in str(bad.value)
    load("mazes")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is 'zzz': expected one"):
        load_world(device="zzz")


def test_walks_of_a_named_world() -> None:
    other = Path("other.zip")
    assert shipped.walks_of("rooms", None) == "rooms"
    assert shipped.walks_of("rooms", other) == shipped.walks_of(None, other) == other
    assert shipped.walks_of(None, None) is shipped.walks_of("rooms.safetensors", None) is None


def test_the_command_line_knows_the_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rooms` brings its walks, whose buttons end after 33 frames."""
    words = ["capture", "--frames", "33", "--queries", "0", "--out", str(tmp_path / "a")]
    assert main(["capture", "--world", "rooms", *words[1:]]) == 2
    assert "up to 30" in capsys.readouterr().err
    words[2] = "6"
    assert main([*words, "--world", "rooms"]) == 0
    header = open_capture(tmp_path / "a").header
    assert header is not None
    assert header.model["weights"] == "rooms"
    demo = ["demo", "--world", "rooms", "--frames", "6", "--methods", "kivi"]
    assert main([*demo, "--out", str(tmp_path / "b")]) == 0
    assert main([*demo[:4], "33", "--out", str(tmp_path / "c")]) == 2
    assert "up to 30" in capsys.readouterr().err
    assert main([*demo, "--world", "attic", "--out", str(tmp_path / "c")]) == 2
    assert "'mazes' or 'rooms'" in capsys.readouterr().err


def test_poses_come_back_to_the_nearest_step(tmp_path: Path) -> None:
    path, episodes = tmp_path / "episodes.zip", tiny_episodes(3, 40)
    poses = torch.rand(3, 40, 3) * torch.tensor((2000.0, 2000.0, 360.0)) - 100
    save_episodes(path, episodes)
    assert load_episodes(3, path).poses is None
    posed = type(episodes)(episodes.frames, episodes.actions, episodes.names, poses)
    save_episodes(path, posed)
    loaded = load_episodes([2, 0], path)
    assert loaded.poses is not None
    assert loaded.poses.dtype == torch.float32
    off = loaded.poses - poses[[2, 0]]
    off[..., 2] = (off[..., 2] + 180) % 360 - 180  # angles of -180 to 180 come back
    assert (off.abs().amax((0, 1)) <= torch.tensor((0.5, 0.5, 0.0501))).all()
    assert loaded.poses[..., 2].abs().max() <= 180
    chosen = posed.select([1, 1]).poses
    assert chosen is not None
    assert torch.equal(chosen, poses[[1, 1]])


@pytest.mark.parametrize("wrong", ["far", "nan", "camera", "names"])
def test_walks_that_a_file_cannot_hold_leave_the_one_that_is_there(
    tmp_path: Path, wrong: str
) -> None:
    path, episodes = tmp_path / "episodes.zip", tiny_episodes(3, 40)
    save_episodes(path, episodes)
    before = path.read_bytes()
    poses = torch.full((3, 40, 3), {"far": 40_000.0, "nan": math.nan}.get(wrong, 1.0))
    bad = dataclasses.replace(episodes, poses=poses)
    if wrong == "camera":
        bad = bad.with_camera()
    if wrong == "names":
        bad = dataclasses.replace(bad, names=("a", "b", "a"))
    with pytest.raises(ConfigError, match=wrong if wrong in ("camera", "names") else "poses"):
        save_episodes(path, bad)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["shape", "object", "garbage"])
def test_damaged_poses_are_one_clear_error(tmp_path: Path, damage: str) -> None:
    path, npy = tmp_path / "episodes.zip", io.BytesIO()
    save_episodes(path, tiny_episodes(3, 40))
    if damage == "object":
        np.save(npy, np.array([None] * 3), allow_pickle=True)
    elif damage == "shape":
        np.save(npy, np.zeros((3, 39, 3), np.int16))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("poses.npy", npy.getvalue() or b"garbage")
    with pytest.raises(PayloadError) as caught:
        load_episodes(3, path)
    assert "\n" not in str(caught.value)


def test_the_second_world_ships_whole() -> None:
    """Weights and walks, small; the walks with the poses that revisits are found by."""
    files = {part: shipped.chosen_file(None, "weights").parent / name
             for part, name in shipped.WORLDS["rooms"].items()}  # fmt: skip
    if not any(file.is_file() for file in files.values()):
        pytest.skip("rooms is not trained yet")
    assert files["weights"].stat().st_size <= 20_000_000
    assert files["episodes"].stat().st_size <= 2_500_000
    episodes = load_episodes(64, "rooms")
    assert len(set(episodes.names)) == 64
    assert episodes.frames.shape == (64, 3, 72, 96, 3)
    assert episodes.poses is not None
    assert episodes.poses.shape == (64, 1023, 3)
    turns = (episodes.poses[:, 1:, 2] - episodes.poses[:, :-1, 2] + 180) % 360 - 180
    left = (episodes.actions[:, 1:] & 2) > 0
    # poses belong to these buttons; the engine loses the first tics of an episode
    assert (turns[:, 3:][left[:, 3:]] > 0).all()
    config = load_world("rooms").config
    assert (config.window_frames, config.view_degrees) == (123, 90.0)  # the one that remembers
