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
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from recipe import Recipe, read_recipe, tiny
from safetensors.torch import save_file
from step import Step
from walks import Walks

from steadykv.world.model import WorldModel
from steadykv.world.weights import read_world


@dataclass(frozen=True)
class Process:
    """This process among the `count` that torchrun started."""

    rank: int
    count: int
    device: str


def optimizers(model: WorldModel, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside the blocks, AdamW for embeddings, head, norms and modulation."""
    matrices = [
        p
        for name, p in model.named_parameters()
        if "blocks" in name and name.endswith("weight") and p.ndim == 2
    ]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda
    )
    return [muon, adamw]


def average_gradients(parameters: Sequence[torch.Tensor], processes: int) -> None:
    """Mean of the gradients over all processes, as one message."""
    if processes == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(piece.view_as(p))


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
        self.parameters = list(model.parameters())
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
        kept = min(0.999, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - kept)
        self.steps += 1
        return norm

    def save(self, out: Path) -> None:
        """The averaged weights under the model's parameter names, never half-written."""
        names = [name for name, _ in self.model.named_parameters()]
        temporary = out / "average.safetensors.part"
        header = {"config": json.dumps(self.model.config.to_dict())}
        save_file(dict(zip(names, self.average, strict=True)), temporary, header)
        temporary.rename(out / "average.safetensors")


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
    """What the first process prints, logs every ten seconds and saves every minute."""

    def __init__(self, out: Path, learner: Learner, walks: Walks, clock: Clock):
        self.out, self.learner, self.walks, self.clock = out, learner, walks, clock
        self.logged = self.saved = time.time()
        self.losses: list[torch.Tensor] = []

    def note(self, frames: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """One step on sequences of `frames` frames is done."""
        self.losses.append(loss)
        if time.time() - self.logged > 10:
            row = {
                "step": self.learner.steps,
                "seconds": round(self.clock.elapsed()),
                "frames": frames,
                "loss": round(torch.stack(self.losses).mean().item(), 4),
                "gradient_norm": round(norm.item(), 3),
                "walks": len(self.walks.spans),
            }
            print("train:", json.dumps(row), flush=True)
            with (self.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            self.logged, self.losses = time.time(), []
        if time.time() - self.saved > 60:
            self.learner.save(self.out)
            self.saved = time.time()

    def close(self) -> None:
        """Save the final weights and mark the run as done."""
        self.learner.save(self.out)
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
    parser.add_argument("--resume", type=Path, help="exported weights to start from")
    parser.add_argument("--enough", type=int, default=200, help="walks to wait for")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a small model, uncompiled: a check of the script on a CPU",
    )
    return parser.parse_args()


def start_process(device: str) -> Process:
    """Join the other processes, if there are any; "cuda" becomes this process's own device."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if count > 1:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
    return Process(rank, count, f"cuda:{rank}" if device == "cuda" else device)


def build_model(recipe: Recipe, resume: Path | None, device: str) -> WorldModel:
    """New or earlier weights, on `device`."""
    model = WorldModel(recipe.world).to(device)
    if resume:
        model.load_state_dict(read_world(resume)[1])
    return model


def train(
    learner: Learner,
    steps: list[Step],
    walks: Walks,
    clock: Clock,
    journal: Journal | None,
    generator: torch.Generator,
    rng: np.random.Generator,
) -> None:
    """Step after step until the time is over."""
    model = learner.model
    while (progress := clock.read(learner.steps)) < 1:
        step = next(step for step in steps if progress < step.phase.until)
        frames, actions = walks.sample(step.phase.batch, step.phase.frames, rng)
        loss = step(model.normalise(frames), actions, generator)
        norm = learner.update(progress)
        if journal is not None:
            journal.note(step.phase.frames, loss, norm)


def main() -> None:
    arguments = parse_arguments()
    process = start_process(arguments.device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    recipe = read_recipe(arguments.recipe)
    if arguments.tiny:
        recipe = tiny(recipe)
    model = build_model(recipe, arguments.resume, process.device)
    learner = Learner(model, recipe.rate, arguments.resume is not None, process.count)
    generator = torch.Generator(process.device).manual_seed(1 + process.rank)
    rng = np.random.default_rng(1 + process.rank)
    arguments.out.mkdir(parents=True, exist_ok=True)

    walks = Walks(arguments.walks, process.device, arguments.capacity, recipe.world)
    compiled = not arguments.tiny
    steps = [Step(model, recipe, phase, process.device, compiled) for phase in recipe.phases]
    began = time.time()
    for step in steps:  # compile every graph while the walks are still being recorded
        step.compile(generator)
    walks.wait(arguments.enough)

    is_first = process.rank == 0
    if is_first:
        print(
            f"train: {sum(p.numel() for p in learner.parameters) / 1e6:.1f} M parameters, "
            f"compiled and {len(walks.spans)} walks loaded after {time.time() - began:.0f} s",
            flush=True,
        )
    clock = Clock(arguments.seconds, process)
    journal = Journal(arguments.out, learner, walks, clock) if is_first else None
    train(learner, steps, walks, clock, journal, generator, rng)
    if journal is not None:
        journal.close()
    if process.count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
