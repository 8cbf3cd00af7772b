"""The kernel that rounds clustered tokens: bit for bit what the reference makes of the residual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from steadykv import ops
from steadykv.codecs import QueryMoment, SpanKey, codec_for, encode
from steadykv.config import CodecConfig, preset
from tests.gpu_checks import check_compilations, check_repeatable
from tests.kernels import (
    DEVICE,
    clustered_tokens,
    nearest_gap,
    score_bound,
    start_centroids,
)

pytest.importorskip("triton")
from steadykv.kernels.packing import pack_rows

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


@pytest.mark.parametrize("grid", ["symmetric", "symmetric_int8", "affine_zero"])
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
    refinement = 0 if grid == "symmetric" else 2
    named = both(x, centroids, ids, grid, 2, 32, refinement=refinement)
    assert_equal_tensors(*named)
    assert int(named[0][1]) > 0
    assert_equal_tensors(*both(x[:, :8], centroids, ids[:, :8], grid, 2, 32, refinement=refinement))


def both(x, centroids, ids, *given, **options):
    """Made by the kernels from x as it is, and by the reference."""
    return [
        ops.quantize_clustered(rows, centroids, ids, *given, **options, backend=name)
        for rows, name in ((x, "triton"), (x.float(), "reference"))
    ]


# bits, refinement, head_dim, group_size, tokens
REFINED = [
    (2, 1, 64, 64, 71),
    (2, 2, 128, 64, 71),
    (2, 3, 32, 16, 33),
    (2, 4, 80, 64, 33),
    (3, 2, 96, 32, 33),
    (4, 1, 20, 12, 33),
    (4, 4, 64, 32, 1),
    (2, 0, 128, 128, 33),
    (3, 0, 20, 8, 40),
    (4, 0, 80, 16, 40),
]


@pytest.mark.parametrize(("bits", "refinement", "width", "group_size", "tokens"), REFINED)
@pytest.mark.parametrize("grid", ["symmetric_int8", "affine_zero"])
def test_refinement_is_made_with_the_codes(
    grid: str, bits: int, refinement: int, width: int, group_size: int, tokens: int
) -> None:
    x, centroids, ids = clustered(2, tokens, width, torch.bfloat16 if width > 64 else torch.float32)
    options: dict[str, Any] = {"refinement": refinement}
    if bits == 2 and grid == "symmetric_int8":
        options["packing"] = "trits"
    made, expected = both(x, centroids, ids, grid, bits, group_size, **options)
    assert ("refinement" in made[0]) == (refinement > 0)
    assert_equal_tensors(made, expected)


@pytest.mark.parametrize("width", [128, 20, 13])
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
def test_rows_of_any_length_are_packed(bits: int, width: int) -> None:
    """0: trits."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits if bits else 3, (2, 70, width), generator=generator)
    codes = codes.to(torch.uint8).to(DEVICE)
    form = (bits, "bits") if bits else (2, "trits")
    assert torch.equal(pack_rows(codes, *form), ops.pack(codes, *form))


def test_options_without_a_kernel_take_the_reference() -> None:
    x, centroids, ids = clustered(2, 30, 64)
    for options in ({"include_zero": False}, {"scale_search": True, "refinement": 2}):
        assert_equal_tensors(*both(x, centroids, ids, "affine_zero", 2, 64, **options))
    assert_equal_tensors(*both(x, centroids, ids, "symmetric", 2, 64, packing="trits"))
    for grid, refinement in (("symmetric", 3), ("affine_min_fp8", 0)):
        assert_equal_tensors(*both(x, centroids, ids, grid, 2, 64, refinement=refinement))
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


FADING = [
    CodecConfig("qvg4", centroids=8, centroid_format="fp8", refinement=2),
    CodecConfig(
        "qvg",
        centroids=8,
        metadata="int8",
        packing="trits",
        centroid_format="fp8",
        refinement=1,
    ),
    CodecConfig("quantwm", centroids=8, rank=0, centroid_format="fp8", refinement=3),
    CodecConfig("quantwm", centroids=8, centroid_format="fp8"),
]


@pytest.mark.parametrize("codec", FADING, ids=lambda codec: f"{codec.method}_{codec.refinement}")
def test_a_payload_with_fp8_centroids_is_made_by_kernels(codec: CodecConfig) -> None:
    """Means are sums in another order; the rest is what the reference makes of their centroids."""
    assert codec_for(codec).has_kernels
    x = clustered_tokens(2, 90, 64)
    moment = QueryMoment.empty(1, 2, 64, device=DEVICE)
    with ops.use_backend("triton"):
        moment.update(x[None])
        payload = encode(x[None], codec, stats=moment)
    stored = {name: tensor.flatten(0, 1) for name, tensor in payload.tensors.items()}
    centroids = ops.centroid_values(stored)[:, 0]
    ids = stored["ids"][:, 0].long()
    if codec.method != "quantwm":  # QSAC may prefer another than the nearest
        gap = nearest_gap(x, centroids, ids)
        assert (gap <= score_bound(x, centroids)).all()
    expected, _ = ops.quantize_clustered(
        x.float(),
        centroids,
        ids,
        codec_for(codec).grid,  # type: ignore[attr-defined]
        2,
        64,
        packing=codec.packing,
        refinement=codec.refinement,
        backend="reference",
    )
    assert ("refinement" in expected) == bool(codec.refinement)
    for name, tensor in expected.items():
        assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8)), name
    whole = encode(x[None].cpu(), codec, stats=QueryMoment(moment.moment.cpu(), moment.count.cpu()))
    error, least = (
        float((p.decode(torch.float32).cpu() - x.cpu()).norm()) for p in (payload, whole)
    )
    assert error == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize("method", ["qvg", "qvg4", "quantwm", "steady"])
def test_a_payload_keeps_no_more_than_its_bytes(method: str) -> None:
    """What kernels return are no views of larger scratch memory: the ledger counts elements."""
    x = clustered_tokens(1, 90, 64).to(torch.bfloat16)[None]
    config = preset(method, centroids=8)
    moment = QueryMoment.empty(1, 1, 64, device=DEVICE)
    with ops.use_backend("triton"):
        moment.update(x)
        for codec in (config.keys, config.values, *(FADING if method == "quantwm" else ())):
            payload = encode(x, codec, stats=moment if codec.needs_queries else None)
            kept = [*payload.tensors.values(), *payload.flags.values()]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept}
            counted = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in kept}
            assert sum(s.nbytes() for s in storages.values()) == sum(counted.values())


@pytest.mark.cuda
@pytest.mark.parametrize("codec", FADING[:2], ids=lambda codec: codec.method)
def test_on_a_gpu_bytes_repeat_and_a_new_length_compiles_nothing(codec: CodecConfig) -> None:
    codec = replace(codec, centroids=64)
    x = clustered_tokens(12, 3001, 128)[None]

    def call(tokens: int = 3001) -> list[torch.Tensor]:
        part = x[:, :, :tokens].contiguous()
        payload = encode(part, codec, span_key=SpanKey(span=1))
        return [*payload.tensors.values(), *payload.flags.values()]

    check_repeatable(call)
    check_compilations(call, range(300, 3001, 177))
    parts = [encode(x[:, n : n + 3], codec, span_key=SpanKey(span=1)) for n in range(0, 12, 3)]
    whole = encode(x, codec, span_key=SpanKey(span=1))
    for name, tensor in whole.tensors.items():
        alone = torch.cat([part.tensors[name].view(torch.uint8) for part in parts], 1)
        assert torch.equal(alone, tensor.view(torch.uint8)), name
