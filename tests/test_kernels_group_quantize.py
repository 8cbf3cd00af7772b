"""The kernel that rounds clustered tokens: bit for bit what the reference makes of the residual."""

from __future__ import annotations

import pytest
import torch

from steadykv import ops
from steadykv.codecs import QueryMoment, encode
from steadykv.config import preset
from tests.kernels import DEVICE, clustered_tokens, start_centroids

pytestmark = pytest.mark.usefixtures("poisoned_memory")

GRIDS = ["symmetric", "affine_zero"]
# head_dim, group_size
WIDTHS = [
    (32, 16),
    (64, 64),
    (80, 64),
    (96, 32),
    (128, 16),
    (128, 64),
    (128, 128),
    (20, 12),
    (48, 64),
]


def clustered(heads: int, tokens: int, width: int, kind: torch.dtype = torch.bfloat16):
    x = clustered_tokens(heads, tokens, width)
    centroids = start_centroids(x, min(10, tokens))
    return x.to(kind), centroids, ops.assign_centroids(x.float(), centroids, backend="reference")


def assert_equal_tensors(made, expected) -> None:
    (tensors, lost), (wanted, counted) = made, expected
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert torch.equal(lost, counted)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("width", "group_size"), WIDTHS)
def test_codes_and_scales_are_those_of_the_residual(
    grid: str, bits: int, width: int, group_size: int
) -> None:
    x, centroids, ids = clustered(2, 71, width)
    made = ops.quantize_clustered(x, centroids, ids, grid, bits, group_size, backend="triton")
    expected = ops.quantize_clustered(
        x.float(), centroids, ids, grid, bits, group_size, backend="reference"
    )
    assert_equal_tensors(made, expected)


@pytest.mark.parametrize("tokens", [1, 3, 32, 33])
@pytest.mark.parametrize("grid", ["symmetric", "affine_zero"])
def test_odd_lengths_and_fp32_rows(grid: str, tokens: int) -> None:
    x, centroids, ids = clustered(3, tokens, 64, torch.float32)
    x = x + 1e-3 * torch.arange(64, device=DEVICE) / 7
    named = [
        ops.quantize_clustered(x, centroids.float(), ids, grid, 2, 32, backend=name)
        for name in ("triton", "reference")
    ]
    assert_equal_tensors(*named)


@pytest.mark.parametrize("grid", ["symmetric", "affine_zero"])
def test_extreme_groups(grid: str) -> None:
    """Zero, constant, tiny, one-signed, huge and saturating groups."""
    x, centroids, ids = clustered(1, 40, 64, torch.float32)
    centroids, ids = torch.zeros_like(centroids), torch.zeros_like(ids)
    x[0, :8] = 0
    x[0, 8:12] = 3.25
    x[0, 12:16] *= 1e-9
    x[0, 16:20] = x[0, 16:20].abs() + 5
    x[0, 20:24] = -x[0, 20:24].abs() - 5
    x[0, 24] *= 1e4
    x[0, 25, 3] = 3e38 if grid == "symmetric" else 1e9
    named = [
        ops.quantize_clustered(x, centroids, ids, grid, 2, 32, backend=name)
        for name in ("triton", "reference")
    ]
    assert_equal_tensors(*named)
    assert int(named[0][1]) > 0


def test_options_without_a_kernel_take_the_reference() -> None:
    x, centroids, ids = clustered(2, 30, 64)
    for options in ({"packing": "trits"}, {"include_zero": False}, {"scale_search": True}):
        grid = "symmetric" if "packing" in options else "affine_zero"
        made = ops.quantize_clustered(x, centroids, ids, grid, 2, 64, **options, backend="triton")
        expected = ops.quantize_clustered(
            x.float(), centroids, ids, grid, 2, 64, **options, backend="reference"
        )
        assert_equal_tensors(made, expected)
    for grid in ("symmetric_int8", "affine_min_fp8"):
        named = [
            ops.quantize_clustered(rows, centroids, ids, grid, 2, 64, backend=name)
            for rows, name in ((x, "triton"), (x.float(), "reference"))
        ]
        assert_equal_tensors(*named)
    plain = ops.group_quantize(x.float(), "affine_min", 2, 32, axis="tokens", backend="triton")
    assert_equal_tensors(plain, ops.group_quantize(x.float(), "affine_min", 2, 32, axis="tokens"))


def test_number_formats_round_as_torch_does() -> None:
    """Every scale between two E4M3 numbers, through the symmetric grid."""
    numbers = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = [numbers[:-1].lerp(numbers[1:], share) for share in (0, 0.25, 0.4999, 0.5, 0.5001)]
    steps = torch.cat([*between, numbers[-1:]]).to(DEVICE)
    x = torch.zeros(1, len(steps), 16, device=DEVICE)
    x[0, :, 0] = steps
    centroids = torch.zeros(1, 1, 16, device=DEVICE)
    ids = torch.zeros(1, len(steps), dtype=torch.int64, device=DEVICE)
    named = [
        ops.quantize_clustered(x, centroids, ids, "symmetric", 2, 16, backend=name)
        for name in ("triton", "reference")
    ]
    assert_equal_tensors(*named)
    assert len(named[0][0]["scale"].view(torch.uint8).unique()) == 126  # all but 0


@pytest.mark.parametrize("method", ["qvg", "qvg4", "quantwm", "steady"])
def test_a_payload_keeps_no_more_than_its_bytes(method: str) -> None:
    """What kernels return are no views of larger scratch memory: the ledger counts elements."""
    x = clustered_tokens(2, 90, 64).to(torch.bfloat16)[None]
    config = preset(method, centroids=8)
    moment = QueryMoment.empty(1, 2, 64, device=DEVICE)
    with ops.use_backend("triton"):
        moment.update(x)
        for codec in (config.keys, config.values):
            payload = encode(x, codec, stats=moment if codec.needs_queries else None)
            kept = [*payload.tensors.values(), *payload.flags.values()]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept}
            counted = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in kept}
            assert sum(s.nbytes() for s in storages.values()) == sum(counted.values())
