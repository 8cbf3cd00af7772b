"""Turn a training checkpoint into the shipped file.

    python training/export.py --weights /tmp/run/average.safetensors \\
        --out src/steadykv/world/assets/world.safetensors

Matrices become 8-bit rows with scales; configuration and notes go into the header.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpoint import read_checkpoint

from steadykv.world.weights import save_world


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config, state = read_checkpoint(arguments.weights)
    size = save_world(arguments.out, config, state, {"trained": "see training/README.md"})
    print(f"{arguments.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
