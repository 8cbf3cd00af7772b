"""Feedback rounding: against its definition without a factor, and where it does not apply."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload, QueryMoment, encode
from steadykv.config import CodecConfig

from .codecs import sample_moment, sample_tokens

STEADY = CodecConfig("steady", centroids=16)
QUANTWM = CodecConfig("quantwm", centroids=16)


def given(
    heads: int = 2, tokens: int = 60, width: int = 40, rank: int = 4, damping: float = 0.1
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Residuals, moments, H in FP64, and what `feedback_factor` makes of them."""
    x = sample_tokens(1, heads, tokens, width, seed=5, dtype=torch.float32)
    stats = sample_moment(x)
    m, count = stats.moment[0], stats.count[0]
    u, values, _, _ = ops.query_subspace(m, count, rank)
    made = ops.feedback_factor(m, count, u, values, damping)
    u = u.double()
    ridge = damping * m.double().diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    h = m.double() - (u * values.double()[:, None]) @ u.mT + ridge * torch.eye(width)
    return x[0] - x[0].mean(1, keepdim=True), m, count, h, made


def grid_of(tensors: dict[str, Tensor], bits: int, size: int, width: int) -> tuple[Tensor, Tensor]:
    """Stored scale and zero point of every channel, FP32 [N, S, D]."""
    codes = tensors["scale_codes"]
    heads, tokens, groups = codes.shape
    scale = tensors["scale_base"].float()[:, None, None] * codes
    zeros = ops.unpack(tensors["zeros"], bits, tokens * groups).view(heads, tokens, groups).float()
    return tuple(t.repeat_interleave(size, -1)[..., :width] for t in (scale, zeros))  # type: ignore[return-value]


def one_by_one(
    x: np.ndarray, order: list[int], factor: np.ndarray, scale: np.ndarray, zero: np.ndarray
) -> list[int]:
    """One token, number by number in FP32, as the method is written down."""
    rest, codes = x[order].copy(), [0] * len(order)
    for i, channel in enumerate(order):
        s, z = scale[channel], zero[channel]
        step = np.float32(np.rint(rest[i] / s)) + z if s else z
        code = min(max(step, np.float32(0)), np.float32(3))
        codes[channel] = int(code)
        error = np.float32((rest[i] - s * (code - z)) / factor[i, i])
        for j in range(i + 1, len(order)):
            rest[j] = rest[j] - np.float32(error * factor[i, j])
    return codes


@pytest.mark.parametrize("size", [16, 24, 64])
def test_codes_number_by_number(size: int) -> None:
    x, _, _, _, (order, factor, active, _) = given(tokens=20)
    assert active.all()
    tensors, saturated = ops.feedback_quantize(x, order, factor, 2, size)
    assert not saturated.any()
    found = ops.unpack(tensors["codes"], 2, 40)
    scale, zero = grid_of(tensors, 2, size, 40)
    for n in range(2):
        for s in range(20):
            expected = one_by_one(
                x[n, s].numpy(), order[n].tolist(), factor[n].numpy(),
                scale[n, s].numpy(), zero[n, s].numpy(),
            )  # fmt: skip
            assert found[n, s].tolist() == expected


@pytest.mark.parametrize("rank", [0, 4])
def test_the_rest_moves_to_where_the_weighted_error_is_least(rank: int) -> None:
    """With the errors made so far fixed, the others are those that minimize e^T H e: solved anew
    for every channel, without any factor."""
    x, _, _, h, (order, factor, _, _) = given(rank=rank)
    tensors, _ = ops.feedback_quantize(x, order, factor, 2, 20)
    found = ops.unpack(tensors["codes"], 2, 40)
    scale, zero = (t.double() for t in grid_of(tensors, 2, 20, 40))
    differing = 0
    for n in range(2):
        at = order[n]
        hp, xp, s, z = h[n][at][:, at], x[n].double()[:, at], scale[n][:, at], zero[n][:, at]
        errors = torch.zeros_like(xp)
        for i in range(40):
            target = xp[:, i]
            if i:  # d/de_rest (e^T H e) = 0
                rest = torch.linalg.solve(hp[i:, i:], hp[i:, :i] @ errors[:, :i].T)
                target = target + rest[0]
            code = ((target / s[:, i]).round() + z[:, i]).clamp(0, 3)
            errors[:, i] = xp[:, i] - s[:, i] * (code - z[:, i])
            differing += int((code != found[n, :, at[i]]).sum())
    assert differing <= 4  # of 4,800: what FP32 rounds to the other side of a half


