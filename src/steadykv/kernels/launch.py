"""What every launch needs: the device guard, block sizes and what a device can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = [
    "Launch",
    "blocks",
    "converts_e4m3",
    "interpreted",
    "kind_of",
    "on_device",
    "power_of_two",
    "processors",
    "shared_memory",
    "size_kinds",
    "smaller_device",
    "tile_width",
]

_HERE = nullcontext()

_forced: ContextVar[int | None] = ContextVar("steadykv_shared_memory", default=None)


def on_device(tensor: Tensor) -> Any:
    """Launches inside go to the device of `tensor`, whichever is current."""
    if not tensor.is_cuda:
        return _HERE
    if torch.compiler.is_compiling() or tensor.get_device() != torch._C._cuda_getDevice():
        return torch.cuda.device(tensor.device)
    return _HERE  # entering the current device again would take as long as a small op


class Launch:
    """Launches a kernel again without Triton's look-up of the compiled one, most of a launch.

    `kind`: the device, and whatever else of the arguments Triton would compile another kernel for:
    see `kind_of`. Integers have to be constants, `do_not_specialize` or in it by `size_kinds`.
    options: those of Triton's launch, beside the number of warps.
    """

    def __init__(self, kernel: Any, warps: int, **options: Any) -> None:
        self.kernel, self.options = kernel, {"num_warps": warps, **options}
        self.compiled: dict[Any, Any] = {}

    def __call__(self, kind: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
        """All arguments in the order of the kernel's signature, constants among them."""
        found = self.compiled.get(kind)
        if found is not None:
            hooks = triton.knobs.runtime
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            # A profiler, in a chain that is empty without one, wants to know more of it.
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                found[grid](*arguments)
                return
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            found.run(
                *grid, stream, found.function, found.packed_metadata, None, None, None, *arguments
            )
            return
        # None where it is interpreted.
        self.compiled[kind] = self.kernel[grid](*arguments, **self.options)


def kind_of(*tensors: Tensor, constants: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """What kernels are told apart by: the device, dtypes and alignments of tensors, and constants.

    Of the tensors that a caller brings: those that torch just allocated are aligned.
    """
    forms = [(t.dtype, t.data_ptr() % 16 == 0) for t in tensors]
    return (tensors[0].get_device(), *forms, constants)


def size_kinds(*sizes: int) -> tuple[int, ...]:
    """What kernels are told apart by, of integers they specialise on: 1, 16 divides it, 64 bits."""
    return tuple(1 if n == 1 else (n % 16 == 0) + 2 * (n >= 1 << 31) + 2 for n in sizes)


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` cover `count`."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`, 1 or more.

    Triton's own function for it, as for `blocks`, takes several microseconds of a launch.
    """
    return 1 << (count - 1).bit_length()


def tile_width(count: int) -> int:
    """The least width of a matrix product's tile that holds `count`: a power of two, 16 or more."""
    return max(16, power_of_two(count))


@cache  # the environment is read each time, at two microseconds
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which cannot multiply BF16."""
    return bool(triton.knobs.runtime.interpret)


def processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 where kernels are interpreted."""
    return _properties(device.index)[0] if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    forced = _forced.get()
    if forced is not None:
        return forced
    return _properties(device.index)[1] if device.type == "cuda" else 1 << 30


def converts_e4m3(device: torch.device) -> bool:
    """Whether the device has an instruction for it: compute capability 8.9 or newer."""
    return device.type == "cuda" and _capability(device.index) >= (8, 9)


@contextmanager
def smaller_device(shared_memory: int) -> Iterator[None]:
    """Block sizes inside are chosen as for a device with that much shared memory."""
    token = _forced.set(shared_memory)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _properties(index: int | None) -> tuple[int, int]:
    found: Any = torch.cuda.get_device_properties(index)
    return found.multi_processor_count, found.shared_memory_per_block_optin
