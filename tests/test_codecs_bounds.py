"""No decoded number is farther off than the docstring of its codec says: dense, PSAC.

`test_codecs_forms.py` has the codecs that store groups and clusters alone, `test_codecs_kvquant.py`
kvquant, `test_reference_rotation.py` quarot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload, QueryMoment, encode
from steadykv.config import CodecConfig

from .codecs import sample_moment, sample_tokens
from .grid_bounds import error_bound

SEEDS = st.integers(0, 1000)
SCALES = st.sampled_from([1e-8, 1e-2, 1.0, 30.0, 1e4])
TOKENS = st.sampled_from([1, 7, 40])
GRIDS = {"int8": "affine_zero", "fp8": "affine_min_fp8"}


def config(method: str, **fields: Any) -> CodecConfig:
    return CodecConfig(method, centroids=8, **fields)


def residual_of(x: Tensor, payload: Payload) -> Tensor:
    """What the centroids of one stage leave of FP32 [1, H, S, D]."""
    assert payload.centroids is not None
    means = ops.gather_centroids(payload.centroids[0, :, 0], payload.tensors["ids"][0, :, 0].long())
    return x - means


def grid_bound(x: Tensor, payload: Payload) -> Tensor:
    """The bound of the residual's grid."""
    codec, residual = payload.config, residual_of(x, payload)
    base = payload.tensors.get("scale_base")
    grid = GRIDS[str(codec.metadata)]
    bound = error_bound(residual, grid, codec.bits, codec.group_size, base, codec.include_zero)
    return bound + x.abs() * 2**-20


def correction_bound(payload: Payload) -> Tensor | float:
    """By how much PSAC may add to the norm of a token's error: [B, H, S], or 0 without PSAC."""
    if "basis" not in payload.tensors:
        return 0.0
    rank, alpha = payload.tensors["basis"].shape[-1], payload.tensors["coef_scales"].float()
    if "row_index" in payload.tensors:  # sparse: the largest of any row
        alpha = alpha.max()
    return rank**0.5 * (0.57 * alpha + 2**-17)


