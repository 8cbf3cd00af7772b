"""The decode kernel for pairs of BF16 against the reference, and what only it decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from steadykv import ops
from steadykv.config import CodecConfig
from tests.kernels import DEVICE, TRITS, blank, check, packed, random_bytes

pytest.importorskip("triton")
from steadykv.kernels import decode as kernels

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PAIRS: dict[str, tuple[CodecConfig, tuple[int, ...]]] = {
    "symmetric": (CodecConfig("qvg", centroids=16), (2, 2, 37, 128)),
    "symmetric_64_group_32": (CodecConfig("qvg", centroids=16, group_size=32), (1, 2, 37, 64)),
    "symmetric_ids_of_16_bits": (CodecConfig("qvg", centroids=300), (1, 1, 301, 64)),
    "zeros": (CodecConfig("qvg4", centroids=16), (2, 2, 37, 128)),
    "zeros_256_group_256": (CodecConfig("qvg4", centroids=16, group_size=256), (1, 1, 37, 256)),
    "rank_8": (CodecConfig("quantwm", centroids=16), (2, 2, 37, 128)),
    "rank_2_of_64": (CodecConfig("quantwm", centroids=16, rank=2), (1, 2, 37, 64)),
    "rank_14_of_256": (CodecConfig("quantwm", centroids=16, rank=14), (1, 1, 37, 256)),
    "rank_16": (CodecConfig("quantwm", centroids=16, rank=16, group_size=32), (1, 2, 37, 128)),
    "rank_8_fp8": (CodecConfig("quantwm", centroids=16, centroid_format="fp8"), (1, 2, 37, 64)),
    "zeros_fp8": (CodecConfig("qvg4", centroids=16, centroid_format="fp8"), (2, 2, 37, 128)),
    "zeros_refined": (
        CodecConfig("qvg4", centroids=16, centroid_format="fp8", refinement=2),
        (1, 2, 37, 128),
    ),
    "int8": (CodecConfig("qvg", centroids=16, metadata="int8", refinement=2), (1, 2, 37, 64)),
    "trits": (replace(TRITS, refinement=0), (2, 2, 37, 128)),
    "trits_refined": (TRITS, (1, 2, 37, 128)),
    "trits_256_group_32": (replace(TRITS, group_size=32), (1, 1, 37, 256)),
    "trits_32": (replace(TRITS, centroid_format="bf16"), (1, 2, 37, 32)),
}


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_of_bf16_equal_the_reference(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded as on a GPU when interpreted, too: the numbers are stored as integers."""
    config, shape = PAIRS[form]
    payload = packed(config, shape)
    # Nothing but pairs: the general kernel would fail.
    monkeypatch.setattr(kernels, "groups_kernel", None)
    for layout, start, end in (("BHSD", 0, 37), ("BSHD", 3, 19), ("BSHD", 5, 36)):
        check(payload, blank((*shape[:2], end - start, shape[3]), torch.bfloat16, layout), start)


def test_pairs_of_any_trit_and_fp8_centroid() -> None:
    """Each byte of trits at each place, each E4M3 number; scales as files may have them."""
    places = (torch.arange(243)[:, None] + torch.arange(26)) % 243
    numbers = torch.tensor([n for n in range(256) if n & 0x7F != 0x7F], dtype=torch.uint8)
    table = numbers[(torch.arange(256)[:, None] + torch.arange(128)) % 254].to(DEVICE)
    scale = torch.logspace(-7.2, 4.8, 256).half().to(DEVICE)
    shared = {
        "ids": torch.arange(243, dtype=torch.uint8, device=DEVICE)[None, None, None],
        "centroids": table[None, None, None].view(torch.float8_e4m3fn),
        "centroid_scale": scale[None, None, None],
        "scale_codes": random_bytes(1, 1, 243, 2),
        "scale_base": torch.tensor([[3.3]], device=DEVICE, dtype=torch.float16),
        "refinement": random_bytes(1, 1, 243, 32, seed=1),
    }
    trits = {"codes": places.to(torch.uint8)[None, None].to(DEVICE)}
    zeros = {
        "codes": random_bytes(1, 1, 243, 32, seed=2),
        "zeros": random_bytes(1, 1, 122, seed=3),
    }
    for grid, packing, tensors in (
        ("symmetric_int8", "trits", trits),
        ("affine_zero", "bits", zeros),
    ):
        for refinement in (0, 2):
            outs = [blank((1, 1, 243, 128), torch.bfloat16) for _ in range(2)]
            for out, backend in zip(outs, ("triton", "reference"), strict=True):
                ops.decode_clustered(
                    {**shared, **tensors},
                    out,
                    grid,
                    2,
                    64,
                    0,
                    243,
                    packing=packing,
                    refinement=refinement,
                    backend=backend,
                )
            assert torch.equal(*outs)


@pytest.mark.parametrize("refinement", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [128, 20])
def test_any_part_of_a_step(refinement: int, width: int) -> None:
    """Random bytes for codes of four bits, whose steps and parts need more than FP32 together."""
    payload = {
        "codes": random_bytes(2, 1, 41, width // 2),
        "refinement": random_bytes(2, 1, 41, -(-width * refinement // 8), seed=5),
        "scale_codes": random_bytes(2, 1, 41, 1, seed=1),
        "scale_base": torch.tensor([[0.0123], [3.3]], device=DEVICE, dtype=torch.float16),
        "zeros": random_bytes(2, 1, 21, seed=2),
        "ids": random_bytes(2, 1, 1, 41, top=16, seed=3),
        "centroids": random_bytes(2, 1, 1, 16, width).bfloat16() / 3,
    }
    for start, end in ((0, 41), (13, 30)):
        outs = [blank((2, 1, end - start, width), torch.float32) for _ in range(2)]
        for out, backend in zip(outs, ("triton", "reference"), strict=True):
            ops.decode_clustered(
                payload, out, "affine_zero", 4, 128, start, end, refinement=refinement,
                backend=backend,
            )  # fmt: skip
        assert torch.equal(*outs)


def test_pairs_of_any_scale_code_and_zero_point() -> None:
    """Every E4M3 scale, also below the least normal one; random bytes for the other grid."""
    scale = torch.tensor([n for n in range(256) if n & 0x7F != 0x7F], dtype=torch.uint8)
    tokens, shared = len(scale), {
        "codes": random_bytes(1, 1, 254, 16),
        "ids": random_bytes(1, 1, 1, 254, top=16, seed=1),
        "centroids": random_bytes(1, 1, 1, 16, 64, seed=2).sub_(128).view(torch.int8).bfloat16(),
    }  # fmt: skip
    symmetric = {"scale": scale[None, None, :, None].to(DEVICE).view(torch.float8_e4m3fn)}
    zeros = {
        "scale_codes": random_bytes(1, 1, tokens, 2, seed=3),
        "scale_base": torch.tensor([[0.01]], device=DEVICE, dtype=torch.float16),
        "zeros": random_bytes(1, 1, tokens // 2, seed=4),
    }
    for grid, group_size, tensors in (("symmetric", 64, symmetric), ("affine_zero", 32, zeros)):
        for start in (0, 1, 2, 3):
            outs = [blank((1, 1, tokens - start, 64), torch.bfloat16) for _ in range(2)]
            for out, backend in zip(outs, ("triton", "reference"), strict=True):
                ops.decode_clustered(
                    {**shared, **tensors}, out, grid, 2, group_size, start, tokens, backend=backend
                )
            assert torch.equal(*outs)
