"""What packing and reading a layer costs beside `quantwm`: a table, and rows as CSV.

    python -m benchmarks.costs --csv rows.csv                   # from the root of a checkout, a GPU
    python -m benchmarks.costs --methods quantwm qvg4 --shapes wan
    python -m benchmarks.costs --device cpu --tiny              # whether it runs

Keys and values of one layer, spans of three latent chunks, 256 centroids. encode: one span, with
query statistics where the method uses any. window: three spans into dense BF16, in the layout of a
host, of which only the newest is refined, as a cache holds them. newest, older: one of these.
attend: 4,680 queries over such a window without making it dense. The methods take turns, and
`quantwm` is always among them; a time is the median over the rounds, by CUDA events around a few
calls. captured: the same of a CUDA graph of the call, which leaves out what a slow host adds to
short kernels; of decoding only. error: of the keys and values that come back, relative.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from steadykv.cache import KVCache
from steadykv.codecs import QueryMoment
from steadykv.config import CacheConfig, parse_method
from steadykv.errors import ConfigError
from steadykv.evaluation.bench import machine_facts

from .encode_cpu import append, spread
from .layer_work import Call, Pair, Row, has_kernels, in_turns, sample, sample_moment

METHODS = ("qvg", "quantwm", "steady")
BASELINE = "quantwm"
# Heads, tokens of a span, channels: Wan 1.3B, LongCat.
SHAPES = {"wan": (12, 4680, 128), "longcat": (32, 29640, 128)}
TINY = (2, 96, 32)
QUERIES, SPANS = 4680, 3
CALLS, ROUNDS = 3, 9
WORKS = ("encode", "window", "newest", "older", "attend")


class Work(NamedTuple):
    """The calls of one method by `WORKS`, and what is said beside their times."""

    calls: dict[str, Call]
    facts: Row


def attending(config: CacheConfig, k: Tensor, v: Tensor, q: Tensor) -> Call:
    """Of q [1, H, Q, D] over a cache of SPANS packed spans."""
    _, heads, tokens, width = k.shape
    config = config.replace(span_chunks=1, window_frames=SPANS)
    cache = KVCache(1, heads, width, tokens, config, layout="BHSD", device=k.device)
    for number in range(SPANS):
        cache[0].write(k, v, number * tokens)
        cache[0].observe_queries(q)
    cache[0].commit()
    return lambda: cache[0].attend(q)


def works_of(
    config: CacheConfig, k: Tensor, v: Tensor, q: Tensor, moment: QueryMoment, out: Tensor
) -> Work:
    """out: BF16 [2, SPANS, 1, S, H, D] for what is decoded."""

    def packed() -> Pair:
        return Pair.packed(config, k, v, moment)

    newest = packed()
    spans = [packed().unrefined() for _ in range(SPANS - 1)] + [newest]

    def window() -> None:
        for number, span in enumerate(spans):
            span.decode(out[:, number])

    calls: dict[str, Call] = {
        "encode": packed,
        "window": window,
        "newest": lambda: newest.decode(out[:, 0]),
        "older": lambda: spans[0].decode(out[:, 0]),
        "attend": attending(config, k, v, q),
    }
    window()
    dense = torch.stack((k, v)).transpose(2, 3).float()
    errors = {
        name: float((out[:, number].float() - dense).norm() / dense.norm())
        for name, number in (("newest", SPANS - 1), ("older", 0))
    }
    facts = {
        "kernels": has_kernels(config, k.device),
        "bits_newest": newest.bits_per_element,
        "bits_older": spans[0].bits_per_element,
        **{f"error_{name}": error for name, error in errors.items()},
        "keys": json.dumps(config.keys.to_dict()),
        "values": json.dumps(config.values.to_dict()),
    }
    return Work(calls, facts)


def measure(
    name: str, shape: tuple[int, int, int], given: argparse.Namespace, device: torch.device
) -> list[Row]:
    """A row for each method and work at one shape."""
    heads, tokens, width = shape
    rng = torch.Generator(device).manual_seed(0)
    k, v = (sample(*shape, rng) for _ in range(2))
    moment = sample_moment(1, heads, min(QUERIES, tokens), width, rng)
    q = sample(heads, min(QUERIES, tokens), width, rng)
    out = torch.empty(2, SPANS, 1, tokens, heads, width, dtype=torch.bfloat16, device=device)
    methods = list(dict.fromkeys([*given.methods, BASELINE]))
    changes = {"centroids": 8} if given.tiny else {}
    works = {
        method: works_of(parse_method(method, **changes), k, v, q, moment, out)
        for method in methods
    }
    turns = {method: works[method].calls for method in methods}
    times = in_turns(turns, given.rounds, given.calls, device, capture=WORKS[1:4])
    rows = []
    for work in works[BASELINE].calls:
        baseline = spread(times[BASELINE, work])[1]
        for method in methods:
            low, middle, high = spread(times[method, work])
            rows.append(
                {
                    "work": work,
                    "method": method,
                    "shape": name,
                    "heads": heads,
                    "tokens": tokens,
                    "head_dim": width,
                    "spans": SPANS if work.startswith(("window", "attend")) else 1,
                    "rounds": given.rounds,
                    "calls": given.calls,
                    "seconds": middle,
                    "seconds_p20": low,
                    "seconds_p80": high,
                    "baseline": BASELINE,
                    "ratio": middle / baseline,
                    **works[method].facts,
                    **machine_facts(device),
                }
            )
    return rows


def table(rows: list[Row]) -> str:
    """A line for each row."""
    lines = [
        f"{'shape':<9}{'work':<18}{'method':<12}{'ms':>10}{'p20–p80':>20}{'× ' + BASELINE:>12}"
        f"{'bits':>8}{'error':>9}  kernels"
    ]
    for row in rows:
        age = "older" if row["work"].startswith(("older", "window", "attend")) else "newest"
        low, high = (f"{1e3 * row[f'seconds_{end}']:.4f}" for end in ("p20", "p80"))
        lines.append(
            f"{row['shape']:<9}{row['work']:<18}{row['method']:<12}{1e3 * row['seconds']:>10.4f}"
            f"{low + '–' + high:>20}{row['ratio']:>12.3f}{row[f'bits_{age}']:>8.3f}"
            f"{row[f'error_{age}']:>9.4f}  {'yes' if row['kernels'] else 'no'}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the table, and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to see whether it runs")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args(arguments)
    for name in ("rounds", "calls"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}: expected 1 or more")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: expected one, or --device cpu --tiny")
    device = torch.device(given.device)
    shapes = {"tiny": TINY} if given.tiny else {name: SHAPES[name] for name in given.shapes}
    rows: list[Row] = []
    try:
        for name, shape in shapes.items():
            rows += measure(name, shape, given, device)
    except ConfigError as error:
        parser.error(str(error))
    print(table(rows))
    if given.csv:
        append(given.csv, rows)


if __name__ == "__main__":
    main()
