"""Time and memory of encoding one layer in plain PyTorch on a CPU: a table, and rows as CSV.

    python -m benchmarks.encode_cpu                                   # from the root of a checkout
    python -m benchmarks.encode_cpu --methods steady --tokens 9360 --csv rows.csv

Every method runs in a process of its own: keys with query statistics where it uses any, then
values, `[1, heads, tokens, head_dim]` in BF16. Memory is what the resident set of that process
grows to beside the input (Linux; payload included). CPU seconds stand beside the wall clock: where
other programs want the same cores, they are what the machine would need alone, on one core.
OMP_WAIT_POLICY=passive keeps waiting threads from burning them.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

# Seconds for keys and values of one layer with the defaults, on two cores; and what the peak may
# be, in sizes of the BF16 tensor that is encoded.
TARGET_SHAPE = "1x12x4680x128"
TARGET_SECONDS = {"qvg": 3.0, "quantwm": 6.0}
TARGET_MEMORY = 6.0
METHODS = ("qvg", "qvg4", "quantwm", "steady")


def measure(name: str, shape: tuple[int, int, int, int], threads: int, repeats: int) -> list[Any]:
    """One row for the keys and one for the values of preset `name`."""
    import torch

    from steadykv.codecs import encode
    from steadykv.config import preset
    from steadykv.evaluation.provenance import environment
    from tests.codecs import sample_moment, sample_tokens

    torch.set_num_threads(threads)
    config = preset(name)
    small = sample_tokens(1, 2, 64, shape[3])
    keys, values = (sample_tokens(*shape, seed=seed) for seed in (0, 1))
    stats = sample_moment(keys)
    rows = []
    for tensor, x, codec in (("keys", keys, config.keys), ("values", values, config.values)):
        used = stats if codec.needs_queries else None
        encode(small, codec, stats=sample_moment(small) if used else None)  # loads what is lazy

        def call(x: Any = x, codec: Any = codec, used: Any = used) -> Any:
            return encode(x, codec, stats=used)

        peak, payload = peak_growth(call)
        wall, cpu = [], []
        for _ in range(repeats):
            start, start_cpu = time.perf_counter(), time.process_time()
            call()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        low, middle, high = spread(wall)
        rows.append(
            {
                "method": name,
                "tensor": tensor,
                "codec": codec.method,
                "shape": "x".join(map(str, shape)),
                "threads": threads,
                "repeats": repeats,
                "seconds": middle,
                "seconds_p20": low,
                "seconds_p80": high,
                "seconds_least": min(wall),
                "cpu_seconds": spread(cpu)[1],
                "bits_per_element": payload.bits_per_element,
                "input_bytes": x.nbytes,
                "payload_bytes": payload.nbytes,
                "peak_bytes": peak,
                "peak_over_input": None if peak is None else peak / x.nbytes,
                "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
                **environment("cpu"),
                "config": json.dumps(codec.to_dict()),
            }
        )
        del payload
    return rows


def spread(samples: list[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    tenths = quantiles(samples, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def peak_growth(call: Callable[[], Any]) -> tuple[int | None, Any]:
    """Bytes that the resident set grows by while `call` runs (None off Linux), and its result."""
    refs = Path("/proc/self/clear_refs")
    if not refs.exists():
        return None, call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still mapped would hide growth
    before = resident("VmRSS")
    refs.write_text("5")  # sets the high-water mark back
    result = call()
    return resident("VmHWM") - before, result


def resident(name: str) -> int:
    """A field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each tensor, and for each method its sum against the target."""
    lines = [
        f"{'method':<9}{'tensor':<8}{'seconds':>9}{'p20–p80':>15}{'CPU s':>8}{'peak/input':>12}"
    ]
    for row in rows:
        peak = row["peak_over_input"]
        lines.append(
            f"{row['method']:<9}{row['tensor']:<8}{row['seconds']:>9.2f}"
            f"{row['seconds_p20']:>8.2f}–{row['seconds_p80']:<6.2f}{row['cpu_seconds']:>8.2f}"
            f"{'-' if peak is None else format(peak, '.2f'):>12}"
        )
        if row["tensor"] == "values":
            pair = [other for other in rows if other["method"] == row["method"]]
            seconds = sum(other["seconds"] for other in pair)
            target = TARGET_SECONDS.get(row["method"])
            verdict = ""
            if target is not None and row["shape"] == TARGET_SHAPE:
                verdict = f", target {target:.0f} s {'met' if seconds <= target else 'missed'}"
            lines.append(f"{'':<9}{'both':<8}{seconds:>9.2f}{verdict}")
    peaks = [row["peak_over_input"] for row in rows if row["peak_over_input"] is not None]
    if peaks and rows[0]["shape"] == TARGET_SHAPE:
        verdict = "met" if max(peaks) <= TARGET_MEMORY else "missed"
        limit = f"target {TARGET_MEMORY:.0f} {verdict}"
        lines.append(f"memory: at most {max(peaks):.2f} × the BF16 tensor that is encoded, {limit}")
    return "\n".join(lines)


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a CSV file; its header has to be theirs."""
    fields = list(rows[0])
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            if next(csv.reader(file), None) != fields:
                raise SystemExit(f"{path} has other columns: give --csv a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the table, and appends the rows."""
    from steadykv.config import PRESETS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=PRESETS, metavar="PRESET")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4680)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args(arguments)
    for name in ("heads", "tokens", "head_dim", "threads", "repeats"):
        if getattr(given, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(given, name)}: expected 1 or more"
            )
    shape = (1, given.heads, given.tokens, given.head_dim)
    rows: list[dict[str, Any]] = []
    for name in given.methods:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows += pool.apply(measure, (name, shape, given.threads, given.repeats))
    print(table(rows))
    if given.csv:
        append(given.csv, rows)


if __name__ == "__main__":
    main()
