"""The `poisoned_memory` fixture really poisons: otherwise no test that uses it proves anything."""

from __future__ import annotations

import types

import pytest
import torch

from tests.conftest import Poison, poisoned_allocations

ALLOCATIONS = """
import torch

def empty(shape, dtype):
    return torch.empty(shape, dtype=dtype)

def empty_like(shape, dtype):
    return torch.empty_like(torch.zeros(shape, dtype=dtype))

def empty_strided(shape, dtype):
    return torch.empty_strided(shape, (1, shape[0]), dtype=dtype)

def new_empty(shape, dtype):
    return torch.zeros(1, dtype=dtype).new_empty(shape)

def new_empty_strided(shape, dtype):
    return torch.zeros(1, dtype=dtype).new_empty_strided(shape, (1, shape[0]))

def forgets_the_last_row(x):
    out = torch.empty_like(x)
    out[:-1] = 2 * x[:-1]
    return out
"""
KINDS = ["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def module_named(name: str) -> types.ModuleType:
    """The functions above as if they stood in module `name`."""
    module = types.ModuleType(name)
    exec(compile(ALLOCATIONS, f"<{name}>", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_nan(poisoned_memory: Poison, kind: str, dtype: torch.dtype) -> None:
    library = module_named("steadykv.codecs.probe")
    out = getattr(library, kind)((3, 5), dtype)
    assert out.shape == (3, 5)
    assert out.dtype == dtype
    assert out.float().isnan().all()
    assert poisoned_memory.filled == [torch.Size((3, 5))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_0xaa(poisoned_memory: Poison, kind: str, dtype: torch.dtype) -> None:
    library = module_named("steadykv")
    out = getattr(library, kind)((3, 5), dtype)
    assert out.dtype == dtype
    assert (out.contiguous().view(torch.uint8) == 0xAA).all()


@pytest.mark.usefixtures("poisoned_memory")
def test_a_forgotten_row_is_found() -> None:
    out = module_named("steadykv.reference.probe").forgets_the_last_row(torch.ones(4, 2))
    assert out[:-1].eq(2).all()
    assert out[-1].isnan().all()


@pytest.mark.parametrize("name", ["tests.test_x", "steadykvish", "torch.nn.functional"])
def test_other_callers_are_left_alone(poisoned_memory: Poison, name: str) -> None:
    module_named(name).empty((3, 5), torch.float32)
    assert poisoned_memory.filled == []


@pytest.mark.usefixtures("poisoned_memory")
def test_odd_cases_are_allocated_as_asked() -> None:
    library = module_named("steadykv.ops.probe")
    assert library.empty((0, 5), torch.float32).shape == (0, 5)
    assert library.empty((2,), torch.bool).all()
    with torch.device("meta"):
        assert library.empty((2, 3), torch.uint8).is_meta


def test_originals_come_back_after_an_error() -> None:
    before = [torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty]

    def fail() -> None:
        with poisoned_allocations():
            assert torch.empty is not before[0]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    after = [torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty]
    assert all(a is b for a, b in zip(after, before, strict=True))
