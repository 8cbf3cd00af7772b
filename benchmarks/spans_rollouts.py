"""Rollouts of an embedded world by span length and batch: seconds a frame, bytes and bits."""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import product
from statistics import median
from typing import NamedTuple

from steadykv.config import CacheConfig, CachePolicy
from steadykv.errors import ConfigError
from steadykv.evaluation.protocol import Protocol, first_packed_frame
from steadykv.evaluation.rollouts import BatchCost, run_batch
from steadykv.world import Episodes, WorldConfig, WorldModel

from .encode_cpu import spread
from .layer_work import Row, attempt

REFERENCE = "bf16"
FACTS = (
    "seconds", "seconds_p20", "seconds_p80", "seconds_per_frame", "over_bf16", "resident_bytes",
    "resident_bytes_mean", "peak_bytes", "resident_over_bf16", "resident_mean_over_bf16",
    "bits_per_element", "bits_per_element_mean",
)  # fmt: skip

Costs = dict[str, list[BatchCost]]


def configurations(
    shape: WorldConfig, span_chunks: int, given: argparse.Namespace
) -> dict[str, CacheConfig]:
    """As `steadykv compare` makes them, BF16 first."""
    policy = CachePolicy(
        span_chunks=span_chunks, window_frames=shape.window_frames, sink_frames=shape.sink_frames
    )
    methods = tuple(dict.fromkeys((REFERENCE, *given.methods)))
    protocol = Protocol(methods, policy=policy, centroids=given.rollout_centroids, shift=None)
    return protocol.configurations()


def rows_of_batch(walks: Episodes, batch: int) -> tuple[Episodes, list[int]]:
    """As many walks, and their seeds: a walk comes again with another seed."""
    seeds = [number // len(walks) for number in range(batch)]
    return walks.select([number % len(walks) for number in range(batch)]), seeds


class Counted(NamedTuple):
    """What means over time are taken over: ends of chunks from that frame on, so many."""

    first: int
    ends: int


def counted_in(shape: WorldConfig, true_frames: int, given: argparse.Namespace) -> Counted:
    """From where on every method has packed at every span length, the same for all of them.

    Raises ConfigError where a rollout ends before a chunk has read what is packed.
    """
    size = shape.chunk_frames
    first = max(
        first_packed_frame(config.policy, size)
        for span in given.rollout_spans
        for config in configurations(shape, span, given).values()
    )
    if true_frames + given.chunks * size <= first:
        needed = (first - true_frames) // size + 1
        raise ConfigError(
            f"--chunks is {given.chunks}: expected {needed} or more, as no earlier one reads what "
            "the longest span has packed"
        )
    ends = sum(true_frames + done * size >= first for done in range(1, given.chunks + 1))
    return Counted(first, ends)


def measure(world: WorldModel, name: str, walks: Episodes, given: argparse.Namespace) -> list[Row]:
    """A row for each method, batch and span length."""
    counted = counted_in(world.config, walks.frames.shape[1], given)
    rows: list[Row] = []
    for batch, span in product(given.rollout_batches, given.rollout_spans):
        configs = configurations(world.config, span, given)
        costs = in_turns(world, walks, batch, configs, counted.first, given)
        rows += cell_rows(world.config, name, batch, configs, costs, counted, given)
        print(f"rollouts: batch {batch}, spans of {span} chunks", flush=True)
    return rows


def in_turns(
    world: WorldModel,
    walks: Episodes,
    batch: int,
    configs: dict[str, CacheConfig],
    first: int,
    given: argparse.Namespace,
) -> Costs:
    """Costs of every round by method; a method that does not fit into memory is left out."""
    device = next(world.parameters()).device
    chosen, seeds = rows_of_batch(walks, batch)
    costs: Costs = defaultdict(list)
    fitting = dict(configs)
    for number in range(given.rollout_rounds + 1):
        for method, config in list(fitting.items()):
            # The first round loads and compiles: until what is packed has been read.
            chunks = given.chunks if number else config.policy.span_chunks

            def run(config: CacheConfig = config, chunks: int = chunks) -> BatchCost:
                return run_batch(
                    world, chosen, seeds, config,
                    frames=chunks * world.config.chunk_frames,
                    first_packed_frame=first,
                )[1]  # fmt: skip

            cost = attempt(run, device)
            if cost is None:
                del fitting[method]
                costs.pop(method, None)
            elif number:
                costs[method].append(cost)
    return costs


def cell_rows(
    shape: WorldConfig,
    name: str,
    batch: int,
    configs: dict[str, CacheConfig],
    costs: Costs,
    counted: Counted,
    given: argparse.Namespace,
) -> list[Row]:
    """Bytes are those of the whole batch; a frame is one of one walk."""
    frames = given.chunks * shape.chunk_frames
    reference = costs.get(REFERENCE)
    rows = []
    for method, config in configs.items():
        row: Row = {
            "work": "rollout", "method": method, "world": name, "batch": batch,
            "span_chunks": config.policy.span_chunks, "window_frames": shape.window_frames,
            "generated": frames, "counted_from": counted.first,
            "centroids": given.rollout_centroids, "rounds": given.rollout_rounds, "outcome": "ok",
        }  # fmt: skip
        facts: Row = dict.fromkeys(FACTS)
        if method in costs:
            low, middle, high = spread([cost.seconds for cost in costs[method]])
            cost = costs[method][-1]  # bytes and bits are the same in every round
            facts |= {
                "seconds": middle,
                "seconds_p20": low,
                "seconds_p80": high,
                "seconds_per_frame": middle / (frames * batch),
                "resident_bytes": cost.resident_bytes,
                "resident_bytes_mean": cost.resident_bytes_over_time / counted.ends,
                "peak_bytes": cost.peak_bytes,
                "bits_per_element": cost.bits_per_element,
                "bits_per_element_mean": cost.bits_per_element_mean,
            }
            if reference is not None:
                base = reference[-1]
                facts |= {
                    "over_bf16": middle / median(cost.seconds for cost in reference),
                    "resident_over_bf16": cost.resident_bytes / base.resident_bytes,
                    "resident_mean_over_bf16": cost.resident_bytes_over_time
                    / base.resident_bytes_over_time,
                }
        else:
            row["outcome"] = "out of memory"
        rows.append(row | facts)
    return rows
