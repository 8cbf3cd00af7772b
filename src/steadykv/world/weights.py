"""Read and write the model as safetensors.

Matrices are stored in 8-bit rows with one FP16 scale a row, the tokenizer in FP32, the rest in
FP16.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from steadykv.cache.checks import resolve_device
from steadykv.errors import PayloadError
from steadykv.world.config import WorldConfig
from steadykv.world.model import WorldModel
from steadykv.world.shipped import chosen_file

FORMAT = "steadykv-world"
VERSION = 2


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric 8-bit rows: int8 [N,M] and FP16 scales [N] with row = scale * code."""
    scale = (matrix.float().abs().amax(dim=1) / 127).clamp_min(2.0**-24).half()
    codes = (matrix.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes, scale


def save_world(
    path: Path, config: WorldConfig, state: dict[str, torch.Tensor], notes: dict[str, Any]
) -> int:
    """Write `state` (parameters by name) with `config` and `notes` in the header.

    Returns the file's bytes.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.startswith("tokenizer."):
            tensors[name] = tensor.detach().cpu().float().contiguous()
        elif tensor.ndim == 2 and min(tensor.shape) > 16:
            tensors[f"{name}.codes"], tensors[f"{name}.scale"] = quantize_rows(tensor.cpu())
        else:
            tensors[name] = tensor.detach().cpu().half().contiguous()
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "config": json.dumps(config.to_dict()),
        "notes": json.dumps(notes),
    }
    temporary = path.with_name(path.name + ".part")
    save_file(tensors, temporary, metadata=header)
    temporary.rename(path)
    return path.stat().st_size


def read_world(path: Path) -> tuple[WorldConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """Configuration, FP32 parameters and notes of a file made by `save_world`.

    Raises PayloadError for any other file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise PayloadError(
            f"{path}: got no readable safetensors file ({error}); expected world weights"
        ) from error
    if header.get("format") != FORMAT or header.get("version") != str(VERSION):
        raise PayloadError(
            f"{path}: got format {header.get('format')!r} version {header.get('version')!r}, "
            f"expected {FORMAT!r} version {VERSION}; make it with training/export.py"
        )
    try:
        state = _dequantized(tensors)
        config = WorldConfig.from_dict(json.loads(header["config"]))
        notes = json.loads(header["notes"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PayloadError(
            f"{path}: got a damaged header or tensor ({error}), expected world weights; "
            "export them again"
        ) from error
    return config, state, notes


def _dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FP32 parameters: 8-bit rows times their scales, everything else as it is."""
    state = {}
    for name, tensor in tensors.items():
        if name.endswith(".codes"):
            stem = name.removesuffix(".codes")
            state[stem] = tensor.float() * tensors[f"{stem}.scale"].float()[:, None]
        elif not name.endswith(".scale"):
            state[name] = tensor.float()
    return state


def load_world(
    path: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> WorldModel:
    """The shipped model of that name ("mazes", the default, or "rooms") or of a file.

    It is in evaluation mode, lies on `device` and computes in `dtype`. Raises ConfigError for a
    string that is neither a name nor a file, for a world that is not installed and for a device
    that is not there; PayloadError for a file that holds no world weights.
    """
    device = resolve_device(device)
    source = chosen_file(path, "weights")
    with nullcontext(source) if isinstance(source, Path) else resources.as_file(source) as file:
        config, state, _ = read_world(file)
    with torch.device("meta"):
        world = WorldModel(config)
    wanted = {name: parameter.shape for name, parameter in world.named_parameters()}
    wrong = {
        "missing": wanted.keys() - state.keys(),
        "unexpected": state.keys() - wanted.keys(),
        "misshapen": {n for n in wanted.keys() & state.keys() if state[n].shape != wanted[n]},
    }
    found = " and ".join(f"{kind} {sorted(names)[:5]}" for kind, names in wrong.items() if names)
    if found:
        raise PayloadError(
            f"world weights: got {found}, expected exactly the model's parameters; "
            "export them again"
        )
    world.load_state_dict(state, assign=True)
    return place(world, device, dtype)


def place(world: WorldModel, device: torch.device | str, dtype: torch.dtype) -> WorldModel:
    """The same model on `device`, for inference in `dtype`; its tokenizer stays FP32."""
    world.to(device)
    for name, parameter in world.named_parameters():
        if not name.startswith("tokenizer."):
            parameter.data = parameter.data.to(dtype)
    return world.eval().requires_grad_(False)
