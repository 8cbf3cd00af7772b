"""Train the embedded world model for a fixed time on one or several GPUs.

    torchrun --standalone --nproc-per-node=2 training/train.py \\
        --recipe training/version2.json --walks /tmp/walks --out /tmp/run --seconds 1100

Model, losses and phases come from a recipe (`--recipe`, a JSON file; recipe.py has its fields).
Muon on the matrices inside the blocks, AdamW on the rest; an exponential moving average of the
weights is what ships. The schedule follows the clock, so that a run ends when it must. `--resume`
starts from earlier weights with a short warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from checkpoint import read_any
from critic import Judge
from own_walks import OwnWalks
from parallel import Process, average_gradients, start_process
from recipe import Recipe, read_recipe, tiny
from safetensors.torch import save_file
from step import Step, build_forward, compile_blocks
from walks import Sequences, Walks

from steadykv.world.model import WorldModel


def trained(model: WorldModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters by name but the tokenizer's, which is fitted once."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def optimizers(model: WorldModel, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside the blocks, AdamW for embeddings, head, norms and modulation."""
    matrices, others = [], []
    for name, p in trained(model):
        inside = "blocks" in name and name.endswith("weight") and p.ndim == 2
        (matrices if inside else others).append(p)
    muon = torch.optim.Muon(
        matrices, lr=rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda
    )
    return [muon, adamw]


def rate_at(progress: float, resumed: bool) -> float:
    """Share of the full learning rate.

    Warm-up over 2 % (8 % after --resume), flat, then linear to zero from half on.
    """
    warm = progress / (0.08 if resumed else 0.02)
    return min(1.0, warm, max(0.0, (1.0 - progress) / 0.5))


class Learner:
    """The model's parameters, their optimizers and their moving average."""

    def __init__(self, model: WorldModel, rate: float, resumed: bool, processes: int):
        self.model, self.rate, self.resumed, self.processes = model, rate, resumed, processes
        self.names, self.parameters = zip(*trained(model), strict=True)
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizers = optimizers(model, rate)
        self.steps = 0

    def update(self, progress: float) -> torch.Tensor:
        """One step with the gradients at hand, which are then dropped; returns their norm."""
        average_gradients(self.parameters, self.processes)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * rate_at(progress, self.resumed)
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        kept = min(0.998, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - kept)
        self.steps += 1
        return norm

    def averaged(self) -> dict[str, torch.Tensor]:
        """The moving average and the tokenizer, by parameter name."""
        tokenizer = self.model.tokenizer.named_parameters(prefix="tokenizer")
        return dict(tokenizer) | dict(zip(self.names, self.average, strict=True))

    def save(self, path: Path) -> None:
        """The averaged weights under the model's parameter names, never half-written."""
        tensors = {name: t.detach().contiguous() for name, t in self.averaged().items()}
        temporary = path.with_suffix(".part")
        header = {"config": json.dumps(self.model.config.to_dict())}
        save_file(tensors, temporary, header)
        temporary.rename(path)


class Clock:
    """The share of the training time that has passed, the same in all processes."""

    def __init__(self, seconds: float, process: Process):
        self.seconds, self.process = seconds, process
        self.began, self.progress = time.time(), 0.0
        self.shared = torch.zeros(1, device=process.device)

    def read(self, steps: int) -> float:
        """Several processes look at the first one's clock every eight steps.

        So they end and change phase at the same step.
        """
        self.shared.fill_(self.elapsed() / self.seconds)
        if self.process.count == 1:
            self.progress = self.shared.item()
        elif steps % 8 == 0:
            dist.broadcast(self.shared, 0)
            self.progress = self.shared.item()
        return self.progress

    def elapsed(self) -> float:
        """Seconds since training began."""
        return time.time() - self.began


