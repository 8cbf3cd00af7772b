"""A whole generator around the cache, at real size: seconds a chunk, and the memory it takes.

    python -m benchmarks.closed_loop --csv rows.csv                          # all of 1.3B
    python -m benchmarks.closed_loop --windows 180 --ways ring host attend   # a part of it
    python -m benchmarks.closed_loop --shape 14b --layers 8
    python -m benchmarks.closed_loop --device cpu --tiny                     # whether it runs

The network is `benchmarks/generator.py`. A window is filled with random keys and values, one span
of chunks is generated untimed, and then --chunks more: a sample is a whole span, so that the share
of packing in it is the true one, over its chunks. The baseline is the fastest BF16 of the same run
and window. Memory: the allocator's peak in those chunks, less that of the same forward without any
cache. bound_bytes: packed bytes, the BF16 of open and waiting tokens of all layers, and 192 MiB.
Pinned memory (host) is not given back before the process ends: measure it in one window a process.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from steadykv.cache import Ledger
from steadykv.config import CacheConfig, parse_method
from steadykv.evaluation.bench import machine_facts

from .encode_cpu import append, spread
from .generator import SHAPES, Generator, Shape, chunk_noise, generate_chunk, new_generator
from .loop_caches import PLAIN_WAYS, WAYS, Forgetful, Packed, fill, new_memory

METHODS = ("bf16", "qvg", "quantwm", "steady")
ALLOWANCE = 192 << 20
BOUND_DENSE = ("open", "waiting")
NOT_PACKED = {*BOUND_DENSE, "dense", "query_moment", "counters", "calibration"}
COLUMNS = (
    "work", "method", "way", "shape", "layers", "heads", "window_frames", "chunk_tokens",
    "span_chunks", "chunks", "outcome", "seconds", "seconds_p20", "seconds_p80", "baseline",
    "baseline_seconds", "overhead", "difference", "peak_bytes", "resident_bytes",
    "ledger_peak_bytes", "packed_bytes", "open_waiting_bytes", "bound_bytes", "within_bound",
    "gpu", "torch", "triton", "commit",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class CacheBytes:
    """Of one ledger. bound: what it allows at that moment; None where nothing is packed."""

    resident: int
    packed: int
    open_waiting: int

    @classmethod
    def of(cls, ledger: Ledger) -> CacheBytes:
        parts = ledger.parts
        packed = sum(nbytes for name, nbytes in parts.items() if name not in NOT_PACKED)
        dense = sum(parts.get(name, 0) for name in BOUND_DENSE)
        return cls(ledger.resident_bytes, packed, dense)

    @property
    def bound(self) -> int | None:
        return self.packed + self.open_waiting + ALLOWANCE if self.packed else None


@dataclass(frozen=True)
class Loop:
    """What all measurements of one window share. plain_peak: without any cache."""

    network: Generator
    shape: Shape
    window_frames: int
    span: int
    chunks: int
    device: torch.device
    plain_peak: int | None


def measure(loop: Loop, config: CacheConfig, way: str) -> tuple[Row, Tensor]:
    """One method, one way: columns of its row, and its first chunk of latents on the CPU.

    Raises SystemExit if the network or the cache met NaN or infinity.
    """
    memory = new_memory(loop.shape, config, way, loop.window_frames, loop.device)
    slots = loop.window_frames // loop.shape.chunk_frames
    start = -(-slots // loop.span) * loop.span  # whole spans
    fill(memory, loop.shape, start, loop.device)
    found, ledgers = [], list[Ledger]()

    def sample() -> None:
        ledger = memory.ledger()
        if ledger is not None:
            ledgers.append(ledger)

    def chunk(number: int) -> Tensor:
        return generate_chunk(
            loop.network, chunk_noise(loop.shape, number, loop.device), memory.attention
        )

    for number in range(start, start + loop.span):
        found.append(chunk(number).cpu())
        sample()
        memory.commit()
        sample()

    def span(first: int) -> None:
        for number in range(first, first + loop.span):
            chunk(number)
            memory.commit()

    restart_peak(loop.device)
    firsts = range(start + loop.span, start + loop.span + loop.chunks, loop.span)
    times = [seconds / loop.span for seconds in timed(span, firsts, loop.device)]
    peak = peak_now(loop.device)
    bad = int(memory.cache.nonfinite_count) if isinstance(memory, Packed) else 0
    if bad or not all(bool(x.isfinite().all()) for x in found):
        raise SystemExit(f"{config.name} {way}: the network made NaN or infinity")
    low, middle, high = spread(times)
    row = {
        "seconds": middle,
        "seconds_p20": low,
        "seconds_p80": high,
        "peak_bytes": None if peak is None else peak - (loop.plain_peak or 0),
    }
    return row | bytes_row(ledgers, row["peak_bytes"]), found[0]


def bytes_row(ledgers: Sequence[Ledger], peak: int | None) -> Row:
    """Columns of the fullest moment, and of the bound at the moment that it is largest."""
    if not ledgers:
        return {}
    moments = [CacheBytes.of(ledger) for ledger in ledgers]
    largest = max(moments, key=lambda moment: moment.bound or 0)
    bound = largest.bound
    return {
        "resident_bytes": max(moment.resident for moment in moments),
        "ledger_peak_bytes": ledgers[-1].peak_bytes,
        "packed_bytes": largest.packed,
        "open_waiting_bytes": largest.open_waiting,
        "bound_bytes": bound,
        "within_bound": None if bound is None or peak is None else peak <= bound,
    }


def timed(call: Callable[[int], None], numbers: Sequence[int], device: torch.device) -> list[float]:
    """Seconds of each call, back to back; by CUDA events on a GPU."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for number in numbers:
            call(number)
            marks.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(numbers) + 1)]
    events[0].record()
    for number, event in zip(numbers, events[1:], strict=True):
        call(number)
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def restart_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_now(device: torch.device) -> int | None:
    """Most bytes allocated since `restart_peak`; None where no allocator is asked."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_without_cache(network: Generator, shape: Shape, device: torch.device) -> int | None:
    """Weights, activations and noise of a chunk that attends to itself."""
    generate_chunk(network, chunk_noise(shape, 0, device), Forgetful().attention)
    restart_peak(device)
    generate_chunk(network, chunk_noise(shape, 0, device), Forgetful().attention)
    return peak_now(device)


def attention_backend(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN first, the fastest backend of SDPA from compute capability 9.0 on (docs/bench.md)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return nullcontext()
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    return sdpa_kernel(list(order), set_priority=True)


def runs(methods: Sequence[str], ways: Sequence[str]) -> list[tuple[CacheConfig, str]]:
    """BF16 first, as the others are compared with it."""
    configs = [parse_method(name) for name in methods]
    configs.sort(key=lambda config: not is_dense(config))
    return [
        (config, way) for config in configs for way in ways
        if way not in PLAIN_WAYS or config.name == "bf16"
    ]  # fmt: skip


def is_dense(config: CacheConfig) -> bool:
    return config.keys.is_dense and config.values.is_dense


def measure_window(
    loop: Loop, todo: Sequence[tuple[CacheConfig, str]], on_row: Callable[[Row], None]
) -> None:
    """A row for each method and way, as it comes; what does not fit into memory says so."""
    facts = machine_facts(loop.device)
    shape = loop.shape
    name = next((n for n, s in SHAPES.items() if replace(s, layers=shape.layers) == shape), "own")
    best: tuple[float, str] | None = None
    wanted: Tensor | None = None
    for config, way in todo:
        row = dict.fromkeys(COLUMNS) | facts | {
            "work": "loop", "method": config.name, "way": way, "shape": name,
            "layers": shape.layers, "heads": f"{shape.heads}x{shape.head_dim}",
            "window_frames": loop.window_frames, "chunk_tokens": shape.chunk_tokens,
            "span_chunks": loop.span, "chunks": loop.chunks, "outcome": "ok",
        }  # fmt: skip
        try:
            found, latents = measure(loop, config.replace(span_chunks=loop.span), way)
        except torch.cuda.OutOfMemoryError:
            row["outcome"] = "out of memory"
        else:
            row |= found
            if wanted is None and is_dense(config):
                wanted = latents
            if best is not None:
                row["baseline"], row["baseline_seconds"] = best[1], best[0]
                row["overhead"] = row["seconds"] / best[0] - 1
            if wanted is not None:
                difference = (latents.float() - wanted.float()).norm() / wanted.float().norm()
                row["difference"] = float(difference)
            if is_dense(config) and (best is None or row["seconds"] < best[0]):
                best = (row["seconds"], f"{config.name} {way}")
        gc.collect()
        if loop.device.type == "cuda":
            torch.cuda.empty_cache()
        on_row(row)


def line(row: Row) -> str:
    """A row for a terminal."""
    text = f"{row['shape']} {row['layers']} layers {row['window_frames']:>4} frames  "
    text += f"{row['method']:<9} {row['way']:<7}"
    if row["seconds"] is None:
        return text + row["outcome"]
    text += f"{row['seconds']:8.4f} s"
    if row["overhead"] is not None:
        text += f" {row['overhead']:+7.1%} over {row['baseline']}"
    for label, name in (
        ("peak", "peak_bytes"),
        ("bound", "bound_bytes"),
        ("holds", "resident_bytes"),
    ):
        if row[name] is not None:
            text += f"  {label} {row[name] / 2**20:.0f} MiB"
    if row["within_bound"] is not None:
        text += "  within" if row["within_bound"] else "  ABOVE"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(arguments)
    device = torch.empty(0, device=given.device).device  # with its number
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = SHAPES[given.shape]
    if given.layers is not None:
        shape = replace(shape, layers=given.layers)

    def on_row(row: Row) -> None:
        print(line(row), flush=True)
        if given.csv is not None:
            append(given.csv, [row])

    with torch.no_grad(), attention_backend(device):
        network = new_generator(shape, device)
        plain_peak = peak_without_cache(network, shape, device)
        for window in given.windows:
            loop = Loop(network, shape, window, given.span, given.chunks, device, plain_peak)
            measure_window(loop, runs(given.methods, given.ways), on_row)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, nargs="+", help="frames; default 21 60 180")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="presets, or keys:values")
    parser.add_argument("--ways", nargs="+", default=("ring", "read", "attend"), choices=WAYS)
    parser.add_argument("--shape", default="1.3b", choices=SHAPES)
    parser.add_argument("--tiny", dest="shape", action="store_const", const="tiny")
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    parser.add_argument("--span", type=int, default=2, help="chunks packed together")
    parser.add_argument("--chunks", type=int, default=6, help="timed, whole spans")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="rows are added to it as they come")
    given = parser.parse_args(arguments)
    if given.windows is None:
        given.windows = [15] if given.shape == "tiny" else [21, 60, 180]
    frames = SHAPES[given.shape].chunk_frames
    for window in given.windows:
        if window % frames or window < frames:
            parser.error(
                f"--windows has {window}: expected multiples of {frames}, frames of a chunk"
            )
    if given.span < 1 or given.chunks < given.span or given.chunks % given.span:
        parser.error(f"--chunks is {given.chunks}: expected a multiple of the span, {given.span}")
    if given.layers is not None and given.layers < 1:
        parser.error(f"--layers is {given.layers}: expected 1 or more")
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: --device cpu --tiny shows whether it runs")
    return given


if __name__ == "__main__":
    main()
