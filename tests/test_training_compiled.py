"""The compiled blocks of a training step: as many graphs as kinds of sequences, the same step."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from steadykv.world.model import WorldModel
from steadykv.world.pose import walk_poses

TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def losses(compiled: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Of two steps of each kind of sequence of `rooms`; and the gradients they add up to."""
    sys.path.insert(0, str(TRAINING))
    from recipe import read_recipe, tiny
    from step import Step, build_forward, compile_blocks
    from walks import Sequences

    recipe = tiny(read_recipe(TRAINING / "rooms.json"))
    world = dataclasses.replace(recipe.world, num_layers=4)
    torch.manual_seed(0)
    model = WorldModel(world)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    if compiled:
        compile_blocks(model, backend="aot_eager")
    found = []
    for frames, phase in zip((6, 9), recipe.phases[-2:], strict=True):
        phase = dataclasses.replace(phase, frames=frames)
        step = Step(model, recipe, phase, build_forward(model, phase, "cpu"), None)
        generator = torch.Generator().manual_seed(1)
        size = (phase.batch, frames, world.image_height, world.image_width, 3)
        video = torch.randint(256, size, dtype=torch.uint8, generator=generator)
        held = torch.randint(8, size[:2], generator=generator)
        true = Sequences(video, held, walk_poses(held))
        found += [float(step.flow(true, generator)["loss"]) for _ in range(2)]
    return found, [p.grad for p in model.parameters() if p.grad is not None]


def test_blocks_share_a_graph_for_each_kind_of_sequence_and_compute_the_same() -> None:
    plain, plain_gradients = losses(compiled=False)
    assert counters["stats"]["unique_graphs"] == 0
    compiled, gradients = losses(compiled=True)
    assert counters["stats"]["unique_graphs"] == 2  # of eight: four layers, two kinds
    assert not counters["graph_break"]
    assert compiled == pytest.approx(plain, rel=1e-3)
    for a, b in zip(gradients, plain_gradients, strict=True):
        assert (a - b).norm() < 0.01 * b.norm() + 1e-6
