"""Fixtures and settings that every test shares."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch

# No deadline: two cores are shared by two workers, so the time of one example says nothing.
# Examples are derived from the test itself, so a failure on one machine is a failure on all.
hypothesis.settings.register_profile(
    "steadykv", deadline=None, derandomize=True, max_examples=25, print_blob=True
)
hypothesis.settings.load_profile("steadykv")

# A shell starts its background jobs with Ctrl-C ignored, and their children inherit that: the tests
# of what Ctrl-C does would then interrupt nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

INTEGER_POISON = 0xAA

# Without a GPU the kernels are interpreted. Read when triton is first imported, which no module
# above does; a kernel runs only where a test names the backend.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker its share of the cores: oversubscribed matmuls are several times slower.

    So are those of the processes that a test starts.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are skipped where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Thousands of tests stay: without this every full collection of garbage walks them again."""
    gc.collect()
    gc.freeze()


@dataclass
class Poison:
    """What `poisoned_memory` did so far."""

    filled: list[torch.Size] = field(default_factory=list)  # shapes, in order of allocation


def fill_with_poison(tensor: torch.Tensor) -> None:
    """Overwrite memory that nobody has written yet: NaN for floats, 0xAA bytes for integers.

    A code buffer full of 0xAA decodes to a plausible value, yet to a wrong one; a bool becomes
    True. Every float format of torch has a NaN except the 4-bit one, which is not used here.
    """
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.copy_(torch.full((), float("nan"), device=tensor.device).to(tensor.dtype))
        else:
            word = int.from_bytes([INTEGER_POISON] * tensor.element_size(), "little")
            bits = 8 * tensor.element_size()
            signed = tensor.dtype.is_signed and word >> (bits - 1)
            tensor.fill_(word - (1 << bits) if signed else word)


@contextlib.contextmanager
def poisoned_allocations(library: str = "steadykv") -> Iterator[Poison]:
    """Fill what `library` allocates without initializing it; other callers are left alone.

    Replaces torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty and
    Tensor.new_empty_strided. Only the frame that makes the call counts, so that torch's own
    functions, which allocate and then fill, keep their speed.
    """
    poison = Poison()
    with torch.device("cpu"):
        # Torch remembers, at the first allocation under a device context, which functions obey one.
        # That must not happen while they are replaced, or contexts stay without effect for good.
        torch.empty(0)
    owners: list[tuple[Any, str]] = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in owners]

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(allocate)
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller == library or caller.startswith(library + "."):
                fill_with_poison(tensor)
                poison.filled.append(tensor.shape)
            return tensor

        return wrapper

    try:
        for owner, name, original in originals:
            setattr(owner, name, poisoning(original))
        yield poison
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@pytest.fixture
def poisoned_memory() -> Iterator[Poison]:
    """Uninitialized memory of library code is NaN (floats) or 0xAA (integers) during the test.

    A function that skips an element of its output then fails instead of passing by luck.
    """
    with poisoned_allocations() as poison:
        yield poison
