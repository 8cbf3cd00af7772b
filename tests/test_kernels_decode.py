"""Decode kernels against the reference; on a GPU where there is one, otherwise interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload
from steadykv.codecs.quantwm import sparse_coefficients
from steadykv.config import CodecConfig
from tests.codecs import CASES, CodecCase, sample_tokens
from tests.kernels import DEVICE, TRITS, blank, check, decoded, packed, random_bytes

pytest.importorskip("triton")
from steadykv.kernels import decode as kernels
from steadykv.kernels.decode import Tile
from steadykv.kernels.decode_groups import groups_kernel
from steadykv.kernels.decode_levels import levels_kernel, outliers_kernel
from steadykv.kernels.decode_pairs import pairs_kernel

# Interpreted, a store to BF16 cuts the number off instead of rounding it.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
PACKED = [case for case in CASES if not case.config.is_dense]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens a program: odd lengths then take several."""
    for table in (kernels.TILES, kernels.COMPENSATED_TILES):
        for width in table:
            monkeypatch.setitem(table, width, Tile(16, 1))


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_every_method_equals_its_reference(case: CodecCase) -> None:
    payload = case.encode(sample_tokens(2, 2, 37, 64)).to(DEVICE)
    for dtype in DTYPES:
        check(payload, blank(payload.shape, dtype, "BSHD"))


