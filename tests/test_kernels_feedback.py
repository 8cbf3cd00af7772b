"""The feedback rounding kernels against their reference: interpreted on a CPU, compiled on a GPU.

The reference fuses no multiply-add and the kernel keeps its order, so every byte is equal.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steadykv import ops

from .codecs import sample_moment, sample_tokens
from .gpu_checks import check_capture, check_compilations, check_repeatable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def given(
    tokens: int, width: int, *, heads: int = 2, rank: int = 4, moved: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals, order and factor."""
    x = sample_tokens(1, heads, tokens, width, seed=tokens, dtype=torch.float32)
    stats = sample_moment(x)
    m, count = stats.moment[0].to(DEVICE), stats.count[0].to(DEVICE)
    with ops.use_backend("reference"):
        u, values, _, _ = ops.query_subspace(m, count, rank)
        order, factor, active, _ = ops.feedback_factor(
            m, count if moved else 0 * count, u, values, 0.1
        )
    assert active.all() == moved
    x = x[0].to(DEVICE)
    return x - x.mean(1, keepdim=True), order, factor


def check(
    x: Tensor, order: Tensor, factor: Tensor, bits: int, size: int, include_zero: bool = True
) -> dict[str, Tensor]:
    (found, lost), (expected, expected_lost) = (
        ops.feedback_quantize(x, order, factor, bits, size, include_zero=include_zero, backend=name)
        for name in ("triton", "reference")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert lost.dtype == torch.int64
    assert torch.equal(lost, expected_lost)
    return found


@pytest.mark.parametrize(
    ("width", "size", "bits"),
    [
        (40, 16, 2),
        (18, 7, 3),
        (16, 8, 4),
        pytest.param(64, 64, 2, marks=pytest.mark.cuda),
        pytest.param(50, 14, 3, marks=pytest.mark.cuda),
        pytest.param(80, 64, 2, marks=pytest.mark.cuda),
        pytest.param(96, 32, 4, marks=pytest.mark.cuda),
        pytest.param(128, 64, 2, marks=pytest.mark.cuda),
        pytest.param(256, 64, 3, marks=pytest.mark.cuda),
    ],
)
def test_every_byte_is_that_of_the_reference(width: int, size: int, bits: int) -> None:
    check(*given(37, width, heads=1), bits, size)


@pytest.mark.parametrize("tokens", [1, 128, 131])
def test_any_number_of_tokens(tokens: int) -> None:
    check(*given(tokens, 8, heads=1), 3, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_clusters_leave(dtype: torch.dtype) -> None:
    x, order, factor = given(150, 24)
    tokens = (3 * x).to(dtype)
    centroids, ids = tokens[:, :9].float() * 0.9, torch.arange(150, device=DEVICE) % 9
    for means in (centroids, centroids.bfloat16()):
        given_ids = ids.expand(2, 150)
        found, expected = (
            ops.feedback_quantize_clustered(
                rows, means, given_ids, order, factor, 2, 8, backend=name
            )
            for name, rows in (("triton", tokens), ("reference", tokens.float()))
        )
        for name, tensor in expected[0].items():
            assert torch.equal(found[0][name], tensor), name
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_the_range_without_zero(sign: int) -> None:
    x, order, factor = given(40, 16, heads=1)
    x = sign * (x.abs() + 3) if sign else x
    check(x, order, factor, 2, 8, include_zero=False)


def test_no_factor_is_plain_rounding() -> None:
    x, order, factor = given(40, 16, moved=False)
    found = check(x, order, factor, 2, 16)
    plain, _ = ops.group_quantize(x, "affine_zero", 2, 16, backend="reference")
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("value", [1e4, 1e30, 3e38, 1e-8, 1e-30], ids=str)
def test_huge_and_tiny_residuals(value: float) -> None:
    x, order, factor = given(20, 16, heads=1)
    check(x / x.abs().max() * value, order, factor, 2, 8)


def test_groups_and_tokens_of_zeros() -> None:
    x, order, factor = given(40, 16, heads=1)
    x[:, ::3, :8] *= 1e-6
    x[:, ::5] = 0
    check(x, order, factor, 2, 8)
    found = check(torch.zeros_like(x), order, factor, 2, 8)
    assert not any(found[name].any() for name in ("codes", "zeros", "scale_base"))


@pytest.mark.cuda
def test_on_a_gpu_bytes_repeat_and_graphs_capture() -> None:
    x, order, factor = given(3001, 128, heads=3, rank=8)
    check(x, order, factor, 2, 64)

    def call() -> list[Tensor]:
        tensors, lost = ops.feedback_quantize(x, order, factor, 2, 64, backend="triton")
        return [*tensors.values(), lost]

    check_repeatable(call)
    check_capture(call)


@pytest.mark.cuda
def test_on_a_gpu_a_new_length_compiles_nothing() -> None:
    x, order, factor = given(1300, 64)
    check_compilations(
        lambda n: ops.feedback_quantize(
            x[:, :n].contiguous(), order, factor, 2, 64, backend="triton"
        ),
        range(90, 1300, 61),
    )
