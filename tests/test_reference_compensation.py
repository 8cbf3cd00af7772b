"""Query statistics and PSAC: what they claim to lower, they lower."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import QueryMoment, encode
from steadykv.config import CodecConfig
from steadykv.errors import ShapeError

from .codecs import sample_moment, sample_queries, sample_tokens


def given_error(heads: int = 2, tokens: int = 40, width: int = 48) -> tuple[Tensor, QueryMoment]:
    x = sample_tokens(1, heads, tokens, width, seed=5, dtype=torch.float32)
    return x[0], sample_moment(x)


def query_basis(moment: Tensor, count: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What PSAC stores of the strongest directions, and the two switches."""
    vectors, _, active, failed = ops.query_subspace(moment, count, rank)
    return vectors.to(torch.bfloat16), active, failed


def weighted(error: Tensor, moment: Tensor) -> Tensor:
    """e^T M e of each row, FP64."""
    e, m = error.double(), moment.double()
    return ((e @ m) * e).sum(-1)


@pytest.mark.parametrize("group", [1, 4, 7])
def test_moment_is_the_mean_outer_product(group: int) -> None:
    x = sample_tokens(2, 3, 4, 16)
    parts = [sample_queries(x, seed, group, count) for seed, count in ((1, 9), (2, 30), (3, 1))]
    moment = QueryMoment.empty(2, 3, 16)
    assert not moment.has_queries
    for part in parts:
        moment.update(part)
    queries = torch.cat(parts, 2).double()
    pooled = queries.unflatten(1, (3, group)).flatten(2, 3)  # query head i feeds head i·H // Hq
    expected = pooled.transpose(2, 3) @ pooled / pooled.shape[2]
    torch.testing.assert_close(moment.moment.double(), expected, rtol=1e-5, atol=1e-4)
    assert moment.count.eq(40 * group).all()
    assert moment.has_queries
    assert moment.nbytes == 2 * 3 * (4 * 16 * 16 + 8)


def test_folding_a_pending_mean_counts_every_query_once() -> None:
    x = sample_tokens(1, 2, 4, 16)
    whole, main, pending = (QueryMoment.empty(1, 2, 16) for _ in range(3))
    address = main.moment.data_ptr()
    for seed in range(4):
        queries = sample_queries(x, seed, 1, 5 + seed)
        whole.update(queries)
        (main if seed < 2 else pending).update(queries)
    main.fold(pending)
    torch.testing.assert_close(main.moment, whole.moment)
    assert torch.equal(main.count, whole.count)
    before = main.moment.clone()
    main.fold(QueryMoment.empty(1, 2, 16))
    assert torch.equal(main.moment, before)
    assert main.moment.data_ptr() == address
    main.reset()
    assert not main.moment.any()
    assert not main.has_queries


def test_queries_that_are_not_finite_do_not_spoil_the_mean() -> None:
    x = sample_tokens(1, 1, 4, 8)
    queries = sample_queries(x)
    clean = queries.clone()
    queries[0, 0, 3], clean[0, 0, 3] = math.nan, 0
    queries[0, 0, 4, 1], clean[0, 0, 4, 1] = math.inf, 0
    a, b = QueryMoment.empty(1, 1, 8), QueryMoment.empty(1, 1, 8)
    a.update(queries)
    b.update(clean)
    assert torch.equal(a.moment, b.moment)


def test_no_queries_change_nothing() -> None:
    moment = QueryMoment.empty(1, 2, 8)
    moment.update(torch.empty(1, 2, 0, 8))
    assert not moment.has_queries
    assert not moment.count.any()


@pytest.mark.parametrize("shape", [(1, 3, 4, 8), (2, 2, 4, 8), (1, 2, 4, 9), (2, 4, 8)], ids=str)
def test_queries_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="multiple of 2"):
        QueryMoment.empty(1, 2, 8).update(torch.zeros(shape))


def test_moments_of_the_wrong_shape_or_type() -> None:
    good, count = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, dtype=torch.int64)
    for moment, number in ((good[0], count), (good, count[0]), (good.double(), count)):
        with pytest.raises(ShapeError):
            QueryMoment(moment, number)
    with pytest.raises(ShapeError):
        QueryMoment(good, count.int())
    with pytest.raises(ShapeError, match="query moment"):
        encode(torch.zeros(1, 2, 4, 16), CodecConfig("quantwm"), stats=QueryMoment(good, count))


def test_channel_weight() -> None:
    moment = torch.diag_embed(torch.tensor([[1.0, 3.0], [0.0, 0.0], [5.0, 5.0], [math.inf, 1.0]]))
    weight, active = ops.channel_weight(moment, torch.tensor([4, 4, 0, 4]))
    assert weight.tolist() == [[0.5, 1.5], [1, 1], [1, 1], [1, 1]]
    assert active.tolist() == [1, 0, 0, 0]