FORMS: dict[str, tuple[CodecConfig, tuple[int, ...]]] = {
    "width_80": (CodecConfig("quantwm", centroids=16, group_size=16), (1, 2, 35, 80)),
    "width_96_3bit": (CodecConfig("qvg4", bits=3, centroids=16, group_size=32), (1, 2, 35, 96)),
    "width_128": (CodecConfig("quantwm", centroids=16, rank=32), (1, 2, 35, 128)),
    "width_256": (CodecConfig("quantwm", centroids=16, rank=40), (1, 1, 33, 256)),
    "width_20": (CodecConfig("qvg4", centroids=16, group_size=7), (1, 2, 35, 20)),
    "width_20_4bit": (CodecConfig("qvg", bits=4, centroids=16), (1, 2, 35, 20)),
    "width_13_3bit": (CodecConfig("qvg4", bits=3, centroids=16, group_size=5), (1, 2, 35, 13)),
    "width_3": (CodecConfig("rtn", group_size=2), (1, 2, 35, 3)),
    "trits_96": (CodecConfig("qvg", centroids=16, packing="trits"), (1, 2, 35, 96)),
    "trits_20": (CodecConfig("qvg", centroids=16, packing="trits", group_size=7), (1, 2, 35, 20)),
    "ids_of_16_bits": (CodecConfig("qvg", centroids=300), (1, 1, 301, 64)),
    "kivi_keys_80": (CodecConfig("kivi", axis="tokens", group_size=7), (2, 1, 35, 80)),
    "quarot_256": (CodecConfig("quarot", dim_splits=(128, 128)), (1, 1, 35, 256)),
    "quarot_80": (CodecConfig("quarot", group_size=16), (1, 2, 35, 80)),
    "kvquant_96": (CodecConfig("kvquant", bits=3, axis="tokens"), (2, 2, 35, 96)),
    "kvquant_80": (CodecConfig("kvquant", bits=4, first_tokens=9), (2, 2, 45, 80)),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("form", FORMS)
def test_every_geometry_equals_its_reference(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = FORMS[form]
    monkeypatch.setattr(kernels, "HEADS_FIRST", list(FORMS).index(form) % 2 == 0)
    payload = packed(config, shape)
    check(payload, blank(shape, torch.float32, "BSHD"))
    for start, end in ((7, 12), (8, 33)):
        check(payload, blank((*shape[:2], end - start, shape[3]), torch.float16), start)


@pytest.mark.parametrize("name", ["qvg", "kvquant"])
def test_any_strides(name: str) -> None:
    payload = packed(CodecConfig(name, centroids=16) if name == "qvg" else CodecConfig(name))
    batch, heads, tokens, width = payload.shape
    wide = blank((batch, heads, tokens, 2 * width), torch.float32)
    check(payload, wide[..., ::2])
    assert wide[..., 1::2].isnan().all()
    shifted = blank((batch, heads, tokens, width + 1), torch.float32)
    check(payload, shifted[..., 1:])
    assert shifted[..., 0].isnan().all()
    longer = blank((batch, heads, tokens + 5, width), torch.float32, "BSHD")
    check(payload, longer[:, :, 3:-2])
    assert longer[:, :, :3].isnan().all()
    assert longer[:, :, -2:].isnan().all()
    columns = torch.full((batch, heads, width, tokens), torch.nan, device=DEVICE)
    check(payload, columns.transpose(2, 3))
    assert decoded(payload, "triton", wide[:, :, :0, ::2]).numel() == 0


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_at_an_odd_address(bits: int) -> None:
    payload = packed(CodecConfig("qvg4", centroids=16, bits=bits))
    tensors = {}
    for name, tensor in payload.tensors.items():
        room = torch.zeros(tensor.nbytes + 32, dtype=torch.uint8, device=DEVICE)
        shift = tensor.element_size()
        moved = room[shift : shift + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensors[name] = moved.copy_(tensor)
    check(replace(payload, tensors=tensors), blank(payload.shape, torch.float32))


@pytest.mark.parametrize("width", [128, 64, 20])
def test_every_byte_of_trits_and_every_e4m3_number(width: int) -> None:
    """In every place that a byte of five trits has in a word."""
    row = -(-width // 5)
    places = (torch.arange(243)[:, None] + torch.arange(row)) % 243
    numbers = torch.tensor([n for n in range(256) if n & 0x7F != 0x7F], dtype=torch.uint8)
    table = numbers[(torch.arange(256)[:, None] + torch.arange(width)) % 254]
    payload = {
        "codes": places.to(torch.uint8)[None, None].to(DEVICE),
        "scale": table[:243, :1].clone()[None, None].to(DEVICE).view(torch.float8_e4m3fn),
        "ids": torch.arange(243, dtype=torch.uint8, device=DEVICE)[None, None, None],
        "centroids": table[None, None, None].to(DEVICE).view(torch.float8_e4m3fn),
        "centroid_scale": torch.rand(
            1, 1, 1, 256, generator=torch.Generator().manual_seed(0)
        ).to(DEVICE, torch.float16),
    }  # fmt: skip
    outs = []
    for backend in ("triton", "reference"):
        outs.append(blank((1, 1, 243, width), torch.float32))
        ops.decode_clustered(
            payload, outs[-1], "symmetric", 2, 1 << 10, 0, 243, packing="trits", backend=backend
        )
    assert torch.equal(*outs)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group_size", [64, 24, 5])
def test_every_code_and_zero_point(bits: int, group_size: int) -> None:
    """Random bytes: codes and zero points that no encoder would put together."""
    batch, heads, tokens, width = 2, 1, 41, 40
    groups = -(-width // group_size)
    payload = {
        "codes": random_bytes(batch, heads, tokens, width * bits // 8),
        "scale_codes": random_bytes(batch, heads, tokens, groups, seed=1),
        "scale_base": torch.tensor([[0.01], [3.0]], device=DEVICE, dtype=torch.float16),
        "zeros": random_bytes(batch, heads, -(-tokens * groups * bits // 8), seed=2),
        "ids": random_bytes(batch, heads, 3, tokens, top=16, seed=3),
        "centroids": random_bytes(batch, heads, 3, 16, width).bfloat16(),
    }
    for start, end in ((0, tokens), (5, 6), (13, 40)):
        outs = []
        for backend in ("triton", "reference"):
            outs.append(blank((batch, heads, end - start, width), torch.float32))
            ops.decode_clustered(
                payload, outs[-1], "affine_zero", bits, group_size, start, end, backend=backend
            )
        assert torch.equal(*outs)


def test_fp16_saturates() -> None:
    payload = packed(CodecConfig("qvg", centroids=16))
    tensors = {**payload.tensors, "centroids": payload.tensors["centroids"] * 20000}
    payload = replace(payload, tensors=tensors)
    out = blank(payload.shape, torch.float16)
    check(payload, out)
    assert out.abs().max() == 65504


def test_sparse_coefficients() -> None:
    payload = packed(CodecConfig("quantwm", centroids=16))
    dense = dict(payload.tensors)
    codes, scales = dense.pop("coef_codes").clone(), dense.pop("coef_scales").clone()
    scales[:, :, ::3] = 0
    codes[scales == 0] = 0
    payload = replace(payload, tensors={**dense, **sparse_coefficients(codes, scales)})
    check(payload, blank((2, 2, 20, 64), torch.float32), start=11)


def test_a_rotation_in_blocks_of_two_sizes_is_the_references() -> None:
    payload = packed(CodecConfig("rtn", group_size=16), (1, 2, 35, 80)).tensors
    outs = [blank((1, 2, 20, 80), torch.float32) for _ in range(2)]
    for out, backend in zip(outs, ("triton", "reference"), strict=True):
        ops.decode_grouped(
            payload, out, "affine_min", 2, 16, "channels", 4, 24, rotation=(64, 16), backend=backend
        )
    assert torch.equal(*outs)


def arguments(payload: Payload, out: Tensor) -> tuple[Any, ...]:
    tensors = payload.tensors
    return (",".join(tensors), list(tensors.values()), out)


def test_operators_declare_what_they_do() -> None:
    operators = torch.ops.steadykv
    for name, operator, options in (
        ("qvg4", operators.decode_clustered, ("affine_zero", 2, 64, 3, 20, "bits", 0, "triton")),
        ("rtn", operators.decode_grouped,
         ("affine_min", 2, 64, "channels", 3, 20, "bits", [], "triton")),
        ("kvquant", operators.decode_nonuniform, ("channels", 2, 3, 20, "triton")),
    ):  # fmt: skip
        payload = packed(CodecConfig(name))
        out = blank((2, 2, 17, 64), torch.float32).fill_(0)
        torch.library.opcheck(operator, (*arguments(payload, out), *options), raise_exception=True)


@pytest.mark.parametrize("name", ["quantwm", "quarot", "kvquant"])
def test_decode_compiles_as_one_graph(name: str) -> None:
    payload = packed(CodecConfig(name))

    def read(out: Tensor, start: int) -> Tensor:
        payload.decode(out=out.transpose(1, 2), start=start, end=start + out.shape[1])
        return out + 1

    compiled = torch.compile(read, backend="aot_eager", fullgraph=True, dynamic=True)
    for start, count in ((0, 37), (3, 20), (8, 11)):
        out = blank((2, 2, count, 64), torch.float32, "BSHD")
        with ops.use_backend("triton"):
            result = compiled(out.transpose(1, 2), start)
        expected = decoded(payload, "triton", blank((2, 2, count, 64), torch.float32), start)
        assert torch.equal(out, expected)
        assert torch.equal(result.transpose(1, 2), expected + 1)


KERNEL_FORMS = {
    **{name: CodecConfig(name) for name in ("qvg", "quantwm", "kivi", "quarot", "kvquant")},
    "trits": TRITS,
    "trits_3": replace(TRITS, refinement=3),
    "qvg4_fp8": CodecConfig("qvg4", centroid_format="fp8", refinement=2),
}
cuda = pytest.mark.cuda


def compilations() -> int:
    kernels = (groups_kernel, pairs_kernel, levels_kernel, outliers_kernel)
    return sum(len(cached[0]) for k in kernels for cached in k.device_caches.values())


@cuda
@pytest.mark.parametrize("name", KERNEL_FORMS)
def test_a_new_length_compiles_nothing(name: str) -> None:
    lengths = [257, *range(270, 650, 19), 1024]
    before = None
    for tokens in lengths:
        payload = packed(KERNEL_FORMS[name], (1, 2, tokens, 128))
        for layout in ("BHSD", "BSHD"):
            out = blank((1, 2, tokens - 5, 128), torch.bfloat16, layout)
            decoded(payload, "triton", out, start=3)
        before = compilations() if before is None else before
        assert compilations() == before


@cuda
@pytest.mark.parametrize("name", KERNEL_FORMS)
def test_graph_capture_without_a_sync_and_the_same_bytes(name: str) -> None:
    payload = packed(KERNEL_FORMS[name], (2, 3, 1001, 128))
    out = blank(payload.shape, torch.bfloat16, "BSHD")
    first = decoded(payload, "triton", out).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded(payload, "triton", out)
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoded(payload, "triton", out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda
def test_more_numbers_than_an_int32_counts() -> None:
    """Three heads of 2^30 numbers each: the last ones of `out` and of the payload are right."""
    heads, tokens, width = 3, 1 << 23, 128
    free = torch.cuda.mem_get_info()[0]
    if free < 12 << 30:
        pytest.skip(f"needs 12 GB of GPU memory, {free >> 30} are free")
    payload = {
        "codes": torch.randint(0, 256, (1, heads, tokens, width // 4), device=DEVICE,
                               dtype=torch.uint8, generator=torch.Generator(DEVICE)),
        "scale": torch.full((1, heads, tokens, 2), 60, device=DEVICE, dtype=torch.uint8)
        .view(torch.float8_e4m3fn),
        "ids": torch.zeros(1, heads, 1, tokens, device=DEVICE, dtype=torch.uint8),
        "centroids": torch.randn(1, heads, 1, 16, width, device=DEVICE,
                                 generator=torch.Generator(DEVICE)).bfloat16(),
    }  # fmt: skip
    out = blank((1, heads, tokens, width), torch.bfloat16)
    ops.decode_clustered(payload, out, "symmetric", 2, 64, 0, tokens, backend="triton")
    assert not out[:, :, ::997].isnan().any()
    expected = blank((1, heads, 1000, width), torch.bfloat16)
    ops.decode_clustered(
        payload, expected, "symmetric", 2, 64, tokens - 1000, tokens, backend="reference"
    )
    assert torch.equal(out[:, :, -1000:], expected)
