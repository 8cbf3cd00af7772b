"""Learned perceptual distance (LPIPS v0.1, AlexNet) of uint8 video, by frame.

Zhang, Isola, Efros, Shechtman, Wang: The Unreasonable Effectiveness of Deep Features as a
Perceptual Metric, 2018, equation 1. Weights are shipped (NOTICE names their authors) and made by
training/lpips_weights.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from steadykv.errors import ConfigError, PayloadError, ShapeError
from steadykv.evaluation.metrics.frames import Frames, check_sides, frame_pair
from steadykv.ops.precision import full_precision

FORMAT = "steadykv-lpips-alexnet-1"


class Layer(NamedTuple):
    """A convolution of AlexNet with its ReLU, and whether 3 x 3 max pooling comes before it."""

    inputs: int
    channels: int
    size: int
    stride: int
    padding: int
    pooled: bool


LAYERS = (
    Layer(3, 64, 11, 4, 2, pooled=False),
    Layer(64, 192, 5, 1, 2, pooled=True),
    Layer(192, 384, 3, 1, 1, pooled=True),
    Layer(384, 256, 3, 1, 1, pooled=False),
    Layer(256, 256, 3, 1, 1, pooled=False),
)
# Of inputs in -1 .. 1: the published library's ScalingLayer.
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
EPSILON = 1e-10
SMALLEST = 31
"""Shortest side that leaves a pixel after both poolings."""
PIXELS_AT_ONCE = 2 * 1280 * 720
"""Frames beyond this many pixels go one by one: a batch gains nothing there and costs memory."""


@cache
def _weights(device: torch.device) -> dict[str, torch.Tensor]:
    """The shipped tensors in FP32 on ``device``; read once. Raises PayloadError."""
    file = resources.files("steadykv.evaluation.metrics") / "weights" / "lpips-alexnet.safetensors"
    with resources.as_file(file) as path:
        try:
            with safe_open(path, framework="pt") as opened:
                header = opened.metadata() or {}
                names = opened.keys()
                tensors = {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise PayloadError(
                f"{path}: got no readable safetensors file ({error}); expected LPIPS weights: "
                "install steadykv again"
            ) from error
    if header.get("format") != FORMAT:
        raise PayloadError(
            f"{file}: got format {header.get('format')!r}, expected {FORMAT!r}; "
            "make it with training/lpips_weights.py"
        )
    return {name: tensor.float().to(device) for name, tensor in tensors.items()}


@contextmanager
def _full_convolutions(device: torch.device) -> Iterator[None]:
    """Inside, FP32 convolutions are FP32: torch's default on CUDA is TF32."""
    backend = torch.backends.cudnn if device.type == "cuda" else torch.backends.mkldnn
    convolutions = backend.conv
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


class LPIPS:
    """The network with its shipped weights on one device.

    ``model(a, b)`` takes uint8 [N, H, W, 3] twice and returns FP64 [N], 0 (equal) upwards; equal
    frames give exactly 0, and neither argument is preferred. FP32 throughout, also on CUDA (no
    TF32). Allocates about 80 bytes per pixel of all 2 N frames.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        tensors = _weights(self.device)
        self._convolutions = [
            (
                tensors[f"conv{index}.weight"].contiguous(memory_format=torch.channels_last),
                tensors[f"conv{index}.bias"],
            )
            for index in range(len(LAYERS))
        ]
        self._heads = [tensors[f"head{index}"] for index in range(len(LAYERS))]
        scale = torch.tensor(SCALE, device=self.device)
        self._factor = 1.0 / (127.5 * scale)
        self._offset = (1.0 + torch.tensor(SHIFT, device=self.device)) / scale

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Distances FP64 [N] of frames uint8 [N, H, W, 3]. Raises ShapeError, NonFiniteError."""
        first, second, batched = frame_pair(a, b)
        if batched:
            raise ShapeError(
                f"frames have shape {tuple(a.shape)}; expected [N, H, W, 3]: "
                "use lpips_by_frame for batches of videos"
            )
        check_sides(first, SMALLEST, "LPIPS")
        with full_precision(self.device), _full_convolutions(self.device):
            return self._distance(first[0].to(self.device), second[0].to(self.device))

    def _distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # The two go through the network layer by layer, side by side and in equal calls: one
        # layer's features are alive at a time, and equal frames get equal bits.
        x, y = (self._scaled(frames) for frames in (a, b))
        total = torch.zeros(len(a), dtype=torch.float64, device=self.device)
        for layer, (weight, bias), head in zip(
            LAYERS, self._convolutions, self._heads, strict=True
        ):
            if layer.pooled:
                x, y = (functional.max_pool2d(z, 3, 2) for z in (x, y))
            x, y = (
                functional.conv2d(z, weight, bias, layer.stride, layer.padding).relu_()
                for z in (x, y)
            )
            difference = _unit(x).sub_(_unit(y)).square_()
            total += (difference.movedim(1, -1) @ head).flatten(1).mean(dim=1)
        return total

    def _scaled(self, frames: torch.Tensor) -> torch.Tensor:
        """uint8 [N, H, W, 3] -> FP32 [N, 3, H, W], channels last in memory."""
        return frames.float().mul_(self._factor).sub_(self._offset).movedim(-1, 1)


def _unit(features: torch.Tensor) -> torch.Tensor:
    """Features [N, C, H, W] over their length at each place."""
    length = features.square().sum(dim=1, keepdim=True).sqrt_().add_(EPSILON)
    return features / length


@cache
def _shared(device: torch.device) -> LPIPS:
    return LPIPS(device)


def lpips_by_frame(
    reference: Frames, video: Frames, model: LPIPS | None = None, batch: int = 8
) -> torch.Tensor:
    """LPIPS of each frame, FP64 [T] or [B, T] on the reference's device; equal frames give 0.

    ``reference`` and ``video`` are uint8 [T, H, W, 3] or [B, T, H, W, 3]; no unit, lower is nearer.
    ``model`` is a loaded :class:`LPIPS`; None loads the shipped weights once for the reference's
    device. At most ``batch`` frames go through the network at a time, fewer if they are large
    (two of 1280 x 720), so memory does not grow with the length: see :class:`LPIPS`. Raises
    ConfigError (batch under 1), ShapeError (sizes differ, a side under 31 pixels) or
    NonFiniteError.
    """
    if batch < 1:
        raise ConfigError(f"batch is {batch}; expected 1 frame or more")
    first, second, batched = frame_pair(reference, video)
    network = _shared(first.device) if model is None else model
    videos, count, height, width = first.shape[:4]
    size = max(1, min(batch, PIXELS_AT_ONCE // (height * width)))
    rows = [
        torch.cat(
            [
                network(first[row, at : at + size], second[row, at : at + size])
                for at in range(0, count, size)
            ]
        )
        for row in range(videos)
    ]
    result = torch.stack(rows).to(first.device)
    return result if batched else result[0]
