"""Turn a training checkpoint into the shipped file.

    python training/export.py --weights /tmp/run/average.safetensors \\
        --out src/steadykv/world/assets/world.safetensors

Matrices become 8-bit rows with scales; configuration and notes go into the header. With
`--to-resume` the file is a checkpoint in BF16 instead, half as large, for `train.py --resume`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from checkpoint import read_checkpoint
from safetensors.torch import save_file

from steadykv.world.weights import save_world


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to-resume", action="store_true", help="a BF16 checkpoint instead")
    arguments = parser.parse_args()
    config, state = read_checkpoint(arguments.weights)
    if arguments.to_resume:
        halves = {
            name: tensor if name.startswith("tokenizer.") else tensor.to(torch.bfloat16)
            for name, tensor in state.items()
        }
        save_file(halves, arguments.out, {"config": json.dumps(config.to_dict())})
        print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.2f} MB, to resume from")
        return
    size = save_world(arguments.out, config, state, {"trained": "see training/README.md"})
    print(f"{arguments.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
