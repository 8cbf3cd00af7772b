"""Where kernels are tested: on the GPU if there is one, else interpreted on the CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload, encode
from steadykv.config import CodecConfig
from steadykv.reference.decode import dense_coefficients
from tests.codecs import sample_moment, sample_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def clustered_tokens(
    heads: int, tokens: int, width: int, clusters: int = 9, seed: int = 0
) -> torch.Tensor:
    """BF16 [N, S, D] around a few means, as neighbouring frames are, with some large channels."""
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(heads, clusters, width, generator=generator)
    chosen = torch.randint(0, clusters, (heads, tokens), generator=generator)
    noise = torch.randn(heads, tokens, width, generator=generator)
    x = means.gather(1, chosen[..., None].expand(-1, -1, width)) + 0.5 * noise
    x[..., :: max(1, width // 5)] *= 4
    return x.bfloat16().to(DEVICE)


def start_centroids(x: torch.Tensor, count: int, seed: int = 1) -> torch.Tensor:
    """BF16 [N, C, D]: tokens of each head, the same places in all."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(x.shape[1], generator=generator)[:count]
    return x[:, chosen.to(x.device)].bfloat16()


def nearest_gap(x: torch.Tensor, centroids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """By how much the chosen centroid's score is above the least one: FP64 [N, S].

    The score |mu|^2 - 2 x·mu of BF16 numbers, in FP64.
    """
    mu, tokens = centroids.double(), x.bfloat16().double()
    scores = (mu * mu).sum(-1)[:, None] - 2 * tokens @ mu.mT
    return scores.gather(2, ids.long()[..., None])[..., 0] - scores.amin(-1)


def score_bound(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """What FP32 sums may add to a difference of two scores: FP64 [N, 1].

    Two dot products and two norms of D terms, each off by at most D·2^-24 times its absolute sum.
    """
    mu, tokens = centroids.double(), x.bfloat16().double()
    size = (mu * mu).sum(-1).amax(-1) + 2 * tokens.norm(dim=-1).amax(-1) * mu.norm(dim=-1).amax(-1)
    return (2 * x.shape[-1] * 2.0**-24 * size)[:, None]


# --- decoding ---

TRITS = CodecConfig(
    "qvg", centroids=16, metadata="int8", packing="trits", centroid_format="fp8", refinement=2
)


def random_bytes(*shape: int, top: int = 256, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, top, shape, generator=generator, dtype=torch.uint8).to(DEVICE)


@cache
def packed(config: CodecConfig, shape: tuple[int, ...] = (2, 2, 37, 64)) -> Payload:
    """A payload of `sample_tokens` on the device under test."""
    x = sample_tokens(*shape)
    return encode(x, config, stats=sample_moment(x)).to(DEVICE)


def blank(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "BHSD") -> Tensor:
    """[B, H, S, D] full of NaN, in memory of that layout."""
    batch, heads, tokens, width = shape
    if layout == "BHSD":
        return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    size = (batch, tokens, heads, width)
    return torch.full(size, torch.nan, dtype=dtype, device=DEVICE).transpose(1, 2)


def decoded(payload: Payload, backend: str, out: Tensor, start: int = 0) -> Tensor:
    with ops.use_backend(backend):
        return payload.decode(out=out, start=start, end=start + out.shape[2])


def check(payload: Payload, out: Tensor, start: int = 0) -> None:
    """`out` from the kernel is the reference's: bit by bit, or the sum of a correction apart."""
    decoded(payload, "triton", out, start)
    expected = blank(tuple(out.shape), out.dtype)
    decoded(payload, "reference", expected, start)
    if "basis" not in payload.tensors:
        assert torch.equal(out, expected)
        return
    ulp = expected.float().abs() * torch.finfo(out.dtype).eps
    exact = blank(tuple(out.shape), torch.float32)
    bound = summation_bound(payload, decoded(payload, "reference", exact, start), start)
    assert torch.all((out.float() - expected.float()).abs() <= bound + ulp * (ulp > bound))


def summation_bound(payload: Payload, value: Tensor, start: int) -> Tensor:
    """How far two FP32 sums of alpha·c·u, and of it and the rest, may be apart.

    Matrix units cut off what a sum loses, up to 2^-22 of its largest part for each of at most 32.
    """
    tensors = payload.tensors
    if "row_index" in tensors:
        tensors = dense_coefficients(tensors)
    rows = slice(start, start + value.shape[2])
    codes, alpha = tensors["coef_codes"][:, :, rows], tensors["coef_scales"][:, :, rows]
    parts = codes.float().abs() @ tensors["basis"].float().abs().transpose(-1, -2)
    return 2.0**-17 * parts * alpha.float()[..., None] + 2.0**-22 * value.abs()
