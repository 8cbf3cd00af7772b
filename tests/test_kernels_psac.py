"""The PSAC kernels against their reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from steadykv import ops

from .codecs import sample_moment, sample_tokens
from .gpu_checks import check_capture, check_compilations, check_repeatable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_memory")
# What the kernel states of a product: 2^-18 of the magnitudes it adds up.
PRODUCT = 2.0**-18


def given(
    tokens: int,
    width: int,
    *,
    heads: int = 2,
    rank: int = 8,
    grid: str = "affine_zero",
    bits: int = 2,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    include_zero: bool = True,
) -> dict:
    """What `compensate_clustered` is called with, from the reference."""
    x = sample_tokens(1, heads, tokens, width, seed=tokens)
    stats = sample_moment(x)
    x, moment = x[0].to(DEVICE), stats.moment[0].to(DEVICE)
    centroids = x[:, :: max(1, tokens // 9)][:, :9].bfloat16().contiguous()
    with ops.use_backend("reference"):
        ids = ops.assign_centroids(x.float(), centroids)
        tensors, _ = ops.quantize_clustered(
            x.float(), centroids, ids, grid, bits, size, include_zero=include_zero
        )
        vectors, *_ = ops.query_subspace(moment, stats.count[0].to(DEVICE), rank)
    return {
        "x": x.to(dtype),
        "centroids": centroids,
        "ids": ids,
        "tensors": tensors,
        "grid": grid,
        "bits": bits,
        "group_size": size,
        "basis": vectors.bfloat16(),
        "moment": moment,
        "retain": "row",
    }


def error_of(case: dict) -> Tensor:
    """x - (mu[id] + rounded residual), FP64 from the FP32 of the reference."""
    _, tokens, width = case["x"].shape
    with ops.use_backend("reference"):
        rounded = ops.group_dequantize(
            case["tensors"], case["grid"], case["bits"], case["group_size"], width, 0, tokens
        )
        x = case["x"].float()
        return ops.subtract_centroids(x, case["centroids"], case["ids"], rounded=rounded).double()


def check(case: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and counts are the reference's, but where a bound says they may not be."""
    expected, alpha, lost = ops.compensate_clustered(**case, backend="reference")
    codes, scales, saturated = ops.compensate_clustered(**case, backend="triton")
    assert (codes.dtype, scales.dtype, saturated.dtype) == (torch.int8, torch.float16, torch.int64)
    assert torch.equal(saturated, lost)
    error, u, m = error_of(case), case["basis"].double(), case["moment"].double()
    wanted, unsure = error @ u, PRODUCT * (error.abs() @ u.abs())
    stored = alpha[..., None].double() * expected.double()
    if case["retain"] == "row":
        kept = scales != 0
        linear, quadratic = error @ (m @ u), u.mT @ m @ u
        everything = ops.compensate_clustered(**{**case, "retain": "always"}, backend="reference")
        stored = everything[1][..., None].double() * everything[0].double()
        gain = 2 * (stored * linear).sum(-1) - ((stored @ quadratic) * stored).sum(-1)
        magnitude = (stored.abs() * (error.abs() @ (m.abs() @ u.abs()))).sum(-1)
        flips = kept != (alpha != 0)
        assert (gain.abs()[flips] <= 8 * PRODUCT * magnitude[flips]).all()
        assert flips.sum() <= 0.01 * flips.numel()
        same = kept & ~flips
    else:
        same = torch.ones_like(scales, dtype=torch.bool)
    step = alpha.double()[same]
    one_ulp = (scales.double()[same] - step).abs() <= step * 2**-10
    assert one_ulp.all()
    assert (scales[same] != alpha[same]).sum() <= 0.01 * same.sum()
    off = (codes[same].int() - expected[same].int()).abs()
    assert (off <= 1).all()
    ratio = wanted[same] / step[:, None].clamp(min=1e-30)
    from_half = (ratio - ratio.floor() - 0.5).abs()
    # A scale that FP16 rounded to the other side moves the ratio by up to 2^-10 of it.
    moved = torch.where(scales[same] == alpha[same], 0.0, 2**-10)[:, None] * ratio.abs()
    allowed = 4 * unsure[same] / step[:, None].clamp(min=1e-30) + moved + 2**-20
    assert (from_half[off > 0] <= allowed[off > 0]).all()
    # Next to a half the reference's own FP32 sum may be the one that is off.
    wrong = (off > 0) & (codes[same] != ratio.round())
    assert wrong.sum() <= 0.002 * off.numel()
    assert not codes[scales == 0].any()
    return codes, scales, saturated


