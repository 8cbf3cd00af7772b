"""How long a call takes, and the two rates that bound every kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch

__all__ = ["Rates", "Timing", "measure", "measure_rates", "peak_bytes"]

Call = Callable[[], object]

WARMUP = 2  # calls of each input set
LEAST, MOST = 5, 200  # timed calls
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Timing:
    """Median and the 20 % and 80 % quantiles of so many calls, in milliseconds."""

    median: float
    p20: float
    p80: float
    calls: int


@dataclass(frozen=True)
class Rates:
    """Bytes read and written a second by a copy; operations a second of a BF16 matrix product."""

    copy: Timing
    matmul: Timing
    bytes_per_second: float
    flops_per_second: float

    def limit_ms(self, nbytes: float, flops: float) -> float:
        """Neither memory nor matrix units can be faster."""
        return 1e3 * max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


def measure(calls: Sequence[Call], device: torch.device, seconds: float) -> Timing:
    """Times `calls`, one input set each, in turn, for about `seconds`.

    By CUDA events on a GPU, so that the time between two launches does not count unless the host is
    slower than the device.
    """
    for call in [*calls] * WARMUP:
        call()
    once = _once(calls[0], device)
    count = max(LEAST, len(calls), min(MOST, int(1e3 * seconds / max(once, 1e-3))))
    if device.type != "cuda":
        times = [_once(calls[number % len(calls)], device) for number in range(count)]
    else:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        torch.cuda.synchronize(device)
        for number, (begin, end) in enumerate(events):
            begin.record()
            calls[number % len(calls)]()
            end.record()
        torch.cuda.synchronize(device)
        times = [begin.elapsed_time(end) for begin, end in events]
    tenths = quantiles(times, n=10, method="inclusive")
    return Timing(tenths[4], tenths[1], tenths[7], count)


def measure_rates(device: torch.device, seconds: float) -> Rates:
    """A copy of memory onto itself elsewhere, and a square BF16 product."""
    nbytes, size = COPY_BYTES[device.type], MATMUL_SIZE[device.type]
    halves = torch.zeros(2, nbytes, dtype=torch.uint8, device=device)
    copy = measure([lambda: halves[0].copy_(halves[1])], device, seconds)
    halves = halves[:, :0].clone()  # releases them
    generator = torch.Generator(device).manual_seed(0)
    # Random numbers: zeros draw less power and run at a higher clock.
    a, b = (
        torch.randn(size, size, generator=generator, device=device).bfloat16() for _ in range(2)
    )
    product = torch.empty_like(a)
    matmul = measure([lambda: torch.mm(a, b, out=product)], device, seconds)
    return Rates(copy, matmul, 2e3 * nbytes / copy.median, 2e3 * size**3 / matmul.median)


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """What a call allocates at most, its result included; None where no allocator is asked."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _once(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)
