"""One training step: forward and backward of a phase, compiled once."""

from __future__ import annotations

import itertools

import torch
from losses import (
    ForcedAttention,
    detail_loss,
    draw_history_times,
    draw_times,
    flow_loss,
    predict,
)
from recipe import Phase, Recipe

from steadykv.world.model import WorldModel
from steadykv.world.rope import rope_table


def spread(times: torch.Tensor) -> torch.Tensor:
    """Times [B,F] as factors of frames [B,F,H,W,3]."""
    return times[..., None, None, None]


class Step:
    """One compiled forward and backward of a phase."""

    def __init__(
        self, model: WorldModel, recipe: Recipe, phase: Phase, device: str, compiled: bool
    ):
        self.model, self.config, self.device = model, model.config, device
        self.recipe, self.phase, self.calls = recipe, phase, 0
        attend = ForcedAttention(model.config, phase.frames, device)
        cosine, sine = rope_table(model.config, 0, phase.frames, device)
        table = torch.cat((cosine, cosine)), torch.cat((sine, sine))

        def forward(
            history: torch.Tensor,
            history_times: torch.Tensor,
            noisy: torch.Tensor,
            times: torch.Tensor,
            actions: torch.Tensor,
        ) -> torch.Tensor:
            return predict(model, history, history_times, noisy, times, actions, attend, table)

        self.forward = torch.compile(forward, dynamic=False) if compiled else forward

    def __call__(
        self, clean: torch.Tensor, actions: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """clean normalised [B,F,H,W,3]; adds to the gradients; returns the loss."""
        config, recipe, phase = self.config, self.recipe, self.phase
        batch, frames = phase.batch, phase.frames
        history_times = draw_history_times(
            config, batch, frames, recipe.history_noise, recipe.clean_share, generator
        )
        source = clean
        if phase.own_share:
            source = self._mix_own(clean, history_times, actions, generator)
        history = self._noised(source, history_times, generator)
        self.calls += 1
        if int(self.calls * phase.settle_share) > int((self.calls - 1) * phase.settle_share):
            loss = self._settle(clean, history, history_times, actions, generator)
        else:
            times = draw_times(
                config, batch, frames, phase.grid_share, recipe.time_shift, generator
            )
            noisy = self._noised(clean, times, generator)
            prediction = self._predict(history, history_times, noisy, times, actions)
            loss = flow_loss(prediction, clean, times, config.chunk_frames, recipe.weight_floor)
        loss.backward()
        return loss.detach()

    def _mix_own(
        self,
        clean: torch.Tensor,
        history_times: torch.Tensor,
        actions: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Replace a share of the chunks by what the model predicts for them in one pass."""
        config, phase = self.config, self.phase
        shape = (phase.batch, phase.frames)
        times = draw_times(config, *shape, 1.0, self.recipe.time_shift, generator)
        with torch.no_grad():
            history = self._noised(clean, history_times, generator)
            noisy = self._noised(clean, times, generator)
            guess = self._predict(history, history_times, noisy, times, actions)
        chunks = (phase.batch, phase.frames // config.chunk_frames)
        own = torch.rand(chunks, generator=generator, device=self.device) < phase.own_share
        own = own.repeat_interleave(config.chunk_frames, 1)
        own[:, : config.chunk_frames] = False  # the first chunk of a rollout is true
        return torch.where(spread(own), guess, clean)

    def _settle(
        self,
        clean: torch.Tensor,
        history: torch.Tensor,
        history_times: torch.Tensor,
        actions: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Run the sampler on all chunks at once; squared error and detail of its last pass."""
        levels = self.config.noise_levels
        x = torch.randn(clean.shape, generator=generator, device=self.device)
        times = torch.zeros(clean.shape[:2], device=self.device)
        with torch.no_grad():
            for level, following in itertools.pairwise(levels):
                guess = self._predict(history, history_times, x, times + level, actions)
                x = x + (following - level) / (1 - level) * (guess - x)
        last = self._predict(history, history_times, x, times + levels[-1], actions)
        first = self.config.chunk_frames  # the first chunk is never sampled in use
        last, clean = last[:, first:], clean[:, first:]
        weight = max(1 - levels[-1], self.recipe.weight_floor) ** -2  # as in the velocity error
        detail = self.phase.detail_weight * detail_loss(last, clean)
        return weight * ((last - clean).square().mean() + detail)

    def _noised(
        self, frames: torch.Tensor, times: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Frames on their way from noise, at `times`."""
        noise = torch.randn(frames.shape, generator=generator, device=self.device)
        return spread(times) * frames + (1 - spread(times)) * noise

    def _predict(
        self,
        history: torch.Tensor,
        history_times: torch.Tensor,
        noisy: torch.Tensor,
        times: torch.Tensor,
        actions: torch.Tensor,
    ) -> torch.Tensor:
        with torch.autocast(self.device.split(":")[0], torch.bfloat16):
            return self.forward(history, history_times, noisy, times, actions)

    def compile(self, generator: torch.Generator) -> None:
        """Build the graphs on blank input; the gradients are dropped."""
        config, shape = self.config, (self.phase.batch, self.phase.frames)
        blank = torch.randn(*shape, config.image_height, config.image_width, 3, device=self.device)
        still = torch.zeros(shape, dtype=torch.int64, device=self.device)
        for _ in range(3):
            self(blank, still, generator)
        self.model.zero_grad(set_to_none=True)
