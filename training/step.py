"""One training step: forward and backward of a phase, whose blocks are compiled once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from critic import Judge
from losses import ForcedAttention, draw_history_times, draw_times, faded, flow_loss, predict
from recipe import Phase, Recipe
from walks import Sequences

from steadykv.world.model import Attend, Block, Table, WorldModel
from steadykv.world.pose import moved_poses
from steadykv.world.rope import rope_table


def spread(times: torch.Tensor) -> torch.Tensor:
    """Times [B,F] as factors of latents [B,F,P,C]."""
    return times[..., None, None]


Forward = Callable[..., torch.Tensor]  # the arguments of `predict` from `history` to `poses`


def compile_blocks(model: WorldModel, backend: str = "inductor") -> None:
    """Let all blocks share one graph for each kind of sequence.

    A graph of the whole model repeats the block for every layer, which takes several times as long
    to compile.
    """

    @torch.compile(dynamic=False, backend=backend)
    def run(
        block: Block,
        x: torch.Tensor,
        modulation: torch.Tensor,
        attend: Attend,
        table: Table,
        view: Table | None,
    ) -> torch.Tensor:
        # a number of the layer would make a graph for each; ForcedAttention does not look at it
        return Block.forward(block, x, modulation, 0, attend, table, view)

    def of(block: Block) -> Callable[..., torch.Tensor]:
        return lambda x, modulation, _layer, attend, table, view: run(
            block, x, modulation, attend, table, view
        )

    for block in model.blocks:
        assert isinstance(block, Block)
        block.forward = of(block)  # type: ignore[method-assign]


def build_forward(model: WorldModel, phase: Phase, device: str) -> Forward:
    """`predict` for the sequences of a phase."""
    frames = phase.frames
    attend = ForcedAttention(model.config, frames, device, phase.windows)
    cosine, sine = rope_table(model.config, 0, frames, device)
    table = torch.cat((cosine, cosine)), torch.cat((sine, sine))

    def forward(
        history: torch.Tensor,
        history_times: torch.Tensor,
        noisy: torch.Tensor,
        times: torch.Tensor,
        actions: torch.Tensor,
        poses: torch.Tensor,
    ) -> torch.Tensor:
        return predict(model, history, history_times, noisy, times, actions, poses, attend, table)

    return forward


class Step:
    """Forward and backward of a phase."""

    def __init__(
        self, model: WorldModel, recipe: Recipe, phase: Phase, forward: Forward, judge: Judge | None
    ):
        self.model, self.config = model, model.config
        self.device = str(model.head.weight.device)
        self.recipe, self.phase, self.forward, self.judge = recipe, phase, forward, judge

    @property
    def own_rows(self) -> int:
        """Rows of a sampled step that continue the model's own rollouts."""
        return round(self.phase.own_rows * self.phase.batch)

    @property
    def corrected_rows(self) -> int:
        """Rows of a flow step whose history ends in the model's own frames."""
        return round(self.phase.corrected_rows * self.phase.batch)

    def flow(
        self,
        sequences: Sequences,
        generator: torch.Generator,
        own: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """One pass at random flow times; adds to the gradients; returns what to log.

        own, like the frames, is the history of the last rows as the model makes it itself, in the
        form in which a rollout commits it; what is asked for are the true frames there too.
        """
        config, recipe, phase = self.config, self.recipe, self.phase
        frames, actions, told = sequences
        clean = self.model.tokenizer.encode(frames)
        shape = (phase.batch, phase.frames)
        history_times = draw_history_times(
            config, *shape, recipe.history_noise, recipe.clean_share, generator
        )
        times = draw_times(config, *shape, phase.grid_share, recipe.time_shift, generator)
        past = clean
        if recipe.faded_share:
            past = faded(past, config.chunk_frames, recipe.faded_share, generator)
        if own is not None:
            past = torch.cat((past[: -len(own)], self.model.tokenizer.encode(own)))
            history_times[-len(own) :] = config.commit_time
        history = self._noised(past, history_times, generator)
        noisy = self._noised(clean, times, generator)
        poses = moved_poses(told, generator)
        prediction = self._predict(history, history_times, noisy, times, actions, poses)
        loss = flow_loss(prediction, clean, times, config.chunk_frames, recipe.weight_floor)
        loss.backward()
        return {"loss": loss.detach()}

    def sampled(
        self,
        sequences: Sequences,
        own: torch.Tensor,
        critic_weight: float,
        usual_norm: torch.Tensor,
        generator: torch.Generator,
    ) -> dict[str, torch.Tensor]:
        """The whole sampler on all chunks at once; the critic judges its last pass.

        `own` is the history, like the true frames of the sequences, and differs from them in the
        last `own_rows` rows, which have left the true walk. The gradient's norm is
        about `critic_weight` times `usual_norm`, that of the other steps; with weight 0 only the
        critic learns, and the model's gradients are none.
        """
        config, judge = self.config, self.judge
        assert judge is not None
        frames, actions, told = sequences
        clean = self.model.tokenizer.encode(frames)
        times = torch.full(clean.shape[:2], config.commit_time, device=self.device)
        history = self._noised(self.model.tokenizer.encode(own), times, generator)
        last = self._sample(history, times, actions, told, generator)
        first = config.chunk_frames  # the first chunk is never sampled in use

        leaf = last.detach().requires_grad_()
        held = actions[:, first:].unflatten(1, (-1, first)).flatten(0, 1)
        true, made = (x[:, first:].unflatten(1, (-1, first)).flatten(0, 1) for x in (clean, leaf))
        critic_loss = judge.learn(true, made.detach(), held)
        doubt = judge.doubt(true, made, held)
        (push,) = torch.autograd.grad(doubt, leaf)
        last.backward(push)
        slopes = [p.grad for p in self.model.parameters() if p.grad is not None]
        ratio = usual_norm / torch.nn.utils.get_total_norm(slopes).clamp_min(1e-12)
        scale = judge.scale(None if critic_weight else ratio)
        if critic_weight:
            torch._foreach_mul_(slopes, critic_weight * scale)
        else:
            self.model.zero_grad(set_to_none=True)
        true_rows = len(last) - self.own_rows
        error = (leaf - clean)[:true_rows, first:].detach().square().mean()
        return {
            "sampled_error": error,
            "critic_loss": critic_loss,
            "doubt": doubt.detach(),
            "critic_ratio": ratio,
            "critic_scale": critic_weight * scale,
        }

    def _sample(
        self,
        history: torch.Tensor,
        history_times: torch.Tensor,
        actions: torch.Tensor,
        told: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """The sampler's last prediction of all chunks; only that pass is differentiable."""
        levels = self.config.noise_levels
        x = torch.randn(history.shape, generator=generator, device=self.device)
        times = torch.zeros(history.shape[:2], device=self.device)
        poses = moved_poses(told, generator)
        with torch.no_grad():
            for level, following in itertools.pairwise(levels):
                guess = self._predict(history, history_times, x, times + level, actions, poses)
                x = x + (following - level) / (1 - level) * (guess - x)
        return self._predict(history, history_times, x, times + levels[-1], actions, poses)

    def _noised(
        self, latents: torch.Tensor, times: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Latents on their way from noise, at `times`."""
        noise = torch.randn(latents.shape, generator=generator, device=self.device)
        return spread(times) * latents + (1 - spread(times)) * noise

    def _predict(
        self,
        history: torch.Tensor,
        history_times: torch.Tensor,
        noisy: torch.Tensor,
        times: torch.Tensor,
        actions: torch.Tensor,
        poses: torch.Tensor,
    ) -> torch.Tensor:
        with torch.autocast(self.device.split(":")[0], torch.bfloat16):
            return self.forward(history, history_times, noisy, times, actions, poses)

    def compile(self, generator: torch.Generator) -> None:
        """Build the graphs on blank input; the gradients are dropped."""
        config, shape = self.config, (self.phase.batch, self.phase.frames)
        blank = torch.zeros(
            *shape,
            config.image_height,
            config.image_width,
            3,
            dtype=torch.uint8,
            device=self.device,
        )
        still = torch.zeros(shape, dtype=torch.int64, device=self.device)
        nowhere = torch.zeros(*shape, 3, device=self.device)
        for _ in range(2):
            self.flow(Sequences(blank, still, nowhere), generator)
        if self.phase.sampled_share:
            history = torch.zeros(*shape, config.frame_tokens, config.channels, device=self.device)
            with torch.no_grad():
                ones = torch.ones(shape, device=self.device)
                self._sample(history, ones, still, nowhere, generator)
        self.model.zero_grad(set_to_none=True)