class Journal:
    """What the first process prints, logs every ten seconds and saves every minute.

    `keep`: so many of the weights on the way stay, evenly in time, for a learning curve.
    """

    def __init__(self, out: Path, learner: Learner, walks: Walks, clock: Clock, keep: int):
        self.out, self.learner, self.walks, self.clock = out, learner, walks, clock
        self.logged = self.saved = time.time()
        self.keep, self.kept = keep, 0
        self.numbers: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def note(self, frames: int, numbers: dict[str, torch.Tensor], norm: torch.Tensor) -> None:
        """One step on sequences of `frames` frames is done."""
        for name, number in numbers.items():
            self.numbers[name].append(number)
        if time.time() - self.logged > 10:
            row = {
                "step": self.learner.steps,
                "seconds": round(self.clock.elapsed()),
                "frames": frames,
                **{k: round(torch.stack(v).mean().item(), 4) for k, v in self.numbers.items()},
                "gradient_norm": round(norm.item(), 3),
                "walks": len(self.walks.spans),
            }
            print("train:", json.dumps(row), flush=True)
            with (self.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            self.logged = time.time()
            self.numbers.clear()
        if time.time() - self.saved > 60:
            self.learner.save(self.out / "average.safetensors")
            self.saved = time.time()
        if self.clock.progress * (self.keep + 1) >= self.kept + 1:
            self.kept += 1
            self.learner.save(self.out / f"average-{round(self.clock.elapsed()):05d}.safetensors")

    def close(self) -> None:
        """Save the final weights and mark the run as done."""
        self.learner.save(self.out / "average.safetensors")
        steps, seconds = self.learner.steps, self.clock.elapsed()
        print(f"train: {steps} steps in {seconds:.0f} s", flush=True)
        (self.out / "DONE").touch()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--walks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, required=True, help="training time, after compilation"
    )
    parser.add_argument(
        "--capacity", type=int, default=600_000, help="most frames of walks held on the device"
    )
    parser.add_argument(
        "--resume", type=Path, help="weights to start from, of training or exported"
    )
    parser.add_argument("--enough", type=int, default=200, help="walks to wait for")
    parser.add_argument(
        "--keep", type=int, default=0, help="weights on the way that stay, named by their second"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a small model, uncompiled: a check of the script on a CPU",
    )
    return parser.parse_args()


def build_model(recipe: Recipe, resume: Path | None, device: str) -> WorldModel:
    """New or earlier weights, on `device`."""
    model = WorldModel(recipe.world).to(device)
    if resume:
        model.load_state_dict(read_any(resume)[1])
    return model


def fit_tokenizer(model: WorldModel, recipe: Recipe, walks: Walks, process: Process) -> None:
    """Fit it to 2,048 frames of the walks loaded so far; the first process's fit counts."""
    frames = walks.sample(2048, 1, np.random.default_rng(0)).frames
    model.tokenizer.fit(frames.flatten(0, 1), recipe.tokenizer_power, recipe.tokenizer_largest)
    if process.count > 1:
        for parameter in model.tokenizer.parameters():
            dist.broadcast(parameter.data, 0)


def replace_last(sequences: Sequences, by: Sequences) -> None:
    """Put others in the place of the last sequences, as many as `by` has."""
    for part, other in zip(sequences, by, strict=True):
        part[-len(other) :] = other


