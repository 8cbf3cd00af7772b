"""Rotary position embedding over (frame, row, column).

Each axis has its own share of the head dimension. What the model itself rotates before (`view_dims`
of its configuration, pose.py) keeps still here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from steadykv.world.config import WorldConfig


def rope_table(
    config: WorldConfig, first_frame: int, frames: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for the tokens of `frames` frames from absolute frame `first_frame` on.

    Returns two FP32 tensors [S, D/2] with S = frames * frame_tokens; the last pairs, those of
    `view_dims`, have angle 0. Angles are formed in FP64, so
    that a position of many thousand frames is as exact as the first one.
    """
    axes = (
        torch.arange(first_frame, first_frame + frames, device=device, dtype=torch.float64),
        torch.arange(config.rows, device=device, dtype=torch.float64),
        torch.arange(config.columns, device=device, dtype=torch.float64),
    )
    angles = []
    for axis, (positions, size) in enumerate(zip(axes, config.rope_dims, strict=True)):
        exponents = torch.arange(0, size, 2, device=device, dtype=torch.float64) / max(size, 1)
        angle = positions[:, None] * config.rope_theta**-exponents
        shape = [1, 1, 1, size // 2]
        shape[axis] = len(positions)
        angles.append(angle.view(shape).expand(frames, config.rows, config.columns, size // 2))
    angles.append(angles[0].new_zeros(*angles[0].shape[:3], sum(config.view_dims) // 2))
    table = torch.cat(angles, dim=-1).reshape(frames * config.frame_tokens, config.head_dim // 2)
    return table.cos().float(), table.sin().float()


def rotation_of(
    config: WorldConfig, device: torch.device | str
) -> Callable[[int, int], torch.Tensor]:
    """Cosines and sines of the tokens start..end, FP32 [2, S, D/2], for any range."""

    def rotation(start: int, end: int) -> torch.Tensor:
        first, last = start // config.frame_tokens, -(-end // config.frame_tokens)
        table = torch.stack(rope_table(config, first, last - first, device))
        offset = first * config.frame_tokens
        return table[:, start - offset : end - offset].contiguous()

    return rotation


def apply_rope(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate pairs (2i, 2i+1) of x [B,S,H,D] in FP32; returns the dtype of x.

    table: cosines and sines [S,D/2], or [B,S,D/2] where rows of the batch differ.
    """
    cosine, sine = (part.unsqueeze(-2) for part in table)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
