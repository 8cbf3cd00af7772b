"""Eigenvectors without a host sync, against the reference's solvers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.kernels.eigen import can_iterate
from steadykv.kernels.launch import smaller_device

from .gpu_checks import check_capture, check_repeatable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_memory")

SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "power": lambda i: (i + 1) ** -1.5,
    "slow": lambda i: 0.97**i,
    "steep": lambda i: 0.3**i,
    "low rank": lambda i: (i < 6) * (1.0 + i),
    "pairs": lambda i: 0.8 ** (i // 2),
}


def moment_with(width: int, spectrum: Callable[[Tensor], Tensor], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return ((q * spectrum(torch.arange(width, dtype=torch.float64))) @ q.T).float()


def counts(heads: int) -> Tensor:
    return torch.ones(heads, dtype=torch.int64, device=DEVICE)


def check_pairs(m: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Orthonormal, the largest eigenvalues, M u = lambda u, signs by the rule."""
    u, values, active, failed = ops.query_subspace(m, counts(len(m)), rank, backend="triton")
    expected = torch.linalg.eigvalsh(m.double().cpu()).flip(-1)[:, :rank].to(DEVICE)
    assert active.all()
    assert not failed.any()
    assert (u.dtype, values.dtype) == (torch.float32, torch.float32)
    top = expected[:, :1].clamp(min=1e-30)
    assert ((values.double() - expected).abs() <= 1e-6 * top).all()
    v = u.double()
    eye = torch.eye(rank, dtype=torch.float64, device=DEVICE)
    assert (v.mT @ v - eye).abs().max() <= 1e-6
    rest = m.double() @ v - v * values.double()[:, None]
    assert (rest.norm(dim=1) <= 1e-6 * top).all()
    first = u.gather(1, u.abs().argmax(1, keepdim=True))
    assert (first > 0).all()
    return u, values


def test_eigenpairs_are_those_of_eigh() -> None:
    m = torch.stack([moment_with(48, s) for s in SPECTRA.values()]).to(DEVICE)
    u, _ = check_pairs(m, 8)
    expected, *_ = ops.query_subspace(m, counts(len(m)), 8, backend="reference")
    for n, name in enumerate(SPECTRA):
        if name in ("power", "steep"):  # eigenvalues far enough apart to name the vectors
            assert (u[n] - expected[n]).abs().max() <= 2**-20, name


def test_moments_without_a_direction() -> None:
    m = torch.stack([torch.eye(32), torch.zeros(32, 32)]).to(DEVICE)
    check_pairs(m[:1] * 1e-20, 4)
    u, values, active, _ = ops.query_subspace(m[1:], counts(1), 4, backend="triton")
    assert active.item() == 1
    assert not values.any()
    assert u.isfinite().all()


@pytest.mark.parametrize(
    ("width", "rank"),
    [
        (16, 1),
        (40, 16),
        pytest.param(64, 8, marks=pytest.mark.cuda),
        pytest.param(80, 12, marks=pytest.mark.cuda),
        pytest.param(128, 8, marks=pytest.mark.cuda),
        pytest.param(128, 28, marks=pytest.mark.cuda),
        pytest.param(256, 8, marks=pytest.mark.cuda),
    ],
)
def test_any_width_and_rank(width: int, rank: int) -> None:
    check_pairs(moment_with(width, SPECTRA["power"])[None].to(DEVICE), rank)


def test_what_the_iteration_does_not_take_goes_to_eigh() -> None:
    m = moment_with(40, SPECTRA["slow"])[None].to(DEVICE)
    assert can_iterate(m, 8)
    with smaller_device(99_000):
        assert can_iterate(m, 8)
        assert not can_iterate(m, 16)
    for rank in (29, 40):
        assert not can_iterate(m, rank)
        found, expected = (
            ops.query_subspace(m, counts(1), rank, backend=name) for name in ("triton", "reference")
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_size_of_queries_scales_the_values_alone() -> None:
    m = moment_with(32, SPECTRA["power"])[None].to(DEVICE)
    u, values = check_pairs(m, 4)
    size = 2.0**-100
    scaled, scaled_values, *_ = ops.query_subspace(m * size, counts(1), 4, backend="triton")
    assert torch.equal(scaled, u)
    assert torch.equal(scaled_values, values * size)


def broken_moments() -> tuple[Tensor, Tensor]:
    m = moment_with(32, SPECTRA["power"]).repeat(4, 1, 1).to(DEVICE)
    count = counts(4)
    count[1] = 0
    m[2, 3, 4] = math.nan
    m[3, 0, 0] = math.inf
    return m, count


def test_heads_without_queries_or_with_a_broken_moment_are_off() -> None:
    m, count = broken_moments()
    u, values, active, failed = ops.query_subspace(m, count, 4, backend="triton")
    assert active.tolist() == [1, 0, 0, 0]
    assert failed.tolist() == [0, 0, 1, 1]
    assert not u[1:].any()
    assert not values[1:].any()
    alone, *_ = ops.query_subspace(m[:1], count[:1], 4, backend="triton")
    assert torch.equal(alone[0], u[0])


@pytest.mark.cuda
def test_on_a_gpu_bytes_repeat_and_graphs_capture() -> None:
    """Capture fails where the host waits for a solver."""
    m = torch.stack([moment_with(128, s, n) for n, s in enumerate(SPECTRA.values())]).to(DEVICE)

    def call() -> tuple[Tensor, ...]:
        return ops.query_subspace(m, counts(len(m)), 8, backend="triton")

    check_repeatable(call)
    check_capture(call)
    together = call()
    for n in range(len(m)):
        alone, *_ = ops.query_subspace(m[n : n + 1], counts(1), 8, backend="triton")
        assert torch.equal(alone[0], together[0][n])
