"""Keys and values of one layer by span length and batch: bits, bytes, and seconds a token."""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from steadykv.codecs import QueryMoment
from steadykv.config import CacheConfig, parse_method

from .encode_cpu import spread
from .layer_work import (
    Call,
    Pair,
    Row,
    attempt,
    captured_name,
    has_kernels,
    in_turns,
    sample,
    sample_moment,
)

WORKS = ("encode", "decode")
COPY = "copy"
QUERIES = 4680


class Size(NamedTuple):
    """A layer and its window. frames: of a chunk, and of the window, which whole spans fill."""

    name: str
    heads: int
    frame_tokens: int
    head_dim: int
    chunk_frames: int
    window_frames: int


WAN = Size("wan", 12, 1560, 128, 3, 21)
TINY = Size("tiny", 2, 16, 32, 3, 21)


class Cell(NamedTuple):
    """Rows of the batch, and chunks of a span."""

    batch: int
    span_chunks: int

    def tokens(self, size: Size) -> int:
        """Of a span of one row."""
        return self.span_chunks * size.chunk_frames * size.frame_tokens

    def spans(self, size: Size) -> int:
        """As many as fit the window; at least one."""
        return max(1, size.window_frames // (self.span_chunks * size.chunk_frames))


FIRST = Cell(1, 1)


class Dense(NamedTuple):
    """What the methods of a cell share. k, v: BF16 [B, H, S, D]; out: BF16 [2, W, B, S, H, D]."""

    k: Tensor
    v: Tensor
    moment: QueryMoment
    out: Tensor


class Work(NamedTuple):
    """The calls of one method by `WORKS`, and what is known without a clock."""

    calls: dict[str, Call]
    facts: Row


class Prepared(NamedTuple):
    """All of a cell but its times. works: of the methods that fit into memory."""

    works: dict[str, Work]
    copy: Call


def dense_of(size: Size, cell: Cell, device: torch.device) -> Dense:
    """Random tokens, the same for the same cell."""
    rng = torch.Generator(device).manual_seed(0)
    tokens, rows = cell.tokens(size), cell.batch * size.heads
    k, v = (
        sample(rows, tokens, size.head_dim, rng).view(cell.batch, size.heads, tokens, -1)
        for _ in range(2)
    )
    moment = sample_moment(cell.batch, size.heads, min(QUERIES, tokens), size.head_dim, rng)
    shape = (2, cell.spans(size), cell.batch, tokens, size.heads, size.head_dim)
    return Dense(k, v, moment, torch.empty(shape, dtype=torch.bfloat16, device=device))


def work_of(config: CacheConfig, dense: Dense) -> Work:
    """Every span of the window has the same tokens, in memory of its own."""

    def packed() -> Pair:
        return Pair.packed(config, dense.k, dense.v, dense.moment)

    count = dense.out.shape[1]
    refined = min(count, config.policy.refined_spans)
    newest = packed()
    window = [packed().unrefined() for _ in range(count - refined)]
    window += [packed() for _ in range(refined - 1)] + [newest] * (refined > 0)

    def decode() -> None:
        for number, span in enumerate(window):
            span.decode(dense.out[:, number])

    nbytes = sum(span.nbytes for span in window)
    facts = {
        "bits_newest": (newest if refined else newest.unrefined()).bits_per_element,
        "bits_older": newest.unrefined().bits_per_element,
        "bits_window": 8 * nbytes / dense.out.numel(),
        "window_bytes": nbytes,
        "bf16_bytes": dense.out.nbytes,
        "kernels": has_kernels(config, dense.k.device),
        "keys": json.dumps(config.keys.to_dict()),
        "values": json.dumps(config.values.to_dict()),
    }
    return Work({"encode": packed, "decode": decode}, facts)


def prepared(
    configs: dict[str, CacheConfig], size: Size, cell: Cell, device: torch.device
) -> Prepared | None:
    """None where not even the BF16 window fits into memory, twice."""

    def dense_and_source() -> tuple[Dense, Tensor]:
        dense = dense_of(size, cell, device)
        span = torch.stack((dense.k, dense.v)).transpose(2, 3)
        return dense, torch.empty_like(dense.out).copy_(span.unsqueeze(1))

    made = attempt(dense_and_source, device)
    if made is None:
        return None
    dense, source = made
    works = {}
    for method, config in configs.items():
        work = attempt(partial(work_of, config, dense), device)
        if work is not None:
            works[method] = work
    return Prepared(works, lambda: dense.out.copy_(source))


def measure(size: Size, given: argparse.Namespace, device: torch.device) -> list[Row]:
    """A row for each method, work, batch and span length."""
    configs = {
        method: parse_method(method, centroids=given.centroids)
        for method in dict.fromkeys(given.methods)
    }
    first = prepared(configs, size, FIRST, device)
    rows: list[Row] = []
    for batch, chunks in product(given.batches, given.spans):
        cell = Cell(batch, chunks)
        rows += cell_rows(configs, size, cell, first, given, device)
        print(f"layer: batch {batch}, spans of {chunks} chunks", flush=True)
    return rows


def cell_rows(
    configs: dict[str, CacheConfig],
    size: Size,
    cell: Cell,
    first: Prepared | None,
    given: argparse.Namespace,
    device: torch.device,
) -> list[Row]:
    """All methods of a cell, the same methods in the first cell and a copy take turns."""
    made = first if cell == FIRST else prepared(configs, size, cell, device)
    turns: dict[tuple[str, Cell], dict[str, Call]] = {}
    if made is not None:
        turns = {(method, cell): work.calls for method, work in made.works.items()}
        if first is not None:
            turns |= {
                (method, FIRST): first.works[method].calls
                for method in made.works
                if method in first.works
            }
        turns[COPY, cell] = {COPY: made.copy}
    times = attempt(
        lambda: in_turns(turns, given.rounds, given.calls, device, capture=("decode",)), device
    )
    works = list(WORKS) + [captured_name("decode")] * (device.type == "cuda")
    rows = []
    for method, work in product(configs, works):
        row: Row = {
            "work": work, "method": method, "shape": size.name, "heads": size.heads,
            "head_dim": size.head_dim, "batch": cell.batch, "span_chunks": cell.span_chunks,
            "span_tokens": cell.tokens(size), "spans": cell.spans(size),
            "frames": cell.spans(size) * cell.span_chunks * size.chunk_frames,
            "centroids": given.centroids, "rounds": given.rounds, "calls": given.calls,
            "outcome": "ok",
        }  # fmt: skip
        facts = dict.fromkeys(FACTS)
        if times is None or made is None or method not in made.works:
            row["outcome"] = "out of memory"
        else:
            facts |= made.works[method].facts | timed(times, method, work, cell, size)
        rows.append(row | facts)
    return rows


FACTS = (
    "bits_newest", "bits_older", "bits_window", "window_bytes", "bf16_bytes", "kernels", "keys",
    "values", "seconds", "seconds_p20", "seconds_p80", "seconds_per_token",
    "first_seconds_per_token", "ratio_first", "copy_seconds_per_token", "ratio_copy",
)  # fmt: skip


def timed(
    times: dict[tuple[tuple[str, Cell], str], list[float]],
    method: str,
    work: str,
    cell: Cell,
    size: Size,
) -> Row:
    """A token is one of one row: keys and values of all heads."""

    def tokens(which: Cell, one: str) -> int:
        spans = 1 if one == "encode" else which.spans(size)
        return which.batch * spans * which.tokens(size)

    low, middle, high = spread(times[(method, cell), work])
    own = middle / tokens(cell, work)
    copied = spread(times[(COPY, cell), COPY])[1] / tokens(cell, COPY)
    row: Row = {
        "seconds": middle,
        "seconds_p20": low,
        "seconds_p80": high,
        "seconds_per_token": own,
        "copy_seconds_per_token": copied,
        "ratio_copy": own / copied,
    }
    if ((method, FIRST), work) in times:
        base = spread(times[(method, FIRST), work])[1] / tokens(FIRST, work)
        row |= {"first_seconds_per_token": base, "ratio_first": own / base}
    return row
