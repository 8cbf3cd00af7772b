"""`qvg` against the public quant-videogen 0.1.0 on CUDA, both with the same centroids and ids.

Skipped without it: `oracle.INSTALL` says how to get it. `python -m benchmarks.oracle` writes the
shares down.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steadykv.codecs import Payload, encode
from steadykv.config import preset

from .codecs import sample_tokens
from .oracle import Release, agreement, encode_like_release, per_element

pytest.importorskip("quant_videogen")
pytestmark = pytest.mark.cuda

DEVICE = "cuda"
# Preset, [B, H, S, D], centroids: the released settings and odd lengths, heads and widths.
SPANS = [
    ("qvg", (1, 4, 4680, 128), 256),
    ("qvg", (2, 3, 517, 128), 16),
    ("qvg", (1, 2, 333, 256), 32),
    ("qvg_pro", (1, 4, 4680, 128), 256),
    ("qvg_pro", (2, 3, 517, 64), 16),
]
every_span = pytest.mark.parametrize(("name", "shape", "centroids"), SPANS)


@pytest.fixture(scope="module")
def release() -> Release:
    return Release()


@pytest.fixture(scope="module")
def ties_go_out(release: Release) -> Tensor:
    return release.ties_go_out(torch.device(DEVICE))


def packed(
    name: str, shape: tuple[int, int, int, int], centroids: int, seed: int
) -> tuple[Tensor, Payload]:
    x = sample_tokens(*shape, seed=seed, device=DEVICE)
    return x, encode(x, preset(name, centroids=centroids).keys)


def test_ties_go_out_where_the_quotient_is_exact(ties_go_out: Tensor) -> None:
    exact = torch.arange(8, 127, 8)  # E4M3 bytes of powers of two
    assert ties_go_out[exact].all()


@every_span
@pytest.mark.parametrize("seed", [0, 1])
def test_codes_and_scales_are_those_of_the_release(
    release: Release,
    ties_go_out: Tensor,
    name: str,
    shape: tuple[int, int, int, int],
    centroids: int,
    seed: int,
) -> None:
    x, ours = packed(name, shape, centroids, seed)
    theirs = release.encode(x, ours)
    switched = agreement(encode_like_release(x, ours, ties_go_out), theirs)
    assert switched.both >= 0.9999
    assert switched.zero_groups < 0.02
    plain = agreement(ours, theirs)
    # FP32 residuals round to another scale now and then, more so after four stages.
    assert plain.both > 0.8
    assert plain.codes > 0.95
    assert plain.both < switched.both


@every_span
def test_each_reads_what_the_other_wrote(
    release: Release, name: str, shape: tuple[int, int, int, int], centroids: int
) -> None:
    x, ours = packed(name, shape, centroids, seed=2)
    for payload in (ours, release.encode(x, ours)):
        exact = payload.decode(torch.float32)
        rounded = release.decode(payload, torch.bfloat16)
        # Half a BF16 step, and what another order of FP32 sums makes of four stages.
        bound = exact.abs() * 2**-8 + exact.abs().max() * 2**-22
        assert ((rounded.float() - exact).abs() <= bound).all()
        if payload.config.stages == 1:
            assert torch.equal(rounded, payload.decode(torch.bfloat16))


@pytest.mark.parametrize("factor", [2**-8, 300], ids=["subnormal", "saturated"])
def test_scales_at_both_ends_of_e4m3(release: Release, ties_go_out: Tensor, factor: float) -> None:
    x = sample_tokens(1, 2, 1000, 128, device=DEVICE) * factor
    ours = encode(x, preset("qvg", centroids=16).keys)
    scale = ours.tensors["scale"].float()
    assert (scale < 2**-6).float().mean() > 0.1 if factor < 1 else (scale == 448).any()
    theirs = release.encode(x, ours)
    switched = encode_like_release(x, ours, ties_go_out)
    assert agreement(switched, theirs).both >= 0.9999


def test_groups_of_zeros_decode_alike(release: Release, ties_go_out: Tensor) -> None:
    """The release gives them a scale of zero and divides by it; ours has the smallest scale."""
    x = sample_tokens(1, 2, 64, 128, device=DEVICE)
    ours = encode(x, preset("qvg", centroids=64).keys)  # each token is its own centroid
    x[:, :, 32:] += torch.linspace(-1, 1, 128, device=DEVICE).bfloat16()
    theirs = release.encode(x, ours)
    switched = encode_like_release(x, ours, ties_go_out)
    found = agreement(switched, theirs)
    assert found.zero_groups == 0.5
    assert found.both >= 0.9999
    assert (switched.tensors["scale"].view(torch.uint8)[:, :, :32] == 1).all()
    for decoded in (
        release.decode(theirs, torch.bfloat16),
        theirs.decode(torch.bfloat16),
        switched.decode(torch.bfloat16),
    ):
        assert torch.equal(decoded[:, :, :32], x[:, :, :32])
    assert per_element(theirs.tensors["scale"].float(), x)[:, :, 32:].all()
