"""A calibration from a capture: all spans and batch rows of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from steadykv.capture.reader import CaptureFile
from steadykv.codecs import Calibration
from steadykv.config import CacheConfig
from steadykv.errors import ConfigError

__all__ = ["calibrate"]

OnLayer = Callable[[int, int, int], None]
"""(layers done, layers in all, number of the next)."""


def calibrate(
    file: CaptureFile,
    config: CacheConfig,
    *,
    device: torch.device | str = "cpu",
    on_layer: OnLayer | None = None,
) -> Calibration:
    """`Calibration.fit` on every layer of `file`, for whichever of its codecs asks for one.

    The result knows the frame of the captured keys, and in `source` the file's name and, of a
    capture, its "model", "layers", "heads" and "rows". Holds one layer of the file at a time, on
    `device`. Raises ConfigError where neither codec asks for a calibration, PayloadError for NaN or
    Inf in the file, and what `Calibration.fit` raises.
    """
    if not config.needs_calibration:
        raise ConfigError(
            f"method {config.name!r} needs no calibration; expected one with levels='calibrated', "
            "such as kvquant_calibrated"
        )
    header = file.header
    source: dict[str, Any] = {"file": file.path.name}
    if header is not None:
        source |= {
            "model": header.model.get("name"),
            "layers": list(header.layers),
            "heads": list(header.heads),
            "rows": list(header.rows),
        }
    return Calibration.fit(
        _tensors(file, config, device, on_layer),
        config,
        key_rope=None if header is None else header.key_rope,
        source=source,
    )


def _tensors(
    file: CaptureFile,
    config: CacheConfig,
    device: torch.device | str,
    on_layer: OnLayer | None,
) -> Iterator[tuple[tuple[int, str], list[torch.Tensor]]]:
    """((layer, tensor), spans), layer by layer."""
    for done, layer in enumerate(file.layers):
        if on_layer is not None:
            on_layer(done, len(file.layers), layer)
        spans = [file.load(cell, device) for cell in file.cells if cell[0] == layer]
        if config.keys.needs_calibration:
            yield (layer, "key"), [span.k for span in spans]
        if config.values.needs_calibration:
            yield (layer, "value"), [span.v for span in spans]
