"""Read what training saves: averaged weights with the model's configuration in the header."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from steadykv.world import WorldConfig, WorldModel, load_world
from steadykv.world.weights import FORMAT


def read_checkpoint(path: Path) -> tuple[WorldConfig, dict[str, torch.Tensor]]:
    """Configuration and FP32 parameters."""
    with safe_open(path, framework="pt") as file:
        config = WorldConfig.from_dict(json.loads(file.metadata()["config"]))
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load_any(path: Path, device: str, dtype: torch.dtype) -> WorldModel:
    """The model of an exported file, known by the format in its header, or of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
    if header.get("format") == FORMAT:
        return load_world(path, device, dtype)
    config, state = read_checkpoint(path)
    world = WorldModel(config)
    world.load_state_dict(state)
    return world.to(device, dtype).eval().requires_grad_(False)
