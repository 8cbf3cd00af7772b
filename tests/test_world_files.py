"""Weights and episodes on disk, and what is shipped of both."""

from __future__ import annotations

import errno
import json
import zipfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from steadykv.cache import KVCache
from steadykv.config import preset
from steadykv.errors import ConfigError, PayloadError
from steadykv.world import WorldConfig, WorldModel, load_episodes, load_world, rollout
from steadykv.world.episodes import save_episodes
from steadykv.world.sampler import KeyRope
from steadykv.world.weights import FORMAT, VERSION, quantize_rows, read_world, save_world
from tests.plain_cache import PlainCache
from tests.test_world_model import SMALL, small_episodes, small_world

ASSETS = Path(str(resources.files("steadykv.world"))) / "assets"
HEADER = {
    "format": FORMAT,
    "version": str(VERSION),
    "config": json.dumps(SMALL.to_dict()),
    "notes": "{}",
}


def bf16_cache(config: WorldConfig) -> KVCache:
    return KVCache(
        config.num_layers,
        config.num_heads,
        config.head_dim,
        config.frame_tokens,
        preset("bf16", window_frames=config.window_frames),
        layout="BSHD",
    )


@pytest.fixture(scope="module")
def world() -> WorldModel:
    return small_world()


@pytest.fixture
def weights(world: WorldModel, tmp_path: Path) -> Path:
    """The small model, saved."""
    path = tmp_path / "small.safetensors"
    save_world(path, SMALL, world.state_dict(), {"steps": 7})
    return path


# --- weights ------------------------------------------------------------------------------------


def test_rows_are_rounded_to_half_a_step() -> None:
    """Rows of any size, with a scale that FP16 itself rounds; a row of zeros stays one."""
    matrix = torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    matrix *= torch.logspace(-4, 2, 40)[:, None]
    matrix[11] = 0
    codes, scale = quantize_rows(matrix)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float16)
    error = (codes * scale.float()[:, None] - matrix).abs().amax(1)
    assert (error <= scale.float() / 2 * (1 + 1e-5)).all()
    assert error[11] == 0
    rest = torch.arange(40) != 11
    assert (codes.int().abs().amax(1)[rest] >= 126).all()  # no code is wasted


def test_weights_round_trip(world: WorldModel, weights: Path) -> None:
    config, state, notes = read_world(weights)
    assert (config, notes) == (SMALL, {"steps": 7})
    given, stored = world.state_dict(), load_file(weights)
    assert state.keys() == given.keys()
    rows = {name.removesuffix(".codes") for name in stored if name.endswith(".codes")}
    assert {"embed.weight", "blocks.1.query_key_value.weight", "head.weight"} <= rows
    assert "action.weight" not in rows  # sixteen rows are too few to be worth it
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        if name in rows:
            half_step = stored[f"{name}.scale"].float()[:, None] / 2
            assert ((tensor - given[name]).abs() <= half_step * (1 + 1e-5)).all(), name
            assert not torch.equal(tensor, given[name].half().float()), name
        elif name.startswith("tokenizer."):
            assert torch.equal(tensor, given[name]), name
        else:
            assert torch.equal(tensor, given[name].half().float()), name


def test_save_tells_the_size_and_leaves_one_file(world: WorldModel, tmp_path: Path) -> None:
    path = tmp_path / "world.safetensors"
    size = save_world(path, SMALL, world.state_dict(), {})
    assert size == path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_what_was_saved(weights: Path, dtype: torch.dtype) -> None:
    _, state, _ = read_world(weights)
    loaded = load_world(weights, dtype=dtype)
    assert loaded.config == SMALL
    assert not loaded.training
    for name, parameter in loaded.named_parameters():
        assert not parameter.requires_grad
        kept = torch.float32 if name.startswith("tokenizer.") else dtype
        assert parameter.dtype == kept, name
        assert torch.equal(parameter, state[name].to(kept)), name


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({**HEADER, "format": "other"}, "other"),
        ({**HEADER, "version": "99"}, "99"),
        ({"config": HEADER["config"]}, "None"),  # a checkpoint of training
        (None, "None"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, header: dict[str, str] | None, word: str
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.zeros(2)}, path, metadata=header)
    refused(path, word)


