"""Rows of a training step that lead from the model's own frames back to the true ones."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from losses import faded
from recipe import Phase, Recipe, Recording, read_recipe
from step import Step
from walks import Sequences

from .worlds import tiny_world

TRAINING = Path(__file__).parents[1] / "training"
FRAMES, BATCH = 9, 3


def seen_by_flow(own: torch.Tensor | None) -> tuple[dict[str, Any], torch.Tensor]:
    """What the network is given in a step, and the latents of the true frames."""
    model = tiny_world().requires_grad_(True)
    config = model.config
    shape = (BATCH, FRAMES, config.image_height, config.image_width, 3)
    frames = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    frames = frames.to(torch.uint8)
    recipe = Recipe(config, Recording(("houses",), 1), (), history_noise=0.5, clean_share=0.0)
    seen: dict[str, Any] = {}

    def forward(history: torch.Tensor, times: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.update(history=history.clone(), times=times.clone())
        return rest[0] * model.head.weight.sum()

    step = Step(model, recipe, Phase(1.0, FRAMES, BATCH, corrected_rows=0.34), forward, None)
    assert step.corrected_rows == 1
    still = torch.zeros(BATCH, FRAMES, dtype=torch.int64)
    true = Sequences(frames, still, torch.zeros(BATCH, FRAMES, 3))
    step.flow(true, torch.Generator().manual_seed(1), own)
    return seen, model.tokenizer.encode(frames)


def test_own_frames_are_a_history_as_a_rollout_commits_them() -> None:
    model = tiny_world()
    config = model.config
    own = torch.full((1, FRAMES, config.image_height, config.image_width, 3), 200).to(torch.uint8)
    plain, _ = seen_by_flow(None)
    seen, _ = seen_by_flow(own)
    made = model.tokenizer.encode(own)[0]
    time = config.commit_time
    assert (seen["times"][-1] == time).all()
    assert not (plain["times"][-1] == time).any()
    noise = (seen["history"][-1] - time * made) / (1 - time)
    assert 0.9 < float(noise.std()) < 1.1  # what is added is noise of the committed time, no more
    # the other rows are as they are without it
    assert torch.equal(seen["times"][:-1], plain["times"][:-1])
    assert torch.equal(seen["history"][:-1], plain["history"][:-1])


def test_faded_histories_lose_detail_chunk_by_chunk() -> None:
    latents = torch.ones(200, 9, 2, 24)
    out = faded(latents, 3, 0.4, torch.Generator().manual_seed(0))
    assert torch.equal(out[..., 0], latents[..., 0])  # the mean colour stays
    lost = (out != latents).flatten(1).any(1)
    assert 0.3 < lost.float().mean() < 0.5
    some = out[lost]
    assert (some.diff(dim=-1) <= 0).all()
    assert (some > 0).all()
    chunks = some.unflatten(1, (3, 3))
    assert torch.equal(chunks, chunks[:, :, :1].expand_as(chunks))
    last = chunks[:, :, 0, 0, -1]
    assert last.min() < 0.1
    assert last.max() > 0.95
    assert (last.std(1) > 0).all()
    assert torch.equal(faded(latents, 3, 0.0, torch.Generator().manual_seed(0)), latents)


def test_a_phase_has_own_rows_of_one_kind() -> None:
    with pytest.raises(ValueError, match="one kind"):
        Phase(1.0, 24, 4, own_rows=0.5, corrected_rows=0.5)


def test_a_phase_has_a_window_for_each_row() -> None:
    assert Phase(1.0, 24, 2, windows=(9, 24)).windows == (9, 24)
    with pytest.raises(ValueError, match="2 windows, expected one for each of 4 rows"):
        Phase(1.0, 24, 4, windows=(9, 24))


def test_a_recipe_may_say_only_what_it_does_otherwise() -> None:
    whole, rest = (read_recipe(TRAINING / f"{name}.json") for name in ("rooms", "rooms-continued"))
    assert rest == dataclasses.replace(whole, phases=rest.phases)
    assert [phase.until for phase in rest.phases] == [0.6, 1.0]
    camera, returns = (
        read_recipe(TRAINING / f"rooms-{name}.json") for name in ("camera", "returns")
    )
    assert camera == dataclasses.replace(rest, camera_share=0.75)
    assert returns == dataclasses.replace(camera, returns_share=0.5)
    ends = [dataclasses.replace(phase, until=0.0) for phase in whole.phases[-2:]]
    assert [dataclasses.replace(phase, until=0.0) for phase in rest.phases] == ends


def test_a_recipe_is_read_over_its_base(tmp_path: Path) -> None:
    base = json.loads((TRAINING / "rooms.json").read_text())
    (tmp_path / "rooms.json").write_text(json.dumps(base))
    mine = tmp_path / "mine.json"

    def read(**values: object) -> Recipe:
        mine.write_text(json.dumps({"base": "rooms.json", **values}))
        return read_recipe(mine)

    whole = read_recipe(TRAINING / "rooms.json")
    one = read(world={"channels": 64}, recording={"walks": 5}, camera_share=0.5)
    assert one.world == dataclasses.replace(whole.world, channels=64)
    assert one.recording == dataclasses.replace(whole.recording, walks=5)
    assert one.camera_share == 0.5
    for share in (-0.1, 1.5):
        with pytest.raises(ValueError, match="camera_share"):
            read(camera_share=share)
    with pytest.raises(ValueError, match=r"camera_share 0\.5 and view_degrees 0"):
        read(world={"view_degrees": 0, "view_dims": [0, 0], "rope_dims": [44, 42, 42]},
             camera_share=0.5)  # fmt: skip
    (tmp_path / "rooms.json").write_text(json.dumps(base | {"base": "rooms.json"}))
    with pytest.raises(ValueError, match="expected none there"):
        read()
