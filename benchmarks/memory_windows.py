"""The window that costs a method as many resident bytes as BF16's, found without running either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steadykv.config import CacheConfig
from steadykv.errors import ConfigError
from steadykv.planning.replay import Geometry, Replay
from steadykv.world import WorldConfig

When = Literal["end", "always"]


@dataclass(frozen=True)
class Bytes:
    """Resident bytes of all layers: once the last chunk is committed, and the most of the last
    span's chunks, open or committed."""

    end: int
    always: int

    def at(self, when: When) -> int:
        return self.end if when == "end" else self.always


def planned_bytes(config: CacheConfig, shape: WorldConfig, frames: int, batch: int = 1) -> Bytes:
    """Of `batch` rollouts of `frames` frames in all, as the cache's ledger will count them.

    Raises ConfigError for a policy that the cache refuses too.
    """
    geometry = Geometry(batch, shape.num_heads, shape.head_dim, shape.frame_tokens)
    replay = Replay(geometry, config)
    tokens = shape.chunk_frames * shape.frame_tokens
    moments = [replay.chunk(tokens) for _ in range(frames // shape.chunk_frames)]
    last = [moment.resident for pair in moments[-config.policy.span_chunks :] for moment in pair]
    return Bytes(shape.num_layers * last[-1], shape.num_layers * max(last))


def largest_window(
    config: CacheConfig,
    shape: WorldConfig,
    frames: int,
    budget: int,
    when: When = "end",
    longest: int | None = None,
) -> int:
    """The most frames of whole spans, up to `longest`, whose resident bytes are at most `budget`.

    Looks from the longest window that `frames` can fill downwards, so that bytes need not rise with
    the window. Raises ConfigError where none is cheap enough.
    """
    step = shape.chunk_frames * config.policy.span_chunks
    most = frames if longest is None else min(frames, longest)
    for window in range(most // step * step, 0, -step):
        tried = config.replace(window_frames=window)
        if planned_bytes(tried, shape, frames).at(when) <= budget:
            return window
    raise ConfigError(
        f"{config.name}: got no window of at most {budget:,} bytes; expected a larger budget, or "
        "shorter spans"
    )
