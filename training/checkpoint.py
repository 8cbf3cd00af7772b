"""Read what training saves: averaged weights with the model's configuration in the header."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from steadykv.world import WorldConfig, WorldModel
from steadykv.world.weights import FORMAT, place, read_world


def read_checkpoint(path: Path) -> tuple[WorldConfig, dict[str, torch.Tensor]]:
    """Configuration and FP32 parameters."""
    with safe_open(path, framework="pt") as file:
        config = WorldConfig.from_dict(json.loads(file.metadata()["config"]))
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_any(path: Path) -> tuple[WorldConfig, dict[str, torch.Tensor]]:
    """The same of an exported file, known by the format in its header, or of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
    return read_world(path)[:2] if header.get("format") == FORMAT else read_checkpoint(path)


def load_any(path: Path, device: str, dtype: torch.dtype) -> WorldModel:
    """The model of either, for inference."""
    config, state = read_any(path)
    world = WorldModel(config)
    world.load_state_dict(state)
    return place(world, device, dtype)
