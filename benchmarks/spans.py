"""Span length and batch: what they do to bits, bytes and speed, as two tables and rows as CSV.

    python -m benchmarks.spans --csv layer.csv --rollouts-csv rollouts.csv     # a GPU
    python -m benchmarks.spans --tables layer --methods qvg4 --spans 1 2 4 --batches 1 8
    python -m benchmarks.spans --tables rollouts --world rooms --chunks 11
    python -m benchmarks.spans --device cpu --tiny                             # whether it runs

layer: keys and values of one layer of Wan 1.3B (12 heads of 128, 1,560 tokens a latent frame, three
frames a chunk), 256 centroids. encode: one span of the batch, from BF16 and with query statistics
where the method uses any. decode: a window of as many whole spans as 21 frames hold (21 frames with
spans of one chunk, 18 with spans of 2, 3 and 6) into dense BF16, its newest spans refined as a
cache holds them. The same method at batch 1 and spans of one chunk, and a device copy of the dense
BF16 window, take turns with every cell; ratios of medians are to these, a token of one row.

rollouts: a shipped world, walks of a few chunks, 32 centroids; BF16 takes turns with the methods at
the same batch and span length. Bytes are the ledger's, at the end and in the mean over the chunk
ends at which every span length has packed, so that chunks that wait for their span count with
their share; with the default of 5 generated chunks, 6 in all, none waits at the end.

Published on spans: QVG's overhead in the pipeline of Self-Forcing is 1.3, 2.0 and 3.3 % with spans
of 37,440, 18,720 and 9,360 tokens (arXiv 2602.02958). The layer here is not set against a pipeline.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from steadykv.cli.session import network_dtype
from steadykv.errors import ConfigError
from steadykv.evaluation.bench import machine_facts
from steadykv.world import load_episodes, load_world
from steadykv.world.shipped import WORLDS

from . import spans_layer, spans_rollouts
from .encode_cpu import append
from .layer_work import Row
from .spans_table import layer_table, rollouts_table

METHODS = ("qvg", "quantwm", "steady")
TABLES = ("layer", "rollouts")


def rollouts(given: argparse.Namespace, device: torch.device) -> list[Row]:
    """Rows of a shipped world, or of the tests' tiny one."""
    if given.tiny:
        from tests.worlds import tiny_episodes, tiny_world

        world, walks = tiny_world().to(device), tiny_episodes(2)
        return spans_rollouts.measure(world, "tiny", walks, given)
    world = load_world(given.world, device=device, dtype=network_dtype(device))
    return spans_rollouts.measure(world, given.world, load_episodes(path=given.world), given)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and appends the rows of each as soon as it is there."""
    parser = options()
    given = parser.parse_args(arguments)
    check(parser, given)
    device = torch.empty(0, device=given.device).device  # with its number
    facts = machine_facts(device)
    try:
        if "layer" in given.tables:
            size = spans_layer.TINY if given.tiny else spans_layer.WAN
            rows = [row | facts for row in spans_layer.measure(size, given, device)]
            print(layer_table(rows))
            if given.csv:
                append(given.csv, rows)
        if "rollouts" in given.tables:
            rows = [row | facts for row in rollouts(given, device)]
            print(rollouts_table(rows))
            if given.rollouts_csv:
                append(given.rollouts_csv, rows)
    except ConfigError as error:
        parser.error(str(error))


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tables", nargs="+", default=TABLES, choices=TABLES)
    add("--methods", nargs="+", default=METHODS, metavar="METHOD", help="presets, or keys:values")
    add("--spans", type=int, nargs="+", help="chunks of a span (default: 1 2 3 6)")
    add("--batches", type=int, nargs="+", help="rows of the layer (default: 1 2 4)")
    add("--centroids", type=int, help="of the layer (default: 256)")
    add("--rounds", type=int, default=5, help="of the layer, after one to warm up")
    add("--calls", type=int, default=3, help="that a sample is the mean of")
    add("--world", default="mazes", choices=WORLDS)
    add("--rollout-spans", type=int, nargs="+", help="chunks of a span (default: 1 2 3)")
    add("--rollout-batches", type=int, nargs="+", help="walks at a time (default: 1 8 32)")
    add("--rollout-centroids", type=int, help="of the rollouts (default: 32)")
    add("--rollout-rounds", type=int, default=3, help="after a short one to warm up")
    add("--chunks", type=int, default=5, help="that are generated, after a true one")
    add("--device", default="cuda", help="cuda, cuda:N or cpu")
    add("--tiny", action="store_true", help="a tiny layer and world, to see whether it runs")
    add("--csv", type=Path, help="rows of the layer are added to it")
    add("--rollouts-csv", type=Path, help="rows of the rollouts are added to it")
    return parser


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Fills in what was left out, and refuses what cannot be measured."""
    tiny = given.tiny
    defaults = {
        "spans": [1, 2] if tiny else [1, 2, 3, 6],
        "batches": [1, 2] if tiny else [1, 2, 4],
        "centroids": 8 if tiny else 256,
        "rollout_spans": [1, 2] if tiny else [1, 2, 3],
        "rollout_batches": [1, 2] if tiny else [1, 8, 32],
        "rollout_centroids": 8 if tiny else 32,
    }
    for name, value in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    for name in (*defaults, "rounds", "calls", "rollout_rounds", "chunks"):
        value = getattr(given, name)
        for number in value if isinstance(value, list) else [value]:
            if number < 1:
                parser.error(f"--{name.replace('_', '-')} has {number}: expected 1 or more")
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: expected one, or --device cpu --tiny")


if __name__ == "__main__":
    main()
