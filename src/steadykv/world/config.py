"""Geometry and sampling defaults of the embedded world model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from steadykv.errors import ConfigError


@dataclass(frozen=True)
class WorldConfig:
    """Shape of the model and how it is sampled; stored beside the weights.

    One latent frame is `frame_tokens` patches of `patch` x `patch` RGB pixels, `channels` numbers
    each; `chunk_frames`
    frames are denoised together; a query attends to at most `window_frames` frames, its own chunk
    included, and to the first `sink_frames` frames for ever. `noise_levels` are the flow times at
    which a chunk is evaluated (0 is pure noise, 1 is clean), one denoising pass each;
    `commit_time` is the time of the frames in the pass that commits them. `view_degrees` is the
    horizontal field of view of a world that is told where its patches look (pose.py), whose columns
    have equal angles; 0 for one that is not. Of a head's dimension, `rope_dims` rotate with frame,
    row and column, and `view_dims`, for such a world alone, with the direction that a patch looks
    in and the place that it is seen from.
    """

    num_layers: int = 8
    num_heads: int = 3
    head_dim: int = 128
    width: int = 512
    hidden_width: int = 1280
    image_height: int = 72
    image_width: int = 96
    patch: int = 6
    channels: int = 64
    chunk_frames: int = 3
    window_frames: int = 21
    sink_frames: int = 0
    num_actions: int = 16
    rope_dims: tuple[int, int, int] = (44, 42, 42)
    rope_theta: float = 100.0
    noise_levels: tuple[float, ...] = (0.0, 0.4, 0.75)
    commit_time: float = 0.9
    view_degrees: float = 0.0
    view_dims: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name != "sink_frames")
            if field.type == "int" and (type(value) is not int or value < least):
                raise ConfigError(
                    f"{field.name}: got {value!r}, expected a whole number of at least {least}"
                )
        times = (*self.noise_levels, self.commit_time)
        if not all(0 <= time <= 1 for time in times) or not 0 < self.rope_theta < math.inf:
            raise ConfigError(
                f"noise_levels, commit_time, rope_theta: got {self.noise_levels}, "
                f"{self.commit_time} and {self.rope_theta}, expected flow times from 0 to 1 and a "
                "base above 0"
            )
        if self.image_height % self.patch or self.image_width % self.patch:
            raise ConfigError(
                f"patch: got {self.patch}, expected a divisor of {self.image_height} and "
                f"{self.image_width}; choose another patch"
            )
        if self.channels > 3 * self.patch**2:
            raise ConfigError(
                f"channels: got {self.channels}, expected at most the {3 * self.patch**2} numbers "
                "of a patch; choose fewer"
            )
        if not 0 <= self.view_degrees <= 360:
            raise ConfigError(
                f"view_degrees: got {self.view_degrees}, expected 0 (not told) to 360; "
                "give the angle that a frame shows"
            )
        shares = (*self.rope_dims, *self.view_dims)
        if (
            len(self.rope_dims) != 3
            or len(self.view_dims) != 2
            or sum(shares) != self.head_dim
            or any(size % 2 or size < 0 for size in shares)
        ):
            raise ConfigError(
                f"rope_dims, view_dims: got {self.rope_dims} and {self.view_dims}, expected three "
                f"and two even sizes that add up to {self.head_dim}"
            )
        if any(self.view_dims) and (not self.view_degrees or self.view_dims[1] % 8):
            raise ConfigError(
                f"view_dims: got {self.view_dims} with view_degrees {self.view_degrees}, expected "
                "a multiple of 8 for the place, and a world that is told where it looks"
            )
        if self.window_frames % self.chunk_frames or self.sink_frames % self.chunk_frames:
            raise ConfigError(
                f"window_frames, sink_frames: got {self.window_frames}, {self.sink_frames}, "
                f"expected multiples of the chunk of {self.chunk_frames} frames"
            )
        if (
            not self.noise_levels
            or self.noise_levels[0] != 0.0
            or list(self.noise_levels) != sorted(set(self.noise_levels))
            or self.noise_levels[-1] >= 1.0
        ):
            raise ConfigError(
                f"noise_levels: got {self.noise_levels}, expected rising times that start at 0 and "
                "stay below 1"
            )

    @property
    def rows(self) -> int:
        """Patches from top to bottom."""
        return self.image_height // self.patch

    @property
    def columns(self) -> int:
        """Patches from left to right."""
        return self.image_width // self.patch

    @property
    def frame_tokens(self) -> int:
        """Tokens of one frame."""
        return self.rows * self.columns

    @property
    def attention_width(self) -> int:
        """Heads times head dimension."""
        return self.num_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the header of the weights file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WorldConfig:
        """The inverse of `to_dict`; an unknown field raises ConfigError."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := set(values) - known:
            raise ConfigError(
                f"world configuration: got unknown {sorted(unknown)}, "
                f"expected some of {sorted(known)}"
            )
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**fields)
