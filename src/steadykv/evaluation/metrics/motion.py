"""Where every pixel of one frame lies in another: block matching over a pyramid, plain PyTorch.

Made for the flicker index: a static pair gives displacements of exactly zero, the match looks at
detail (each plane less its local mean), so that a change of brightness does not pull it aside, and
the same frames always give the same displacements.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LEVELS = 2
"""Halvings: with REACH = 4 pixels at the coarsest level displacements up to 4 * 4 + 3 are found."""
REACH = 4
WINDOW = 5
DETAIL = 9
"""Side of the local mean that is taken off before planes are matched."""
STEP_COST = 0.1
"""Grey levels that a match must gain for every pixel that it lies farther off."""
DAMPING = 4.0
"""Squared grey levels per pixel, on the diagonal of Lucas and Kanade's equations."""


def box_mean(planes: Tensor, side: int) -> Tensor:
    """Mean over ``side`` x ``side`` (odd) around every pixel of [N, H, W], edges repeated."""
    return functional.avg_pool2d(_padded(planes, side // 2)[:, None], side, 1)[:, 0]


def displaced(planes: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
    """``planes`` [N, H, W] read bilinearly at (y + dy, x + dx), all [N, H, W]; edges repeated.

    Whole displacements give the pixels themselves, bit for bit.
    """
    height, width = planes.shape[1:]
    rows, columns = _grid(planes)
    y, x = (rows + dy).clamp(0, height - 1), (columns + dx).clamp(0, width - 1)
    top, left = y.floor().clamp(max=height - 2), x.floor().clamp(max=width - 2)
    index = (top * width + left).long().flatten(1)
    flat = planes.flatten(1)
    a, b, c, d = (
        flat.gather(1, index + offset).view_as(planes) for offset in (0, 1, width, width + 1)
    )
    across, down = x - left, y - top
    return torch.lerp(torch.lerp(a, b, across), torch.lerp(c, d, across), down)


def softened(planes: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
    """``planes`` with as much detail as reading them bilinearly at (dy, dx) would leave, in place.

    Reading between two pixels at fraction f has the response |1 - f + f e^(iw)| =
    sqrt(1 - 2 f (1 - f) (1 - cos w)); the symmetric filter [p, 1 - 2p, p] with p = f (1 - f) / 2
    has 1 - f (1 - f) (1 - cos w), the same to first order and without the shift.
    """
    down, across = ((f - f.floor()) for f in (dy, dx))
    weight_y, weight_x = (f * (1.0 - f) / 2.0 for f in (down, across))
    p = _padded(planes, 1)
    rows = p[:, 1:-1] + _padded(weight_y, 1)[:, 1:-1] * (p[:, :-2] + p[:, 2:] - 2.0 * p[:, 1:-1])
    middle = rows[:, :, 1:-1]
    return middle + weight_x * (rows[:, :, :-2] + rows[:, :, 2:] - 2.0 * middle)


def lies_inside(dy: Tensor, dx: Tensor) -> Tensor:
    """Whether (y + dy, x + dx) lies in the picture: [N, H, W] twice -> bool [N, H, W]."""
    height, width = dy.shape[1:]
    rows, columns = _grid(dy)
    y, x = rows + dy, columns + dx
    return (y >= 0) & (y <= height - 1) & (x >= 0) & (x <= width - 1)


def match(planes: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Displacements (dy, dx), FP32 [N, H, W], at which ``other`` shows what ``planes`` show.

    Both FP32 [N, H, W] in grey levels, H and W at least 16. Sum of absolute differences over
    5 x 5 pixels, coarse to fine, nearer places first; then two steps of Lucas and Kanade (1981) for
    the fraction. Allocates about 30 planes.
    """
    pyramid = [(planes, other)]
    for _ in range(LEVELS):
        pyramid.append((_halved(pyramid[-1][0]), _halved(pyramid[-1][1])))
    details = [(a - box_mean(a, DETAIL), b - box_mean(b, DETAIL)) for a, b in pyramid]
    dy = torch.zeros(details[-1][0].shape, dtype=torch.long, device=planes.device)
    dx = dy.clone()
    for level in range(LEVELS, -1, -1):
        first, second = details[level]
        if level < LEVELS:
            dy, dx = (2 * _enlarged(d, first.shape[1], first.shape[2]) for d in (dy, dx))
        dy, dx = _search(first, second, dy, dx, REACH if level == LEVELS else 1)
    first, second = details[0]
    return _refined(first, second, dy.float(), dx.float())


def _search(
    first: Tensor, second: Tensor, dy: Tensor, dx: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """The best whole displacements within ``reach`` of (dy, dx), INT64."""
    height, width = first.shape[1:]
    rows, columns = _grid(first)
    flat = second.flatten(1)
    around = range(-reach, reach + 1)
    offsets = sorted(((a, b) for a in around for b in around), key=lambda o: o[0] ** 2 + o[1] ** 2)
    best = torch.full_like(first, torch.inf)
    best_y, best_x = dy, dx
    for a, b in offsets:
        y, x = (rows + dy + a).clamp(0, height - 1), (columns + dx + b).clamp(0, width - 1)
        found = flat.gather(1, (y * width + x).flatten(1)).view_as(first)
        cost = box_mean((found - first).abs_(), WINDOW) + STEP_COST * (a * a + b * b) ** 0.5
        better = cost < best
        best = torch.where(better, cost, best)
        best_y = torch.where(better, dy + a, best_y)
        best_x = torch.where(better, dx + b, best_x)
    return best_y, best_x


def _refined(first: Tensor, second: Tensor, dy: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(2):
        found = displaced(second, dy, dx)
        error = found - first
        p = _padded(found, 1)
        slope_y = (p[:, 2:, 1:-1] - p[:, :-2, 1:-1]) / 2.0
        slope_x = (p[:, 1:-1, 2:] - p[:, 1:-1, :-2]) / 2.0
        yy, xx = (box_mean(s * s, WINDOW) + DAMPING for s in (slope_y, slope_x))
        xy = box_mean(slope_x * slope_y, WINDOW)
        ye, xe = (box_mean(s * error, WINDOW) for s in (slope_y, slope_x))
        determinant = yy * xx - xy * xy
        dy = dy - ((xx * ye - xy * xe) / determinant).clamp(-0.75, 0.75)
        dx = dx - ((yy * xe - xy * ye) / determinant).clamp(-0.75, 0.75)
    return dy, dx


def _grid(planes: Tensor) -> tuple[Tensor, Tensor]:
    height, width = planes.shape[1:]
    rows = torch.arange(height, device=planes.device)[None, :, None]
    return rows, torch.arange(width, device=planes.device)[None, None, :]


def _padded(planes: Tensor, width: int) -> Tensor:
    return functional.pad(planes[:, None], (width,) * 4, mode="replicate")[:, 0]


def _halved(planes: Tensor) -> Tensor:
    return functional.avg_pool2d(planes[:, None], 2)[:, 0]


def _enlarged(displacement: Tensor, height: int, width: int) -> Tensor:
    """Every entry twice along both sides; an odd side repeats its last."""
    rows, columns = (
        (torch.arange(size, device=displacement.device) // 2).clamp(max=given - 1)
        for size, given in zip((height, width), displacement.shape[1:], strict=True)
    )
    return displacement[:, rows][:, :, columns]
