"""The query moment kernel against its reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import QueryMoment
from steadykv.kernels.launch import size_kinds

from .codecs import sample_queries, sample_tokens
from .gpu_checks import check_capture, check_compilations, check_repeatable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def queries_of(
    batch: int, heads: int, tokens: int, width: int, pooled: int = 1, seed: int = 1
) -> Tensor:
    x = sample_tokens(batch, heads, 2, width, dtype=torch.float32)
    return sample_queries(x, seed, pooled, tokens).to(DEVICE)


def folded(parts: list[Tensor], heads: int, backend: str) -> QueryMoment:
    batch, _, _, width = parts[0].shape
    stats = QueryMoment.empty(batch, heads, width, DEVICE)
    for queries in parts:
        with ops.full_precision(stats.moment.device):
            ops.accumulate_moment(stats.moment, stats.count, queries, backend=backend)
    return stats


def check(parts: list[Tensor], heads: int) -> QueryMoment:
    """Within 2^-17 of the mean of |q| |q|^T: FP32 sums of at most 2^6 tiles, in any order.

    The reference may add all S products one after the other, S·2^-24 of it.
    """
    stats, expected = (folded(parts, heads, name) for name in ("triton", "reference"))
    assert torch.equal(stats.count, expected.count)
    pooled = parts[0].shape[1] // heads
    q = torch.cat(parts, 2).double().nan_to_num(0, 0, 0).unflatten(1, (heads, pooled))
    q = q.flatten(2, 3)
    size = (q.abs().mT @ q.abs()) / q.shape[2]
    exact = (q.mT @ q) / q.shape[2]
    assert ((stats.moment.double() - exact).abs() <= 2**-17 * size).all()
    bound = 2**-17 + q.shape[2] * 2**-24
    assert ((stats.moment - expected.moment).abs().double() <= bound * size).all()
    if parts[0].dtype != torch.float32:  # the products of FP32 come in parts, in an order
        assert torch.equal(stats.moment, stats.moment.mT)
    return stats


@pytest.mark.parametrize("width", [16, 50, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", TYPES)
def test_moment_is_that_of_the_reference(width: int, dtype: torch.dtype) -> None:
    check([queries_of(1, 2, 75, width).to(dtype)], 2)


def test_wide_heads_take_several_tiles() -> None:
    check([queries_of(1, 1, 40, 256)], 1)
    check([queries_of(1, 1, 40, 160).bfloat16()], 1)


@pytest.mark.parametrize("pooled", [1, 4, 7])
def test_query_heads_are_pooled(pooled: int) -> None:
    check([queries_of(2, 2, tokens, 32, pooled, tokens) for tokens in (1, 33, 90)], 2)


def test_more_queries_than_one_share() -> None:
    check([queries_of(1, 1, 1300, 16)], 1)
    check([queries_of(1, 1, 9000, 16)], 1)


@pytest.mark.parametrize("dtype", TYPES)
def test_any_strides(dtype: torch.dtype) -> None:
    queries = queries_of(2, 2, 70, 32).to(dtype)
    expected = folded([queries], 2, "triton").moment
    by_tokens = queries.transpose(1, 2).contiguous().transpose(1, 2)
    padded = torch.full((2, 2, 70, 40), math.nan, dtype=dtype, device=DEVICE)[..., 3:35]
    padded.copy_(queries)
    by_channels = queries.mT.contiguous().mT
    for other in (by_tokens, padded, by_channels):
        assert not other.is_contiguous()
        assert torch.equal(folded([other], 2, "triton").moment, expected)


def test_a_moment_that_is_no_run_of_memory() -> None:
    queries = queries_of(1, 2, 40, 16)
    expected = folded([queries], 2, "triton")
    memory = torch.zeros(1, 3, 20, 16, device=DEVICE)
    count = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    ops.accumulate_moment(memory[:, 1:, :16], count[:, 1:], queries, backend="triton")
    assert torch.equal(memory[:, 1:, :16], expected.moment)
    assert not memory[:, :1].any()
    assert not memory[:, :, 16:].any()
    assert count.tolist() == [[0, 40, 40]]


@pytest.mark.parametrize("dtype", TYPES)
def test_queries_that_are_not_finite_count_as_zero(dtype: torch.dtype) -> None:
    queries = queries_of(1, 1, 70, 16).to(dtype)
    clean = queries.clone()
    queries[0, 0, 3], clean[0, 0, 3] = math.nan, 0
    queries[0, 0, 4, 1], clean[0, 0, 4, 1] = math.inf, 0
    queries[0, 0, 66, 2], clean[0, 0, 66, 2] = -math.inf, 0
    spoilt, expected = (folded([q], 1, "triton") for q in (queries, clean))
    assert torch.equal(spoilt.moment, expected.moment)
    assert spoilt.count.item() == 70


def test_heads_and_batch_rows_do_not_depend_on_each_other() -> None:
    queries = queries_of(2, 3, 600, 16)
    together = folded([queries], 3, "triton").moment
    for b in range(2):
        for h in range(3):
            alone = folded([queries[b : b + 1, h : h + 1]], 1, "triton").moment
            assert torch.equal(alone[0, 0], together[b, h])


@pytest.mark.cuda
def test_on_a_gpu_bytes_repeat_graphs_capture_and_nothing_breaks_a_compiled_caller() -> None:
    queries = queries_of(1, 12, 4680, 128).bfloat16()
    check([queries, queries_of(1, 12, 333, 128, seed=2).bfloat16()], 12)
    moment = torch.zeros(1, 12, 128, 128, device=DEVICE)
    count = torch.zeros(1, 12, dtype=torch.int64, device=DEVICE)

    def call() -> tuple[Tensor, Tensor]:
        moment.zero_()
        count.zero_()
        ops.accumulate_moment(moment, count, queries, backend="triton")
        return moment, count

    check_repeatable(call)
    check_capture(call)
    expected = [t.clone() for t in call()]

    @torch.compile(fullgraph=True)
    def compiled(m: Tensor, c: Tensor, q: Tensor) -> Tensor:
        torch.ops.steadykv.accumulate_moment(m, c, q * 1)
        return q + 1

    moment.zero_()
    count.zero_()
    compiled(moment, count, queries)
    assert torch.equal(moment, expected[0])
    assert torch.equal(count, expected[1])


@pytest.mark.cuda
def test_on_a_gpu_a_new_length_compiles_nothing() -> None:
    queries = queries_of(1, 2, 1400, 64, 2).bfloat16()
    check_compilations(
        lambda n: folded([queries[:, :, :n].contiguous()], 2, "triton"), range(90, 1300, 61)
    )


@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
def test_channel_weights_are_the_reference_s(width: int, poisoned_memory: None) -> None:
    moment = torch.randn(6, width, width, generator=torch.Generator().manual_seed(0))
    moment = (moment @ moment.mT).to(DEVICE)
    moment[1] = 0
    moment[2, 3, 3] = float("nan")
    count = torch.tensor([3, 3, 3, 0, 9, 1], device=DEVICE)
    found = ops.channel_weight(moment, count, backend="triton")
    expected = ops.channel_weight(moment, count, backend="reference")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[1].tolist() == [1, 0, 0, 0, 1, 1]


def test_strides_are_told_apart_as_the_compiler_does() -> None:
    """It has a kernel of its own for 1, for multiples of 16 and for 64 bits."""
    assert size_kinds(0, 16, 48, 1 << 20) == size_kinds(*4 * [32])
    assert size_kinds(3, 17, (1 << 31) - 1) == size_kinds(*3 * [5])
    assert len({*size_kinds(1, 2, 16, 1 << 31, (1 << 31) + 1)}) == 5
