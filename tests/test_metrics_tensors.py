"""Errors of packed tensors and of attention over them: brute force, blocks, memory, edges."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadykv.errors import NonFiniteError, ShapeError
from steadykv.evaluation.metrics import token_shift
from steadykv.evaluation.metrics.tensors import (
    attention_errors,
    attention_sums,
    relative_error,
    sqnr_db,
)
from tests.cache_cases import Allocations


def sample(
    batch: int, heads: int, query_heads: int, count: int, tokens: int, dim: int, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and noisy copies of the latter two."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, dim)
    q = torch.randn(batch, query_heads, count, dim, generator=generator)
    k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    noisy = [x + 0.3 * torch.randn(shape, generator=generator).bfloat16() for x in (k, v)]
    return q, k, v, *noisy


def brute_force(q, k, v, packed_k, packed_v, top_k=5):  # type: ignore[no-untyped-def]
    """One query at a time, in FP64, with nothing but the definitions."""
    squares, moved, lost, divergences = [], [], [], []
    outputs: list[list[torch.Tensor]] = [[], [], [], []]
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            sides = [x[row, head // group].double() for x in (k, packed_k, v, packed_v)]
            for query in q[row, head].double():
                logits = [(side @ query) / math.sqrt(q.shape[3]) for side in sides[:2]]
                squares += (logits[0] - logits[1]).square().tolist()
                order = [sorted(range(len(x)), key=lambda i, x=x: (-x[i], i)) for x in logits]
                moved.append(order[0][0] != order[1][0])
                kept = set(order[0][:top_k]) & set(order[1][:top_k])
                lost.append(1 - len(kept) / min(top_k, len(order[0])))
                p, packed_p = (x.exp() / x.exp().sum() for x in logits)
                divergences.append(sum(a * math.log(a / b) for a, b in zip(p.tolist(),
                                       packed_p.tolist(), strict=True)))  # fmt: skip
                pairs = [(p, sides[2]), (packed_p, sides[2]), (p, sides[3]), (packed_p, sides[3])]
                for collected, (weights, values) in zip(outputs, pairs, strict=True):
                    collected.append(weights @ values)
    whole = [torch.stack(rows) for rows in outputs]
    return (
        math.sqrt(sum(squares) / len(squares)),
        sum(moved) / len(moved),
        sum(lost) / len(lost),
        sum(divergences) / len(divergences),
        *(float((other - whole[0]).norm() / whole[0].norm()) for other in whole[1:]),
        len(moved),
    )


@pytest.mark.parametrize(
    ("batch", "heads", "query_heads", "count", "tokens"),
    [(1, 1, 1, 7, 40), (2, 2, 2, 5, 33), (1, 2, 6, 4, 21), (1, 1, 2, 3, 3), (1, 1, 1, 1, 1)],
)
def test_equals_brute_force(
    batch: int, heads: int, query_heads: int, count: int, tokens: int
) -> None:
    tensors = sample(batch, heads, query_heads, count, tokens, 16)
    errors = attention_errors(*tensors)
    # Relative to the FP64 truth; FP32 sums of 16 products and of up to 40 weights.
    assert astuple(errors) == pytest.approx(brute_force(*tensors), rel=2e-5, abs=2e-7)


@given(
    count=st.integers(1, 20),
    tokens=st.integers(1, 30),
    group=st.integers(1, 3),
    block=st.integers(1, 2000),
    seed=st.integers(0, 1000),
)
def test_blocks_change_nothing(count: int, tokens: int, group: int, block: int, seed: int) -> None:
    tensors = sample(1, 2, 2 * group, count, tokens, 8, seed)
    whole = attention_errors(*tensors)
    blocked = attention_errors(*tensors, block_bytes=block)
    assert astuple(blocked) == pytest.approx(astuple(whole), rel=1e-5, abs=1e-7)
    assert blocked.selections == 2 * group * count


def test_agrees_with_the_token_shift_of_rollouts() -> None:
    q, k, v, packed_k, packed_v = sample(1, 2, 4, 50, 60, 32)
    errors = attention_errors(q, k, v, packed_k, packed_v)
    moved, lost = token_shift(q, k, packed_k)
    assert 0.0 < errors.top5_shift < errors.top1_shift < 1.0
    assert errors.top1_shift == pytest.approx(moved.item())
    assert errors.top5_shift == pytest.approx(lost.item())


def test_nothing_lost_is_nothing() -> None:
    q, k, v, packed_k, packed_v = sample(2, 2, 2, 9, 20, 16)
    assert astuple(attention_errors(q, k, v, k, v))[:-1] == (0.0,) * 7
    keys_only = attention_errors(q, k, v, packed_k, v)
    assert keys_only.output_error_values == 0.0
    assert keys_only.output_error_keys == keys_only.output_error > 0.0
    values_only = attention_errors(q, k, v, k, packed_v)
    assert (values_only.logit_rmse, values_only.top1_shift, values_only.softmax_kl) == (0, 0, 0)
    assert values_only.output_error_keys == 0.0
    assert values_only.output_error_values == values_only.output_error > 0.0


def test_a_shift_of_all_logits_moves_nothing_but_the_logits() -> None:
    """Softmax cannot see what all keys have in common."""
    q, k, v, _, _ = sample(1, 1, 1, 9, 20, 16)
    k = k.float()
    errors = attention_errors(q, k, v, k + 0.5, v)
    assert errors.logit_rmse > 0.1
    assert errors.top1_shift == 0.0
    assert errors.softmax_kl < 1e-6
    assert errors.output_error < 1e-5


def test_memory_is_bounded_by_the_block() -> None:
    """Ten times the queries take no more memory; a block of logits is held four times."""
    tensors = sample(1, 2, 4, 900, 600, 32)
    block = 4 * 600 * 50
    peaks = []
    for count in (90, 900):
        queries = tensors[0][:, :, :count].contiguous()
        with Allocations() as allocations:
            attention_errors(queries, *tensors[1:], block_bytes=block)
        peaks.append(allocations.peak)
    copies = 4 * 4 * 600 * 32
    assert peaks[1] <= peaks[0] + 1024
    assert 3.5 * block < peaks[1] - copies < 4.6 * block


def test_relative_error_and_sqnr() -> None:
    x = torch.tensor([[[[3.0, 4.0]], [[0.0, 12.0]]]])
    y = x + torch.tensor([[[[1.3, 0.0]], [[0.0, 0.0]]]])
    assert relative_error(x, y) == pytest.approx(0.1)
    assert sqnr_db(x, y) == pytest.approx(20.0)
    assert relative_error(x, x) == 0.0
    assert sqnr_db(x, x) == math.inf
    zero = torch.zeros_like(x)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(zero, x) == math.inf
    assert sqnr_db(zero, x) == -math.inf


def test_sums_are_fp64() -> None:
    """A million numbers of one size and one small error: FP32 sums would lose it."""
    x = torch.full((1, 1, 1000, 1000), 1000.0)
    y = x.clone()
    y[0, 0, 0, 0] += 1.0
    assert relative_error(x, y) == pytest.approx(1e-6, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({1: torch.zeros(1, 2, 21, 16)}, "same tokens in both"),
        ({0: torch.zeros(1, 2, 9, 8)}, "expected \\[1, a multiple of 2, any, 16\\]"),
        ({0: torch.zeros(1, 3, 9, 16)}, "a multiple of 2"),
        ({0: torch.zeros(2, 2, 9, 16)}, "expected \\[1"),
        ({0: torch.zeros(1, 2, 0, 16)}, "at least one query"),
        ({i: torch.zeros(1, 2, 0, 16) for i in range(1, 5)}, "one token"),
    ],
)
def test_misshapen_tensors_are_refused(change: dict[int, torch.Tensor], match: str) -> None:
    tensors = list(sample(1, 2, 2, 9, 20, 16))
    for index, tensor in change.items():
        tensors[index] = tensor
    with pytest.raises(ShapeError, match=match):
        attention_errors(*tensors)
    with pytest.raises(ShapeError, match="same tokens"):
        relative_error(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("place", "name"),
    list(enumerate(["queries", "keys", "values", "packed_keys", "packed_values"])),
)
def test_what_is_not_finite_is_refused_by_name(place: int, name: str, bad: float) -> None:
    """A NaN among logits would read as no shift and a divergence of 0."""
    tensors = [tensor.clone() for tensor in sample(1, 2, 2, 9, 20, 16)]
    tensors[place][0, 1, 3, 5] = bad
    with pytest.raises(NonFiniteError, match=rf"^{name} hold NaN or inf"):
        attention_errors(*tensors)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_refused(bad: float) -> None:
    x = torch.ones(1, 2, 3, 4)
    y = x.clone()
    y[0, 1, 2, 3] = bad
    with pytest.raises(NonFiniteError, match=r"^restored tensors"):
        relative_error(x, y)
    with pytest.raises(NonFiniteError, match=r"^original tensors"):
        sqnr_db(y, x)


@pytest.mark.parametrize("block_bytes", [4 * 40 * 3, 16 << 20])
def test_heads_and_groups_are_told_apart(block_bytes: int) -> None:
    """Each head, each group, and each of both against brute force over those queries alone."""
    q, k, v, packed_k, packed_v = sample(2, 2, 4, 9, 40, 16)
    groups = torch.tensor([1, 0, 1, 3, 3, 0, 1, 1, 0])
    sums = attention_sums(q, k, v, packed_k, packed_v, groups=groups, block_bytes=block_bytes)
    assert sums.selections == (6, 8, 0, 4)

    def expected(heads: list[int], queries: torch.Tensor) -> tuple[float, ...]:
        side = [x[:, [head // 2 for head in heads]] for x in (k, v, packed_k, packed_v)]
        return brute_force(q[:, heads][:, :, queries], *side)

    everything = torch.ones_like(groups, dtype=torch.bool)
    for head in range(4):
        assert astuple(sums.errors(head=head)) == pytest.approx(
            expected([head], everything), rel=1e-4
        )
        for group in (0, 1, 3):
            found = astuple(sums.errors(head=head, group=group))
            assert found == pytest.approx(expected([head], groups == group), rel=1e-4)
    for group in (0, 1, 3):
        found = astuple(sums.errors(group=group))
        assert found == pytest.approx(expected([0, 1, 2, 3], groups == group), rel=1e-4)
    assert astuple(sums.errors()) == pytest.approx(
        astuple(attention_errors(q, k, v, packed_k, packed_v, block_bytes=block_bytes)), rel=1e-12
    )
    with pytest.raises(ShapeError, match="holds no query"):
        sums.errors(group=2)


def test_groups_that_fit_no_queries_are_refused() -> None:
    tensors = sample(1, 1, 1, 3, 8, 4)
    for groups in (torch.tensor([0, 0]), torch.tensor([0, -1, 0]), torch.tensor([0.0, 1.0, 0.0])):
        with pytest.raises(ShapeError, match="groups have shape"):
            attention_sums(*tensors, groups=groups)
