"""What a model's host lets one choose: a plan of anything else would be of a run that cannot be."""

from __future__ import annotations

from steadykv.errors import ConfigError
from steadykv.planning.catalog import Model

__all__ = ["check_choices"]


def check_choices(
    model: Model, attention: str, window_latents: int | None, sink_latents: int | None
) -> None:
    """ConfigError, which names what the host has, for an attention or a window that it has not.

    window_latents, sink_latents: what was asked for, None where nothing was; 0 is no window.
    """
    if attention not in model.attention_options:
        offered = " or ".join(map(repr, model.attention_options))
        raise ConfigError(
            f"attention is {attention!r}, which attaching to {model.id} does not offer: expected "
            f"{offered}"
        )
    for name, number in (("window_latents", window_latents), ("sink_latents", sink_latents)):
        if number is None:
            continue
        if model.storage == "condition":
            raise ConfigError(
                f"{name} is {number}, but {model.id} has no window, its cache is made from "
                "condition frames: expected condition_frames instead"
            )
        if model.storage == "compressed":
            raise ConfigError(
                f"{name} is {number}, but {model.id} has no window, it attends to all chunks, "
                "older ones in fewer tokens: leave it out"
            )
    if window_latents == 0 and model.needs_window:
        raise ConfigError(
            f"window_latents is 0 (none), but {model.id} does not run without a window: expected a "
            f"number of latent frames, such as its own {model.window_latents}"
        )