class Course:
    """The steps of a run, one after another."""

    def __init__(self, learner: Learner, recipe: Recipe, walks: Walks, process: Process):
        self.learner, self.recipe, self.walks = learner, recipe, walks
        model, seed = learner.model, 1000 * recipe.seed + 1 + process.rank
        self.generator = torch.Generator(process.device).manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.judge: Judge | None = None
        self.own: OwnWalks | None = None
        if any(phase.sampled_share for phase in recipe.phases):
            self.judge = Judge(model.config, process.device, process.count, recipe.critic_penalty)
        users = [phase.batch for phase in recipe.phases if phase.own_rows or phase.corrected_rows]
        if users:
            self.own = OwnWalks(model, process.device, 2 * max(users))
        self.sampled = 0  # steps that ran the sampler
        self.usual_norm = torch.ones((), device=process.device)  # of flow steps' gradients
        self.corrected = 0  # steps of the phase at hand that led from own frames back

    def take(self, step: Step, call: int) -> dict[str, torch.Tensor]:
        """Forward and backward of the `call`-th step of its phase; returns what to log."""
        phase, recipe = step.phase, self.recipe
        due = int((call + 1) * phase.sampled_share) > int(call * phase.sampled_share)
        sequences = self.walks.sample(phase.batch, phase.frames, self.rng)
        if not due:
            own = None
            if rows := step.corrected_rows:
                own, true = self._corrected(step, call, rows)
                replace_last(sequences, true)
            return step.flow(sequences, self.generator, own)
        history, own_rows = sequences.frames.clone(), step.own_rows
        if own_rows and self.own is not None:
            if self.sampled % recipe.own_every == 0:
                weights, first = self.learner.averaged(), self.learner.model.config.chunk_frames
                self.own.refresh(weights, self.walks, self.rng, first, recipe.own_frames)
            history[-own_rows:], true = self.own.sample(own_rows, phase.frames, self.rng)
            replace_last(sequences, true)
        # the critic learns alone at first, and is then heard little by little
        weight = phase.critic_weight * min(1.0, max(0.0, self.sampled / 40 - 1))
        self.sampled += 1
        numbers = step.sampled(sequences, history, weight, self.usual_norm, self.generator)
        if weight:
            return numbers
        return numbers | step.flow(sequences, self.generator)

    def note(self, numbers: dict[str, torch.Tensor], norm: torch.Tensor) -> None:
        """A step is done: what its gradient's norm was."""
        if "loss" in numbers:
            self.usual_norm = torch.lerp(self.usual_norm, norm, 0.1)

    def _corrected(self, step: Step, call: int, rows: int) -> tuple[torch.Tensor, Sequences]:
        """Histories that end in the model's own frames, and the true sequences.

        So the model learns to come back from its own errors while it can still know the truth:
        from what it saw before them.
        """
        assert self.own is not None
        if call == 0:
            self.corrected = 0
        if self.corrected % self.recipe.own_every == 0:
            size, length = self.learner.model.config.chunk_frames, step.phase.frames
            most = min(self.recipe.corrected_frames, length - size) // size
            own_frames = size * int(self.rng.integers(1, most + 1))
            weights = self.learner.averaged()
            self.own.refresh(weights, self.walks, self.rng, length - own_frames, own_frames)
        self.corrected += 1
        return self.own.sample(rows, step.phase.frames, self.rng)


def train(course: Course, steps: list[Step], clock: Clock, journal: Journal | None) -> None:
    """Step after step until the time is over."""
    calls = dict.fromkeys(range(len(steps)), 0)
    while (progress := clock.read(course.learner.steps)) < 1:
        number = next(i for i, step in enumerate(steps) if progress < step.phase.until)
        numbers = course.take(steps[number], calls[number])
        calls[number] += 1
        norm = course.learner.update(progress)
        course.note(numbers, norm)
        if journal is not None:
            journal.note(steps[number].phase.frames, numbers, norm)


def main() -> None:
    arguments = parse_arguments()
    process = start_process(arguments.device)
    torch.set_float32_matmul_precision("high")
    recipe = read_recipe(arguments.recipe)
    torch.manual_seed(recipe.seed)
    if arguments.tiny:
        recipe = tiny(recipe)
    model = build_model(recipe, arguments.resume, process.device)
    learner = Learner(model, recipe.rate, arguments.resume is not None, process.count)
    arguments.out.mkdir(parents=True, exist_ok=True)

    walks = Walks(
        arguments.walks,
        process.device,
        arguments.capacity,
        recipe.world,
        recipe.camera_share,
        recipe.returns_share,
    )
    course = Course(learner, recipe, walks, process)
    if not arguments.tiny:
        compile_blocks(model)
    # phases of the same sequences share a mask, and so their graphs
    shapes = {(phase.frames, phase.windows): phase for phase in recipe.phases}
    forwards = {
        shape: build_forward(model, phase, process.device) for shape, phase in shapes.items()
    }
    steps = [
        Step(model, recipe, phase, forwards[phase.frames, phase.windows], course.judge)
        for phase in recipe.phases
    ]
    began = time.time()
    for step in steps:  # compile every graph while the walks are still being recorded
        step.compile(course.generator)
    walks.wait(arguments.enough)
    if not arguments.resume:
        fit_tokenizer(model, recipe, walks, process)

    is_first = process.rank == 0
    if is_first:
        print(
            f"train: {sum(p.numel() for p in learner.parameters) / 1e6:.1f} M parameters, "
            f"compiled and {len(walks.spans)} walks loaded after {time.time() - began:.0f} s",
            flush=True,
        )
    clock = Clock(arguments.seconds, process)
    journal = Journal(arguments.out, learner, walks, clock, arguments.keep) if is_first else None
    train(course, steps, clock, journal)
    if journal is not None:
        journal.close()
    if process.count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
