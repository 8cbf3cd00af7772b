"""What every kernel has to hold on a GPU, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def check_repeatable(call: Callable[[], Sequence[Tensor]], times: int = 5) -> None:
    """The same bytes from run to run."""
    first = [t.clone() for t in call()]
    for _ in range(times):
        for a, b in zip(first, call(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_capture(call: Callable[[], Sequence[Tensor]]) -> None:
    """A captured graph gives what the call gave; capture fails where the host waits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [t.clone() for t in call()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(expected, captured, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_compilations(call: Callable[[int], object], lengths: Iterable[int]) -> None:
    """After the first length nothing is compiled."""
    first, *others = lengths
    call(first)
    with counted_compilations() as compiled:
        for length in others:
            call(length)
    assert not compiled, f"compiled again: {compiled}"


@contextmanager
def counted_compilations():  # type: ignore[no-untyped-def]
    """The names of the kernels that were compiled inside."""
    import triton

    names: list[str] = []
    before = triton.knobs.runtime.jit_cache_hook

    def seen(*args: object, **kwargs: object) -> bool:
        names.append(str(kwargs.get("repr", "?")))
        return False

    triton.knobs.runtime.jit_cache_hook = seen
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_cache_hook = before
