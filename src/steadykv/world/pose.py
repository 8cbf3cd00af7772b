"""Where a walk stands and what its patches look at, reckoned from the buttons alone.

A world whose frames are parts of a panorama (columns of equal angle) is told the direction of every
patch: a view that comes back then has the directions of the frames that showed it, however long
ago. Turning is exact; the place is that of a walker whom nothing stops, and drifts where walls do.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from steadykv.game import FORWARD, LEFT, PATCH_TURN_DEGREES, RIGHT, TICS_PER_FRAME
from steadykv.world.config import WorldConfig
from steadykv.world.rope import apply_rope

THRUST, FRICTION = 25 * 2048 / 65536, 0xE800 / 65536
"""What a tic of walking adds to the speed (map units a tic), and what a tic leaves of it."""

BLOCK = 512  # frames

HARMONICS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24)
"""Of directions, in whole waves a turn; 24 waves have two columns of 7.5 degrees each."""
WAVELENGTHS = (128.0, 256.0, 512.0, 1024.0)
"""Of places, in map units, along each of AXES."""
AXES = (0.0, 45.0, 90.0, 135.0)
FEATURES = 2 * len(HARMONICS) + 2 * len(WAVELENGTHS) * len(AXES)


def walk_poses(actions: torch.Tensor) -> torch.Tensor:
    """Poses FP32 [B,N,3] of the walks with the buttons `actions` [B,N], integers.

    x and y in map units and the heading in degrees, counterclockwise, each counted from a walker
    who stood still at the origin, heading 0, before the first action. In closed form for BLOCK
    frames at a time, in FP64 on the device of `actions`; allocates a few arrays of B x N, and a
    matrix of BLOCK x 2 BLOCK.
    """
    held = actions.long()
    left, right = ((held & bit).ne(0).double() for bit in (LEFT, RIGHT))
    heading = ((left - right) * PATCH_TURN_DEGREES).repeat_interleave(TICS_PER_FRAME, 1).cumsum(1)
    angle = torch.deg2rad(heading)
    push = (held & FORWARD).ne(0).double().repeat_interleave(TICS_PER_FRAME, 1) * THRUST
    pushes = torch.stack((push * angle.cos(), push * angle.sin()), 1)  # [B,2,tics]
    speed = place = pushes.new_zeros(len(held), 2, 1)
    places = []
    for part in pushes.split(BLOCK * TICS_PER_FRAME, -1):
        # A push moves the walker by 1 + f + f^2 + ... until the end of a frame, and so does the
        # speed that it had before.
        tics = torch.arange(part.shape[-1], device=held.device)
        ends = tics[TICS_PER_FRAME - 1 :: TICS_PER_FRAME]
        passed = (ends[:, None] - tics + 1).clamp_min(0).double()
        slid = _summed(ends.double() + 1) * speed
        places.append(place + part @ _summed(passed).T + slid)
        left_of = FRICTION ** (len(tics) - tics).double()
        speed = speed * FRICTION ** len(tics) + (part * left_of).sum(-1, keepdim=True)
        place = places[-1][..., -1:]
    if not places:
        return heading.new_zeros(*held.shape, 3, dtype=torch.float32)
    x, y = torch.cat(places, -1).unbind(1)
    return torch.stack((x, y, heading[:, TICS_PER_FRAME - 1 :: TICS_PER_FRAME]), -1).float()


def _summed(tics: torch.Tensor) -> torch.Tensor:
    """1 + f + f^2 + ..., `tics` terms: how far a speed of 1 goes in so many tics."""
    return (1 - FRICTION**tics) / (1 - FRICTION)


def moved_poses(poses: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same walks [B,N,3] from random origins, so that training sees every place and heading."""
    batch, device = len(poses), poses.device
    draw = torch.rand(batch, 3, 1, generator=generator, device=device)
    turn = 360 * draw[:, 2]
    cosine, sine = torch.deg2rad(turn).cos(), torch.deg2rad(turn).sin()
    x, y, heading = poses.unbind(-1)
    shift = max(WAVELENGTHS) * draw[:, :2]
    return torch.stack(
        (cosine * x - sine * y + shift[:, 0], sine * x + cosine * y + shift[:, 1], heading + turn),
        -1,
    )


class PoseFeatures(nn.Module):
    """Sinusoids of the direction of each column of patches and of the walker's place."""

    def __init__(self, config: WorldConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Linear(FEATURES, config.width, bias=False)

    def forward(self, poses: torch.Tensor) -> torch.Tensor:
        """Poses [B,F,3] -> [B,F,P,W] in the dtype of the weights."""
        poses = poses.float()
        waves = torch.tensor(HARMONICS, device=poses.device, dtype=torch.float32)
        seen = _sinusoids(column_directions(self.config, poses)[..., None] * waves)
        rates = 2 * math.pi / torch.tensor(WAVELENGTHS, device=poses.device)
        stood = _sinusoids((_along_axes(poses)[..., None] * rates).flatten(-2))
        stood = stood[:, :, None].expand(*seen.shape[:3], -1)
        out = self.embed(torch.cat((seen, stood), -1).to(self.embed.weight.dtype))
        return out[:, :, None].expand(-1, -1, self.config.rows, -1, -1).flatten(2, 3)


def column_directions(config: WorldConfig, poses: torch.Tensor) -> torch.Tensor:
    """Radians [B,F,columns] in which the columns of frames with `poses` [B,F,3] look."""
    columns = torch.arange(config.columns, device=poses.device)
    # counterclockwise: the leftmost column looks furthest to the left
    offset = config.view_degrees * (0.5 - (columns + 0.5) / config.columns)
    return torch.deg2rad(poses[..., 2:] + offset)


def _along_axes(poses: torch.Tensor) -> torch.Tensor:
    """How far the places of `poses` [B,F,3] lie along AXES: [B,F,4]."""
    axes = torch.deg2rad(torch.tensor(AXES, device=poses.device))
    return poses[..., :1] * axes.cos() + poses[..., 1:2] * axes.sin()


def view_table(config: WorldConfig, poses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines FP32 [B,S,V/2] for the `view_dims` of the tokens of frames, V in all.

    Like a rotary embedding whose positions are where a patch looks, in whole waves a turn, and
    where it is seen from, in waves of 128 to 1,024 map units along AXES: a query finds the keys
    that look its way from where it stands, in whatever frame they are.
    """
    poses = poses.float()
    direction_pairs, place_pairs = (size // 2 for size in config.view_dims)
    waves = torch.linspace(1, max(HARMONICS), direction_pairs, device=poses.device).round()
    seen = column_directions(config, poses)[..., None] * waves
    span = torch.linspace(0, 1, place_pairs // len(AXES), device=poses.device)
    rates = 2 * math.pi / (min(WAVELENGTHS) * (max(WAVELENGTHS) / min(WAVELENGTHS)) ** span)
    stood = (_along_axes(poses)[..., None] * rates).flatten(-2)
    angles = torch.cat((seen, stood[:, :, None].expand(*seen.shape[:3], -1)), -1)
    angles = angles[:, :, None].expand(-1, -1, config.rows, -1, -1).flatten(1, 3)
    return angles.cos(), angles.sin()


def turned(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [B,S,H,D] with its last channels rotated by `view_table`'s [B,S,V/2]."""
    rest = x.shape[-1] - 2 * table[0].shape[-1]
    return torch.cat((x[..., :rest], apply_rope(x[..., rest:], table)), -1)


def _sinusoids(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((angles.cos(), angles.sin()), -1)