def test_basis_spans_the_strongest_directions() -> None:
    _, moment = given_error()
    m = moment.moment[0]
    basis, active, failed = query_basis(m, moment.count[0], 8)
    assert basis.dtype == torch.bfloat16
    assert basis.shape == (2, 48, 8)
    assert active.tolist() == [1, 1]
    assert failed.tolist() == [0, 0]
    u = basis.double()
    torch.testing.assert_close(
        u.transpose(1, 2) @ u, torch.eye(8, dtype=torch.float64).expand(2, 8, 8), atol=0.02, rtol=0
    )
    energy = ((m.double() @ u) * u).sum(1)
    values = torch.linalg.eigvalsh(m.double()).flip(-1)[:, :8]
    torch.testing.assert_close(energy, values, rtol=0.02, atol=1e-3)
    vectors, energies, _, _ = ops.query_subspace(m, moment.count[0], 8)
    assert (vectors.dtype, energies.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(energies.double(), values)
    torch.testing.assert_close(m @ vectors, vectors * energies[:, None], rtol=1e-4, atol=1e-4)
    for head in range(2):
        for column in u[head].T:
            assert column[column.abs().argmax()] > 0


def test_a_column_whose_largest_entries_tie_takes_the_sign_of_the_first() -> None:
    vector = torch.tensor([0.0, -1.0, 1.0, 0.0])
    basis, _, _ = query_basis(torch.outer(vector, vector)[None], torch.tensor([1]), 1)
    assert basis[0, 1] > 0 > basis[0, 2]


def test_heads_without_queries_or_with_a_broken_moment_are_off() -> None:
    error, moment = given_error(heads=4)
    m, count = moment.moment[0].clone(), moment.count[0].clone()
    count[1] = 0
    m[2, 3, 4] = math.nan
    m[3, 0, 0] = math.inf
    basis, active, failed = query_basis(m, count, 8)
    assert active.tolist() == [1, 0, 0, 0]
    assert failed.tolist() == [0, 0, 1, 1]
    assert not basis[1:].any()
    for retain in ("row", "always"):
        codes, scales, _ = ops.compensate(error, basis, m, retain)
        assert codes[0].any()
        assert not codes[1:].any()
        assert not scales[1:].any()


def test_a_solver_that_does_not_converge_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK converges on every finite matrix we know, so the failure itself is made up."""
    _, moment = given_error(heads=3)
    solve = torch.linalg.eigh

    def stubborn(m: Tensor) -> tuple[Tensor, Tensor]:
        if (m == moment.moment[0, 1].double()).flatten(1).all(1).any():
            raise torch.linalg.LinAlgError("did not converge")
        return solve(m)

    expected, _, _ = query_basis(moment.moment[0], moment.count[0], 4)
    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    basis, active, failed = query_basis(moment.moment[0], moment.count[0], 4)
    assert active.tolist() == [1, 0, 1]
    assert failed.tolist() == [0, 1, 0]
    assert torch.equal(basis[[0, 2]], expected[[0, 2]])


def test_kept_rows_lower_the_expected_logit_error() -> None:
    error, moment = given_error()
    m = moment.moment[0]
    basis, _, _ = query_basis(m, moment.count[0], 8)
    codes, scales, saturated = ops.compensate(error, basis, m, "row")
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float16)
    assert not saturated.any()
    correction = scales[..., None].double() * codes.double() @ basis.double().transpose(1, 2)
    before, after = weighted(error, m), weighted(error - correction, m)
    assert (after <= before).all()
    assert after.sum() < 0.2 * before.sum()
    assert (codes.abs().amax(-1) == 127)[scales > 0].all()


def test_rows_that_would_do_harm_are_dropped() -> None:
    """A basis that has nothing to do with M: about half of the corrections hurt."""
    error, moment = given_error(tokens=200)
    generator = torch.Generator().manual_seed(2)
    m = torch.eye(48) + 30 * moment.moment[0] / moment.moment.abs().max()
    basis = torch.randn(2, 48, 3, generator=generator).bfloat16()
    codes, scales, _ = ops.compensate(error, basis, m, "row")
    everything, all_scales, _ = ops.compensate(error, basis, m, "always")
    correction = all_scales[..., None].double() * everything.double() @ basis.double().mT
    helps = weighted(error - correction, m) < weighted(error, m)
    assert 0 < helps.sum() < helps.numel()
    assert torch.equal(scales > 0, helps)
    assert torch.equal(codes, torch.where(helps[..., None], everything, 0))


def test_zero_error_needs_no_coefficients() -> None:
    error, moment = given_error()
    basis, _, _ = query_basis(moment.moment[0], moment.count[0], 8)
    codes, scales, _ = ops.compensate(torch.zeros_like(error), basis, moment.moment[0], "always")
    assert not codes.any()
    assert not scales.any()


def test_scales_of_coefficients_saturate_and_are_counted() -> None:
    error, moment = given_error()
    error = error / error.abs().amax()
    error[1, 7] *= 1e9
    basis, _, _ = query_basis(moment.moment[0], moment.count[0], 8)
    codes, scales, saturated = ops.compensate(error, basis, moment.moment[0], "always")
    assert saturated.tolist() == [0, 1]
    assert scales.isfinite().all()
    assert codes[1, 7].abs().max() == 127