def test_the_factor_is_that_of_the_inverse() -> None:
    _, _, _, h, (order, factor, active, failed) = given()
    assert (order.dtype, factor.dtype) == (torch.int64, torch.float32)
    assert active.tolist() == [1, 1]
    assert failed.tolist() == [0, 0]
    for n in range(2):
        diagonal = h[n].diagonal()
        assert order[n].tolist() == sorted(range(40), key=lambda c: -float(diagonal[c]))
        f = factor[n].double()
        assert torch.equal(f, f.triu())
        product = f @ h[n][order[n]][:, order[n]] @ f.T  # F^T F = c·inv(H) means F H F^T = c·I
        size = product.diagonal().mean()
        exponent = math.log2(float(size)) / 2  # c is the square of a power of two
        assert exponent == pytest.approx(round(exponent), abs=1e-6)
        torch.testing.assert_close(product / size, torch.eye(40).double(), rtol=0, atol=1e-4)
        assert 0.5 <= f[0, 0] < 2


def test_what_remains_after_compensation_is_smaller() -> None:
    """The point of it: e^T M e after PSAC falls, at the same bytes."""
    for width, low, high in ((64, 0.8, 0.97), (128, 0.65, 0.9)):
        x = sample_tokens(1, 2, 300, width)
        stats = sample_moment(x)
        errors = []
        for config in (STEADY, QUANTWM):
            payload = encode(x, config, stats=stats)
            error = (payload.decode(torch.float32) - x.float())[0].double()
            errors.append(float(((error @ stats.moment[0].double()) * error).sum(-1).mean()))
            assert payload.nbytes == QUANTWM.payload_nbytes(1, 2, 300, width)
        assert low < errors[0] / errors[1] < high


def test_no_factor_is_plain_rounding() -> None:
    """Bit for bit: without statistics, queries or a moment; and that is no failure."""
    x, m, count, _, (_, factor, _, _) = given(heads=3)
    count = count.clone()
    count[1] = 0
    m = m.clone()
    m[2] = 0
    u, values, _, _ = ops.query_subspace(m, count, 4)
    order, factor, active, failed = ops.feedback_factor(m, count, u, values, 0.1)
    assert active.tolist() == [1, 0, 0]
    assert failed.tolist() == [0, 0, 0]
    tensors, _ = ops.feedback_quantize(x, order, factor, 2, 16)
    plain, _ = ops.group_quantize(x, "affine_zero", 2, 16)
    assert tensors.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensors[name][1:], tensor[1:]), name
    assert not torch.equal(tensors["codes"][0], plain["codes"][0])
    for name in ("scale_codes", "scale_base", "zeros"):  # fixed before anything moves
        assert torch.equal(tensors[name], plain[name])


def moment_with(stats: QueryMoment, head: int, change: str) -> QueryMoment:
    moment = stats.moment.clone()
    if change == "nan":
        moment[0, head, 3, 4] = math.nan
    elif change == "inf":
        moment[0, head, 0, 0] = math.inf
    else:  # no sum of squares: its most negative direction is not among the strongest ones
        moment[0, head] -= 10 * torch.eye(moment.shape[-1]) * moment[0, head].diagonal().mean()
    return QueryMoment(moment, stats.count.clone())


@pytest.mark.parametrize("change", ["nan", "inf", "indefinite"])
@pytest.mark.parametrize("rank", [0, 8])
def test_a_failed_factor_is_counted_and_leaves_plain_rounding(change: str, rank: int) -> None:
    x = sample_tokens(1, 3, 70, 64)
    stats = moment_with(sample_moment(x), 1, change)
    config = CodecConfig("steady", centroids=16, rank=rank)
    payload = encode(x, config, stats=stats)
    assert payload.flags["feedback_active"].tolist() == [[1, 0, 1]]
    assert payload.flags["feedback_failed"].tolist() == [[0, 1, 0]]
    plain = encode(x, CodecConfig("quantwm", centroids=16, rank=rank), stats=stats)
    assert torch.equal(payload.tensors["codes"][:, 1], plain.tensors["codes"][:, 1])
    assert not torch.equal(payload.tensors["codes"][:, 0], plain.tensors["codes"][:, 0])
    assert payload.decode().isfinite().all()