@pytest.mark.parametrize("kind", ["garbage", "empty", "cut off", "absent"])
def test_an_unreadable_file_is_refused(weights: Path, kind: str) -> None:
    whole = weights.read_bytes()
    if kind == "absent":
        weights.unlink()
    else:
        weights.write_bytes(
            {"garbage": b"no weights" * 50, "empty": b"", "cut off": whole[:-100]}[kind]
        )
    refused(weights, "no readable safetensors")


def refused(path: Path, word: str) -> None:
    """Both readers raise PayloadError, on one line that names the file."""
    for read in (read_world, load_world):
        with pytest.raises(PayloadError, match=word) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_other_parameters_are_refused(world: WorldModel, tmp_path: Path, change: str) -> None:
    path, state = tmp_path / "w.safetensors", dict(world.state_dict())
    if change == "missing":
        name = "blocks.1.key_norm.weight"
        del state[name]
    else:
        name = "blocks.2.key_norm.weight"
        state[name] = torch.ones(128)
    save_world(path, SMALL, state, {})
    with pytest.raises(PayloadError, match=rf"{change} \['{name}'\]") as caught:
        load_world(path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bytes are written, in place, as older releases of safetensors do it."""

    def save_half(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        content = save(tensors, metadata)
        path.write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("steadykv.world.weights.save_file", save_half)


@pytest.mark.usefixtures("full_disk")
def test_an_interrupted_write_leaves_no_file(world: WorldModel, tmp_path: Path) -> None:
    path = tmp_path / "world.safetensors"
    with pytest.raises(OSError, match="No space"):
        save_world(path, SMALL, world.state_dict(), {})
    assert not path.exists()


def test_an_interrupted_write_keeps_the_earlier_file(
    world: WorldModel, weights: Path, request: pytest.FixtureRequest
) -> None:
    before = weights.read_bytes()
    request.getfixturevalue("full_disk")  # only now: the earlier file is whole
    with pytest.raises(OSError, match="No space"):
        save_world(weights, SMALL, world.state_dict(), {})
    assert weights.read_bytes() == before


# --- episodes -----------------------------------------------------------------------------------


def test_episodes_round_trip_without_loss(tmp_path: Path) -> None:
    path, episodes = tmp_path / "episodes.zip", small_episodes(4)
    assert save_episodes(path, episodes) == path.stat().st_size
    loaded = load_episodes(4, path)
    assert len(loaded) == 4
    assert loaded.names == episodes.names
    for got, given in ((loaded.frames, episodes.frames), (loaded.actions, episodes.actions)):
        assert got.dtype == torch.uint8
        assert torch.equal(got, given)


def test_rows_can_be_chosen(tmp_path: Path) -> None:
    path, episodes = tmp_path / "episodes.zip", small_episodes(4)
    save_episodes(path, episodes)
    for chosen in (episodes.select([3, 0, 3]), load_episodes([3, 0, 3], path)):
        assert chosen.names == ("row-3", "row-0", "row-3")
        assert torch.equal(chosen.frames, episodes.frames[[3, 0, 3]])
        assert torch.equal(chosen.actions, episodes.actions[[3, 0, 3]])
    assert load_episodes(2, path).names == ("row-0", "row-1")


@pytest.mark.parametrize("which", [0, -1, 5, [], [-1], [0, 4]])
def test_numbers_there_are_not_are_refused(tmp_path: Path, which: int | Sequence[int]) -> None:
    path = tmp_path / "episodes.zip"
    save_episodes(path, small_episodes(4))
    with pytest.raises(ConfigError, match="from 0 to 3") as caught:
        load_episodes(which, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["garbage", "absent", "no list", "no list of rows", "no picture"])
def test_other_archives_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "episodes.zip"
    row = {"name": "a", "frames": 3, "actions": [0]}
    members = {
        "no list": {"a.png": b""},
        "no list of rows": {"episodes.json": b"three walks"},
        "no picture": {"episodes.json": json.dumps([row]).encode(), "a.png": b"no picture"},
    }
    if kind == "garbage":
        path.write_bytes(b"no archive" * 50)
    elif kind != "absent":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members[kind].items():
                archive.writestr(name, content)
    with pytest.raises(PayloadError, match="no readable archive") as caught:
        load_episodes(1, path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- what is shipped ----------------------------------------------------------------------------


def test_shipped_episodes() -> None:
    episodes, config = load_episodes(), WorldConfig()
    size = (config.chunk_frames, config.image_height, config.image_width, 3)
    assert episodes.frames.shape == (64, *size)
    assert len(set(episodes.names)) == 64
    assert episodes.actions.shape[1] >= size[0] + 699  # a rollout of 700 frames can be steered
    assert episodes.actions.max() < config.num_actions
    assert (episodes.frames.float().flatten(1).std(1) > 1).all()  # no beginning is one colour
    with pytest.raises(ConfigError, match="from 0 to 63"):
        load_episodes(65)


def test_shipped_weights_are_small_and_name_their_format() -> None:
    path = ASSETS / "world.safetensors"
    assert path.stat().st_size <= 20_000_000
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == FORMAT


def test_shipped_model_generates_a_chunk() -> None:
    world = load_world()
    video = rollout(world, load_episodes(1), bf16_cache(world.config), 3)
    first, last = video[0, 2].float(), video[0, 5].float()
    assert last.std(dim=(0, 1)).min() > 1  # no channel is flat
    assert 0.1 < (last - first).abs().mean() < first.std()  # it moves, and remembers where it was


# --- the cache that keeps everything ------------------------------------------------------------


@pytest.mark.parametrize("key_rope", ["post", "pre"])
def test_bf16_cache_gives_the_video_of_a_plain_one(world: WorldModel, key_rope: KeyRope) -> None:
    """Bit for bit, long after the window is full."""
    episodes, frames = small_episodes(), 24
    window = SMALL.window_frames * SMALL.frame_tokens
    cache = bf16_cache(SMALL)
    video = rollout(world, episodes, cache, frames, seeds=[4, 5], key_rope=key_rope)
    plain = PlainCache(SMALL.num_layers, window)
    assert torch.equal(
        video, rollout(world, episodes, plain, frames, seeds=[4, 5], key_rope=key_rope)
    )
    total = (3 + frames) * SMALL.frame_tokens
    assert cache[0].spans()[0][0] == total - window
    endless = PlainCache(SMALL.num_layers)
    everything = rollout(world, episodes, endless, frames, seeds=[4, 5], key_rope=key_rope)
    assert not torch.equal(video, everything)  # the window matters


@pytest.mark.parametrize("damage", ["scale", "config", "notes", "shape"])
def test_damaged_weights_are_one_clear_error(tmp_path: Path, damage: str) -> None:
    world = WorldModel(SMALL)
    path = tmp_path / "world.safetensors"
    save_world(path, SMALL, dict(world.named_parameters()), {})
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if damage == "scale":
        del tensors[next(name for name in tensors if name.endswith(".scale"))]
    elif damage == "shape":
        tensors["final_modulation"] = tensors["final_modulation"][:1].clone()
    else:
        del header[damage]
    save_file(tensors, path, metadata=header)
    with pytest.raises(PayloadError) as caught:
        load_world(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"actions": None},
        {"actions": "left"},
        {"actions": [300]},
        {"frames": "3"},
        {"name": None},
    ],
)
def test_damaged_episodes_are_one_clear_error(tmp_path: Path, row: dict[str, object]) -> None:
    path = tmp_path / "episodes.zip"
    save_episodes(path, small_episodes(1))
    with zipfile.ZipFile(path) as archive:
        rows = json.loads(archive.read("episodes.json"))
        pictures = {name: archive.read(name) for name in archive.namelist() if ".png" in name}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("episodes.json", json.dumps([rows[0] | row]))
        for name, data in pictures.items():
            archive.writestr(name, data)
    with pytest.raises(PayloadError) as caught:
        load_episodes(1, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "bad", [{"chunk_frames": 0}, {"patch": 0}, {"num_heads": 0}, {"width": "48"}, {"patch": 8.0}]
)
def test_a_geometry_of_wrong_numbers_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        WorldConfig.from_dict(SMALL.to_dict() | bad)
