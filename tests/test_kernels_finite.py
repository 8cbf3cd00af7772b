"""Finite copies by the kernel: the reference's bytes and counts, whatever the strides."""

import pytest
import torch
from torch import Tensor

from steadykv import ops

from .kernels import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KINDS = [torch.bfloat16, torch.float16, torch.float32]


def sample(kind: torch.dtype, layout: str, width: int = 80) -> Tensor:
    """[2, 3, 37, D] as a view of a host's tensor, with some NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 3, 37, width) if layout == "BHSD" else (2, 37, 3, width)
    whole = torch.randn(*sizes[:-1], 2 * width, generator=generator)
    for number, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        whole.view(-1)[number * 1001 :: 4003] = bad
    x = whole.to(kind).to(DEVICE)[..., :width]  # rows are not adjacent
    return x if layout == "BHSD" else x.transpose(1, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_a_copy_is_finite_and_counted(kind: torch.dtype, layout: str) -> None:
    x = sample(kind, layout)
    bad = int((~x.float().isfinite()).sum())
    assert bad
    target = torch.empty(2, 37, 3, x.shape[3], dtype=kind, device=DEVICE).transpose(1, 2)
    count = torch.full((), 5, dtype=torch.int64, device=DEVICE)
    ops.copy_finite(x, target, count, backend="triton")
    assert int(count) == 5 + bad
    assert torch.equal(target, x.nan_to_num(0.0, 0.0, 0.0))
    ops.count_nonfinite(x, count, backend="triton")
    assert int(count) == 5 + 2 * bad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_some_heads_are_the_reference_s(kind: torch.dtype, wide: bool) -> None:
    x = sample(kind, "BSHD")
    rows, count = ops.head_rows(x, 1, 5, wide=wide, backend="triton")
    expected, expected_count = ops.head_rows(x, 1, 5, backend="reference")
    assert rows.dtype == (torch.bfloat16 if kind == torch.bfloat16 and not wide else torch.float32)
    assert torch.equal(rows.float(), expected)
    assert torch.equal(count, expected_count)


def test_nothing_is_nothing() -> None:
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    empty = torch.empty(1, 2, 0, 16, device=DEVICE)
    ops.copy_finite(empty, empty, count, backend="triton")
    assert int(count) == 0


@pytest.mark.cuda
def test_a_new_length_compiles_nothing() -> None:
    from steadykv.kernels.finite import _clean

    count = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def copy(tokens: int) -> None:
        x = torch.randn(1, tokens, 3, 64, device=DEVICE).transpose(1, 2)
        ops.copy_finite(x, torch.empty_like(x), count, backend="triton")

    copy(50)
    compiled = len(_clean.compiled)
    for tokens in range(51, 71):
        copy(tokens)
    assert len(_clean.compiled) == compiled