def test_eigenvectors_that_are_missing_count_as_a_failed_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LAPACK converges on every finite matrix we know, so the failure itself is made up."""
    x = sample_tokens(1, 2, 70, 64)
    stats = sample_moment(x)
    solve = torch.linalg.eigh

    def stubborn(m: Tensor) -> tuple[Tensor, Tensor]:
        if (m == stats.moment[0, 1].double()).flatten(1).all(1).any():
            raise torch.linalg.LinAlgError("did not converge")
        return solve(m)

    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    payload = encode(x, STEADY, stats=stats)
    assert payload.flags["psac_failed"].tolist() == [[0, 1]]
    assert payload.flags["feedback_failed"].tolist() == [[0, 1]]
    assert payload.flags["feedback_active"].tolist() == [[1, 0]]
    plain = encode(x, QUANTWM, stats=stats)
    assert torch.equal(payload.tensors["codes"][:, 1], plain.tensors["codes"][:, 1])


def test_without_statistics_it_is_quantwm() -> None:
    x = sample_tokens(2, 2, 70, 64)
    for stats in (None, QueryMoment.empty(2, 2, 64)):
        payload, plain = encode(x, STEADY, stats=stats), encode(x, QUANTWM, stats=stats)
        assert payload.tensors.keys() == plain.tensors.keys()
        for name, tensor in plain.tensors.items():
            assert torch.equal(payload.tensors[name], tensor), name
        assert not payload.flags["feedback_active"].any()
        assert not payload.flags["feedback_failed"].any()


@pytest.mark.parametrize("layout", ["dense", "auto"])
def test_a_quantwm_decoder_reads_it(layout: str) -> None:
    """The payload holds the same tensors; the feedback is the encoder's alone."""
    x = sample_tokens(2, 2, 70, 64)
    stats = sample_moment(x)
    configs = [CodecConfig(m, centroids=16, coef_layout=layout) for m in ("steady", "quantwm")]
    payload, plain = (encode(x, config, stats=stats) for config in configs)
    assert list(payload.tensors) == list(plain.tensors)
    assert payload.nbytes == plain.nbytes
    read = Payload(configs[1], payload.shape, payload.tensors)
    assert torch.equal(read.decode(), payload.decode())
    assert set(payload.flags) - set(plain.flags) == {"feedback_active", "feedback_failed"}


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-40, 2.0**40, 2.0**100], ids=str)
def test_the_size_of_the_queries_does_not_matter(size: float) -> None:
    """Queries times a power of two give the same payload: nothing over- or underflows."""
    x = sample_tokens(1, 2, 70, 64)
    stats = sample_moment(x)
    scaled = QueryMoment(stats.moment * size, stats.count)
    assert encode(x, STEADY, stats=scaled) == encode(x, STEADY, stats=stats)


@pytest.mark.parametrize("value", [1e4, 1e30, 3e38, 1e-8, 1e-30], ids=str)
def test_huge_and_tiny_residuals_stay_finite(value: float) -> None:
    """Beyond the end of the grid the errors are huge, and they are fed back all the same."""
    x, _, _, _, (order, factor, _, _) = given()
    x = x / x.abs().max() * value
    tensors, saturated = ops.feedback_quantize(x, order, factor, 2, 16)
    assert saturated.eq(value > 65504 * 255 * 3 / 2).all()
    decoded = ops.group_dequantize(tensors, "affine_zero", 2, 16, 40, 0, 60)
    assert decoded.isfinite().all()
    assert (decoded - x).abs().max() <= 2 * value
    for name, tensor in ops.group_quantize(x, "affine_zero", 2, 16)[0].items():
        assert name == "codes" or torch.equal(tensors[name], tensor), name


def test_a_group_without_a_scale_passes_its_error_on() -> None:
    """Tiny numbers beside large ones: their scale is one step of the base, their values are zero
    or not, and the others make up for it; all-zero tokens stay exactly zero."""
    x, _, _, _, (order, factor, _, _) = given()
    x[:, ::3, :16] *= 1e-6
    x[:, ::5] = 0
    tensors, _ = ops.feedback_quantize(x, order, factor, 2, 16)
    decoded = ops.group_dequantize(tensors, "affine_zero", 2, 16, 40, 0, 60)
    assert not decoded[:, ::5].any()
    assert decoded.isfinite().all()
    zero, _ = ops.feedback_quantize(torch.zeros_like(x), order, factor, 2, 16)
    assert not any(zero[name].any() for name in ("codes", "zeros", "scale_base"))


def test_much_damping_feeds_nothing_back() -> None:
    shares = []
    for damping in (0.1, 1e3):
        x, *_, (order, factor, _, _) = given(rank=1, damping=damping)
        tensors, _ = ops.feedback_quantize(x, order, factor, 2, 16)
        plain, _ = ops.group_quantize(x, "affine_zero", 2, 16)
        differing = ops.unpack(tensors["codes"], 2, 40) != ops.unpack(plain["codes"], 2, 40)
        shares.append(float(differing.double().mean()))
    assert 0.1 < shares[0] < 0.6
    assert shares[1] < 0.005