@pytest.mark.parametrize(
    ("width", "size", "bits", "grid"),
    [
        (64, 64, 2, "affine_zero"),
        (128, 64, 2, "affine_zero"),
        (80, 64, 3, "affine_zero"),
        (96, 16, 4, "affine_zero"),
        (64, 24, 2, "affine_zero"),
        pytest.param(256, 64, 4, "affine_zero", marks=pytest.mark.cuda),
        (50, 14, 3, "affine_zero"),
        (64, 32, 2, "affine_min_fp8"),
        (80, 24, 4, "affine_min_fp8"),
    ],
)
def test_coefficients_are_those_of_the_reference(
    width: int, size: int, bits: int, grid: str
) -> None:
    check(given(37, width, size=size, bits=bits, grid=grid))


@pytest.mark.parametrize("tokens", [1, 63, 64, 131])
def test_any_number_of_tokens(tokens: int) -> None:
    check(given(tokens, 64))


@pytest.mark.parametrize("rank", [1, 3, 17, 32, 40])
def test_any_rank(rank: int) -> None:
    codes, _, _ = check(given(40, 64, rank=rank))
    assert codes.shape == (2, 40, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_both_types(dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("checked on a GPU")
    check(given(70, 64, dtype=dtype))


def test_options() -> None:
    check({**given(70, 64), "retain": "always"})
    check(given(70, 64, include_zero=False))
    case = given(70, 64)
    check({**case, "centroids": case["centroids"].float() * 1.001})


def test_rows_that_would_do_harm_are_dropped() -> None:
    case = given(100, 64, rank=3)
    generator = torch.Generator().manual_seed(2)
    case["basis"] = (torch.randn(2, 64, 3, generator=generator) / 8).bfloat16().to(DEVICE)
    m = case["moment"]
    case["moment"] = torch.eye(64, device=DEVICE) + 30 * m / m.abs().max()
    _, scales, _ = check(case)
    assert 0.1 < (scales == 0).double().mean() < 0.9


def test_no_tokens_give_no_coefficients() -> None:
    case = given(8, 64)
    case["x"], case["ids"] = case["x"][:, :0], case["ids"][:, :0]
    case["tensors"] = {
        name: t if name == "scale_base" else t[:, :0] for name, t in case["tensors"].items()
    }
    codes, scales, saturated = ops.compensate_clustered(**case, backend="triton")
    assert codes.shape == (2, 0, 8)
    assert scales.shape == (2, 0)
    assert saturated.tolist() == [0, 0]


def test_heads_that_are_off_store_nothing() -> None:
    case = given(70, 64)
    case["basis"][1] = 0
    case["moment"][1, 3, 4] = math.nan
    codes, scales, _ = ops.compensate_clustered(**case, backend="triton")
    assert codes[0].any()
    assert not codes[1].any()
    assert not scales[1].any()


def test_scales_that_saturate_are_counted() -> None:
    case = given(70, 64)
    case["retain"] = "always"
    x = case["x"]
    x[1, 65:68] *= 1e9
    with ops.use_backend("reference"):
        case["tensors"], _ = ops.quantize_clustered(
            x, case["centroids"], case["ids"], "affine_zero", 2, 64
        )
    codes, scales, saturated = ops.compensate_clustered(**case, backend="triton")
    assert saturated.tolist() == [0, 3]
    assert scales.isfinite().all()
    assert (codes[1, 65:68].abs().amax(-1) == 127).all()


def test_heads_do_not_depend_on_their_neighbours() -> None:
    case = given(70, 64, heads=3)
    together = ops.compensate_clustered(**case, backend="triton")
    per_head = ("x", "centroids", "ids", "basis", "moment")
    for n in range(3):
        one = {name: case[name][n : n + 1] for name in per_head}
        tensors = {name: t[n : n + 1] for name, t in case["tensors"].items()}
        alone = ops.compensate_clustered(**{**case, **one, "tensors": tensors}, backend="triton")
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[n])


@pytest.mark.cuda
def test_on_a_gpu_bytes_repeat_and_graphs_capture() -> None:
    for width, grid in ((128, "affine_zero"), (64, "affine_min_fp8")):
        case = given(3001, width, grid=grid, dtype=torch.bfloat16)
        check(case)

        def call(case: dict = case) -> tuple[Tensor, ...]:
            return ops.compensate_clustered(**case, backend="triton")

        check_repeatable(call)
        check_capture(call)


@pytest.mark.cuda
def test_on_a_gpu_a_new_length_compiles_nothing() -> None:
    cases = {tokens: given(tokens, 64, dtype=torch.bfloat16) for tokens in range(90, 1300, 61)}
    check_compilations(lambda n: ops.compensate_clustered(**cases[n], backend="triton"), cases)
