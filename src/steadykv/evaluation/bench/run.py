"""`bench`: every work checked, then timed: rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from steadykv.config import CacheConfig, parse_method
from steadykv.errors import ConfigError
from steadykv.evaluation.provenance import environment

from .timing import Rates, Timing, measure, measure_rates, peak_bytes
from .works import WORKS as _WORKS
from .works import Bench, Size, Task

__all__ = ["COLUMNS", "METHODS", "WORKS", "Size", "bench", "default_size", "machine_facts"]

METHODS = ("qvg", "quantwm", "steady")
WORKS = tuple(_WORKS)
COLUMNS = (
    "work", "method", "shape", "median_ms", "p20_ms", "p80_ms", "limit_ms", "share_of_limit",
    "baseline", "baseline_ms", "speedup", "error", "error_bound", "nbytes", "gb_per_s",
    "tflop_per_s", "peak_bytes", "backend", "gpu", "torch", "triton", "commit",
)  # fmt: skip
"""Columns of a row. docs/bench.md says what they mean."""

Row = dict[str, Any]
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Source:
    """What all rows of a run share."""

    size: Size
    facts: Row


def default_size(device: torch.device) -> Size:
    """One layer of a 14-billion-parameter video model on a GPU; something tiny elsewhere."""
    if device.type == "cuda":
        return Size(heads=32, tokens=29640, queries=4680, head_dim=128)
    return Size(heads=2, tokens=192, queries=48, head_dim=64)


def bench(
    device: torch.device,
    size: Size,
    methods: Sequence[str] = METHODS,
    works: Sequence[str] = WORKS,
    *,
    seconds: float = 0.3,
    on_progress: OnProgress | None = None,
) -> list[Row]:
    """Rows of `COLUMNS`: first the machine's own rates, then each work with each method.

    Before it is timed, every work has to be right (`Task.check`): else SteadyKVError.
    seconds: about how long each one is timed. Raises ConfigError for an unknown work or method.
    """
    unknown = [name for name in works if name not in _WORKS]
    if unknown or not works:
        raise ConfigError(
            f"works are {' '.join(works) or 'none'}: expected some of {' '.join(_WORKS)}"
        )
    configs = [_packing(name) for name in methods]
    if not configs:
        raise ConfigError("methods are none: expected at least one cache, like qvg")
    report = on_progress or (lambda done, total, label: None)
    total = 1 + len(works)
    report(0, total, "rates of the machine")
    rates = measure_rates(device, seconds)
    source = _Source(size, machine_facts(device))
    rows = [
        _rate_row("copy", rates.copy, source, gb_per_s=rates.bytes_per_second / 1e9),
        _rate_row("matmul", rates.matmul, source, tflop_per_s=rates.flops_per_second / 1e12),
    ]
    state = Bench(device, size, rates, seconds)
    for number, name in enumerate(works):
        report(1 + number, total, name)
        for task in _WORKS[name](state, configs):
            task.check(name)
            rows.append(_task_row(name, task, rates, state, source))
    report(total, total, "done")
    return rows


def _packing(name: str) -> CacheConfig:
    config = parse_method(name)
    if config.keys.is_dense or config.values.is_dense:
        raise ConfigError(
            f"{name!r} keeps a side dense: expected a cache that packs keys and values"
        )
    return config


def _task_row(work: str, task: Task, rates: Rates, state: Bench, source: _Source) -> Row:
    timing = measure(task.calls, state.device, state.seconds)
    peak = peak_bytes(task.calls[0], state.device)
    limit = rates.limit_ms(task.nbytes, task.flops)
    baseline, baseline_ms = task.baseline or (None, None)
    return _row(
        source,
        timing,
        work=work,
        method=task.method,
        limit_ms=limit,
        share_of_limit=limit / timing.median,
        baseline=baseline,
        baseline_ms=baseline_ms,
        speedup=None if baseline_ms is None else baseline_ms / timing.median,
        error=task.error,
        error_bound=task.bound,
        nbytes=int(task.nbytes),
        gb_per_s=task.nbytes / timing.median / 1e6,
        tflop_per_s=task.flops / timing.median / 1e9,
        peak_bytes=peak,
        backend=task.backend,
    )


def _rate_row(name: str, timing: Timing, source: _Source, **rate: float) -> Row:
    return _row(
        source,
        timing,
        work=name,
        method="machine",
        limit_ms=timing.median,
        share_of_limit=1.0,
        **rate,
    )


def _row(source: _Source, timing: Timing, **fields: Any) -> Row:
    found = {
        "shape": str(source.size),
        "median_ms": timing.median,
        "p20_ms": timing.p20,
        "p80_ms": timing.p80,
        **source.facts,
        **fields,
    }
    return {name: found.get(name) for name in COLUMNS}


def machine_facts(device: torch.device) -> Row:
    """The last columns of a row: gpu, torch, triton, commit."""
    found = environment(device)
    try:
        triton: str | None = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "gpu": found["device_name"],
        "torch": found["torch"],
        "triton": triton,
        "commit": found["commit"],
    }