@given(SEEDS, st.sampled_from([1e-42, 1e-8, 1.0, 1e4, 8e37]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dense_numbers_are_rounded_once(dtype: torch.dtype, seed: int, scale: float) -> None:
    x = (sample_tokens(1, 2, 20, 50, seed=seed, dtype=torch.float32) * scale).to(dtype)
    x = x.nan_to_num(0.0, 0.0, 0.0)  # Inf counts as 0
    x[..., 0] = torch.finfo(dtype).max
    error = (encode(x, CodecConfig("bf16")).decode(torch.float64) - x.double()).abs()
    assert (error <= 2**-8 * x.double().abs() + 2**-134).all()
    if dtype == torch.bfloat16:
        assert not error.any()


CORRECTED = [
    config("quantwm"),
    config("quantwm", bits=3, rank=3),
    config("quantwm", bits=4, rank=50, retain="always"),
    config("quantwm", rank=0),
    config("quantwm", coef_layout="auto"),
    config("quantwm", include_zero=False, group_size=16),
    config("quantwm", metadata="fp8", centroid_format="fp8"),
]


def named(codec: CodecConfig) -> str:
    changed = {k: v for k, v in codec.to_dict().items() if v != CodecConfig().to_dict()[k]}
    return " ".join(str(value) for name, value in changed.items() if name != "centroids")


@pytest.mark.parametrize("codec", CORRECTED, ids=named)
@given(SEEDS, SCALES, TOKENS)
def test_no_token_is_farther_off_than_the_docstring_says(
    codec: CodecConfig, seed: int, scale: float, tokens: int
) -> None:
    """A number by what its grid allows; and PSAC, which moves numbers, adds little to a norm."""
    x = sample_tokens(1, 2, tokens, 50, seed=seed, dtype=torch.float32) * scale
    for stats in (None, sample_moment(x, seed)):
        payload = encode(x, codec, stats=stats)
        assume(not payload.flags["saturated"].any())
        assert not payload.flags["psac_failed"].any()
        error, bound = payload.decode(torch.float32) - x, grid_bound(x, payload)
        before = without_correction(payload).decode(torch.float32) - x
        assert (before.abs() <= bound).all()
        rounding = x.norm(dim=-1) * 2**-20
        allowed = before.norm(dim=-1) + correction_bound(payload) + rounding
        assert (error.norm(dim=-1) <= allowed).all()


def without_correction(payload: Payload) -> Payload:
    tensors = dict(payload.tensors)
    if "coef_scales" in tensors:
        tensors["coef_scales"] = torch.zeros_like(tensors["coef_scales"])
    return replace(payload, tensors=tensors)


@given(SEEDS, st.sampled_from([1e-2, 1.0, 30.0]))
def test_rows_that_are_kept_lower_the_error_that_queries_see(seed: int, scale: float) -> None:
    """e^T M e of a token, against the same payload without its correction."""
    x = sample_tokens(1, 2, 40, 50, seed=seed, dtype=torch.float32) * scale
    stats = sample_moment(x, seed)
    payload = encode(x, config("quantwm"), stats=stats)
    assume(not payload.flags["saturated"].any())
    before, after = (weighted(x, p, stats) for p in (without_correction(payload), payload))
    assert (after <= before * (1 + 1e-4)).all()
    assert float(after.sum()) < 0.9 * float(before.sum())


def weighted(x: Tensor, payload: Payload, stats: QueryMoment) -> Tensor:
    error = payload.decode(torch.float64) - x.double()
    return ((error @ stats.moment.double()) * error).sum(-1)


def test_what_psac_adds_is_needed_and_not_much() -> None:
    """It is the rounding of the coefficients, which comes near what is stated."""
    x = sample_tokens(1, 2, 400, 64, dtype=torch.float32)
    payload = encode(x, config("quantwm", rank=32, retain="always"), stats=sample_moment(x))
    codes, alpha = payload.tensors["coef_codes"], payload.tensors["coef_scales"].float()
    basis = payload.tensors["basis"].float()
    error = x - without_correction(payload).decode(torch.float32)
    wanted = error @ basis
    off = (wanted - alpha[..., None] * codes).norm(dim=-1)
    assert (off <= correction_bound(payload)).all()
    assert float((off / correction_bound(payload)).max()) > 0.5


@pytest.mark.parametrize("method", ["qvg", "qvg4", "quantwm"])
@given(SEEDS, SCALES, TOKENS)
def test_refit_never_raises_the_squared_error_of_a_head(
    method: str, seed: int, scale: float, tokens: int
) -> None:
    x = sample_tokens(1, 3, tokens, 50, seed=seed, dtype=torch.float32) * scale
    found = [head_errors(x, config(method, refit=flag)) for flag in (False, True)]
    assert (found[1] <= found[0] * (1 + 1e-4) + 1e-30).all()


def head_errors(x: Tensor, codec: CodecConfig) -> Tensor:
    return (encode(x, codec).decode(torch.float64) - x.double()).square().sum((-2, -1))


@given(SEEDS, SCALES, TOKENS)
def test_searched_scales_never_raise_the_squared_error_of_a_group(
    seed: int, scale: float, tokens: int
) -> None:
    x = sample_tokens(1, 2, tokens, 48, seed=seed, dtype=torch.float32) * scale
    found = []
    for flag in (False, True):
        decoded = encode(x, config("qvg4", scale_search=flag, group_size=16)).decode(torch.float64)
        found.append((decoded - x.double()).square().unflatten(-1, (3, 16)).sum(-1))
    floor = (x.double().abs().amax() * 2**-20) ** 2 * 16  # what FP32 sums leave
    assert (found[1] <= found[0] * (1 + 1e-4) + floor).all()


@given(SEEDS, SCALES, TOKENS)
def test_groups_without_zero_are_cut_off_by_their_distance(
    seed: int, scale: float, tokens: int
) -> None:
    x = sample_tokens(1, 2, tokens, 50, seed=seed, dtype=torch.float32) * scale + scale
    payload = encode(x, config("qvg4", include_zero=False, group_size=8))
    assume(not payload.flags["saturated"].any())
    assert ((payload.decode(torch.float32) - x).abs() <= grid_bound(x, payload)).all()


def test_queries_of_the_samples_have_a_strong_subspace() -> None:
    """What the cases above rest on: PSAC has something to store."""
    x = sample_tokens(1, 2, 40, 50)
    stats = sample_moment(x)
    values = torch.linalg.eigvalsh(stats.moment.double())
    assert (values[..., -8:].sum(-1) / values.sum(-1) > 0.6).all()
