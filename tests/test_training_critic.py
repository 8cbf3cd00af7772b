"""The critic of the last phase: what it can tell apart, and how hard it pushes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from critic import Judge
from recipe import Phase, Recipe, Recording
from step import Step, build_forward
from walks import Sequences

from steadykv.world import WorldConfig, WorldModel

FRAMES, BATCH = 9, 4
CONFIG = WorldConfig(
    num_layers=2, num_heads=2, head_dim=12, width=32, hidden_width=32, image_height=16,
    image_width=24, patch=4, channels=32, window_frames=9, rope_dims=(4, 4, 4),
)  # fmt: skip


SMALL = dataclasses.replace(CONFIG, image_height=8, image_width=8)


def chunks(count: int, generator: torch.Generator) -> torch.Tensor:
    """Latents [N,C,P,D] whose components have deviations from 3 down to 0.03, as pictures have."""
    deviation = torch.logspace(0.5, -1.5, SMALL.channels)
    shape = (count, SMALL.chunk_frames, SMALL.frame_tokens, SMALL.channels)
    return torch.randn(shape, generator=generator) * deviation


def learnt(change: float) -> float:
    """A new critic's loss after 60 steps on chunks that lost the last half of their components."""
    torch.manual_seed(0)
    judge, generator = Judge(SMALL, "cpu", 1, penalty=0.3), torch.Generator().manual_seed(1)
    held, losses = torch.zeros(16, CONFIG.chunk_frames, dtype=torch.int64), []
    for _ in range(60):
        true = chunks(16, generator)
        made = chunks(16, generator)
        made[..., CONFIG.channels // 2 :] *= change
        losses.append(judge.learn(true, made, held))
    return float(torch.stack(losses[-10:]).mean())


def test_a_critic_finds_the_smallest_components_missing() -> None:
    """They are a hundredth of the pictures' energy."""
    assert learnt(0.3) < 0.35
    assert learnt(1.0) == pytest.approx(0.693, abs=0.03)  # and has nothing to tell otherwise


def test_the_penalty_keeps_a_critic_from_being_sure() -> None:
    generator, held = torch.Generator().manual_seed(1), torch.zeros(8, 3, dtype=torch.int64)
    losses = []
    for penalty in (0.0, 30.0):
        torch.manual_seed(0)
        judge = Judge(SMALL, "cpu", 1, penalty)
        for _ in range(40):
            true = chunks(8, generator)
            loss = judge.learn(true, 0.3 * true, held)
        losses.append(float(loss))
    assert losses[0] < 0.1
    assert losses[1] > 0.5


def new_step(own_rows: float = 0.5) -> tuple[Step, Sequences]:
    torch.manual_seed(0)
    model = WorldModel(CONFIG)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    generator = torch.Generator().manual_seed(2)
    size = (BATCH, FRAMES, CONFIG.image_height, CONFIG.image_width, 3)
    frames = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    model.tokenizer.fit(frames.flatten(0, 1), 0.0, 2.8)
    phase = Phase(1.0, FRAMES, BATCH, sampled_share=0.5, own_rows=own_rows, critic_weight=0.5)
    recipe = Recipe(CONFIG, Recording(("houses",), 1), ())
    judge = Judge(CONFIG, "cpu", 1, recipe.critic_penalty)
    still = torch.zeros(BATCH, FRAMES, dtype=torch.int64)
    step = Step(model, recipe, phase, build_forward(model, phase, "cpu"), judge)
    return step, Sequences(frames, still, torch.zeros(BATCH, FRAMES, 3))


def norm_of(model: WorldModel) -> float:
    slopes = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(slopes))


def test_a_critic_pushes_as_hard_as_the_other_steps_and_no_harder_later() -> None:
    step, true = new_step()
    generator, usual = torch.Generator().manual_seed(3), torch.tensor(0.25)
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    told = step.sampled(true, true.frames, 0.0, usual, generator)
    assert all(p.grad is None for p in step.model.parameters())  # only the critic has learnt
    assert float(told["critic_scale"]) == 0
    first = float(told["critic_ratio"])
    told = step.sampled(true, true.frames, 0.5, usual, generator)
    assert float(told["critic_scale"]) == pytest.approx(0.5 * first)
    # the scale is that of before, so that the norm is about, and not exactly, half the usual one
    expected = 0.5 * first * 0.25 / float(told["critic_ratio"])
    assert norm_of(step.model) == pytest.approx(expected, rel=1e-3)
    assert all(torch.equal(p, before[name]) for name, p in step.model.named_parameters())


def test_own_rows_count_for_the_critic_and_not_for_the_error() -> None:
    step, true = new_step(own_rows=0.25)
    assert step.own_rows == 1
    usual = torch.tensor(1.0)

    def told(own: torch.Tensor) -> dict[str, torch.Tensor]:
        assert step.judge is not None
        torch.manual_seed(0)
        step.judge = Judge(CONFIG, "cpu", 1, 0.3)
        return step.sampled(true, own, 0.0, usual, torch.Generator().manual_seed(3))

    own = true.frames.clone()
    own[-1] = 255 - own[-1]
    plain, other = told(true.frames), told(own)
    assert float(plain["sampled_error"]) == pytest.approx(float(other["sampled_error"]), rel=1e-5)
    assert float(plain["critic_loss"]) != float(other["critic_loss"])
