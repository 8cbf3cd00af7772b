"""How much of the queries' energy lies in their first directions (arXiv 2609.26425, figure 4).

    steadykv capture --frames 24 --out walk.safetensors
    python -m benchmarks.query_energy walk.safetensors --csv rows.csv

The second moment of the queries seen before the last captured span of each layer: the share of its
trace in its r largest eigenvalues, the mean over batch rows and heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from steadykv.capture import CaptureFile, open_capture
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv

RANKS = (1, 2, 4, 8, 16, 32)


def energy_shares(moment: torch.Tensor) -> torch.Tensor:
    """Cumulated shares of the eigenvalues of moments [..., D, D], descending: FP64 [..., D]."""
    values = torch.linalg.eigvalsh(moment.double()).flip(-1).clamp(min=0)
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def measure(file: CaptureFile) -> list[dict[str, Any]]:
    """A row for each layer; ranks above D are left out."""
    rows = []
    for layer in file.layers:
        span = file.load((layer, file.spans[-1]))
        if span.moment is None:
            raise SystemExit(
                "the file holds no query statistics; make one with steadykv capture --queries 1"
            )
        shares = energy_shares(span.moment.moment).flatten(0, -2).mean(0)
        row = {f"rank_{r}": float(shares[r - 1]) for r in RANKS if r <= len(shares)}
        rows.append({"layer": layer, "span": span.span, **row, **environment("cpu")})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    rows = measure(open_capture(options.file))
    names = [name for name in rows[0] if name.startswith("rank_")]
    print("layer  " + "".join(f"{name.replace('_', ' '):>10}" for name in names))
    for row in rows:
        print(f"{row['layer']:<7}" + "".join(f"{row[name]:>10.3f}" for name in names))
    if options.csv is not None:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
