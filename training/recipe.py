"""What a training run is made of, read from a JSON file such as `training/version2.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from steadykv.world.config import WorldConfig


@dataclass(frozen=True)
class Phase:
    """One part of the training schedule."""

    until: float  # the share of the time at which it ends
    frames: int  # of a sequence
    batch: int  # sequences a GPU
    grid_share: float = 0.25  # of the flow times that are the sampler's
    sampled_share: float = 0.0  # of the steps that run the whole sampler and judge its last pass
    own_rows: float = 0.0  # of the rows of those steps that continue the model's own rollouts
    critic_weight: float = 0.0  # norm of the critic's gradient, relative to the other steps'
    corrected_rows: float = 0.0  # of the rows of the other steps, which lead from own frames back
    windows: tuple[int, ...] = ()  # frames that each row attends to; empty: the model's window

    def __post_init__(self) -> None:
        if len(self.windows) not in (0, self.batch):
            raise ValueError(
                f"a phase has {len(self.windows)} windows, expected one for each of {self.batch} "
                "rows, or none"
            )
        if self.own_rows and self.corrected_rows:
            raise ValueError("a phase has own_rows and corrected_rows: expected one kind of them")


@dataclass(frozen=True)
class Recording:
    """The walks to learn from; frames have the size of the world's."""

    maps: tuple[str, ...]
    walks: int
    steps: int = 130  # recorded frames of a training walk
    prelude: int = 40  # most frames walked before recording
    held_out_steps: int = 723  # recorded frames of a held-out walk
    turners: float = 0.0  # share of the training files whose walkers turn on the spot (houses)


@dataclass(frozen=True)
class Recipe:
    """Model, losses and schedule of one run; times of the flow are 0 for noise and 1 for clean."""

    world: WorldConfig
    recording: Recording
    phases: tuple[Phase, ...]
    rate: float = 1.5e-3  # peak learning rate
    time_shift: float = 0.0  # centre of the logit-normal flow times
    weight_floor: float = 0.2  # least 1 - t in the weight of the velocity error
    history_noise: float = 0.7  # most noise on a chunk of the history
    clean_share: float = 0.25  # sequences whose history has no noise
    faded_share: float = 0.0  # sequences whose history lost some of its detail
    tokenizer_power: float = 0.5  # see Tokenizer.fit
    tokenizer_largest: float = 1.5  # deviation of the first component, in units of the noise
    critic_penalty: float = 0.3  # see Judge.learn
    own_frames: int = 48  # length of the model's own rollouts
    own_every: int = 60  # steps after which they are made anew
    camera_share: float = 0.0  # sequences told the simulator's poses; others reckon from buttons
    returns_share: float = 0.0  # sequences chosen for the views that come back in them (houses)
    corrected_frames: int = 24  # most own frames at the end of a corrected row
    seed: int = 0  # of the weights, noise, order of walks, and random houses

    def __post_init__(self) -> None:
        if not 0 <= self.camera_share <= 1 or (self.camera_share and not self.world.view_degrees):
            raise ValueError(
                f"a recipe has camera_share {self.camera_share} and view_degrees "
                f"{self.world.view_degrees}: expected 0 to 1, and 0 without view_degrees"
            )
        if not 0 <= self.returns_share <= 1:
            raise ValueError(f"a recipe has returns_share {self.returns_share}: expected 0 to 1")


def read_recipe(path: Path) -> Recipe:
    """Every field of the file must be one of the above; those it leaves out keep their default.

    With `base`, the name of a recipe beside it that has none, they keep that one's; so do the
    fields of `world` and `recording`.
    """
    values = json.loads(path.read_text())
    if base := values.pop("base", None):
        others = json.loads((path.parent / base).read_text())
        if "base" in others:
            raise ValueError(f"{path} has the base {base}, which has one too: expected none there")
        for part in ("world", "recording"):
            values[part] = others[part] | values.get(part, {})
        values = others | values
    world = WorldConfig.from_dict(values.pop("world"))
    recording = values.pop("recording")
    recording = Recording(**recording | {"maps": tuple(recording["maps"])})
    phases = tuple(
        Phase(**phase | {"windows": tuple(phase.get("windows", ()))})
        for phase in values.pop("phases")
    )
    return Recipe(world=world, recording=recording, phases=phases, **values)


def tiny(recipe: Recipe) -> Recipe:
    """The same recipe for a model and a batch that a CPU can train; frames are cropped to fit."""
    size = 4 * recipe.world.patch
    small = {"num_layers": 2, "width": 128, "hidden_width": 128}
    world = dataclasses.replace(recipe.world, image_height=size, image_width=size, **small)
    phases = tuple(
        dataclasses.replace(phase, batch=2, frames=min(phase.frames, 24), windows=phase.windows[:2])
        for phase in recipe.phases
    )
    return dataclasses.replace(recipe, world=world, phases=phases, own_frames=24)
