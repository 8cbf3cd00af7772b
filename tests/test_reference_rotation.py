"""Hadamard rotation and QuaRot: against the matrix, in both frames, over split widths."""

from __future__ import annotations

import math

import pytest
import torch

from steadykv import ops
from steadykv.codecs import Payload, encode
from steadykv.config import CodecConfig
from steadykv.errors import ConfigError, ShapeError

from .codecs import sample_queries, sample_tokens, sqnr

FP32_MAX = torch.finfo(torch.float32).max


def matrix(widths: tuple[int, ...]) -> torch.Tensor:
    """Hd from its definition, FP64 [D, D]."""
    blocks = []
    for width in widths:
        size = max(n for n in (2**k for k in range(12)) if width % n == 0)
        signs = [[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
        block = torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)
        blocks += [block] * (width // size)
    return torch.block_diag(*blocks)


WIDTHS = [(128,), (80,), (96,), (1,), (37,), (64, 64), (44, 42, 42), (128, 128), (16, 3)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rotation_is_the_product_with_the_matrix(widths: tuple[int, ...]) -> None:
    x = sample_tokens(1, 2, 9, sum(widths)).float()[0]
    before = x.clone()
    rotated = ops.hadamard(x, widths)
    expected = (x.double() @ matrix(widths)).float()
    torch.testing.assert_close(rotated, expected, rtol=0, atol=2e-6 * float(x.abs().max()))
    torch.testing.assert_close(ops.hadamard(rotated, widths), x, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)
    assert rotated.is_contiguous()


def test_rotation_of_one_channel_spreads_it() -> None:
    x = torch.zeros(1, 1, 128)
    x[..., 5] = 16.0
    rotated = ops.hadamard(x, (128,))
    assert torch.equal(rotated.abs(), torch.full_like(x, float(torch.tensor(128**-0.5) * 16)))
    assert float(rotated[0, 0, 1]) < 0 < float(rotated[0, 0, 2])  # popcounts of 5 & 1 and 5 & 2


@pytest.mark.parametrize("value", [FP32_MAX, -FP32_MAX])
def test_no_sum_overflows(value: float) -> None:
    """Numbers that a sum of 128 could not hold saturate before they are added."""
    rotated = ops.hadamard(torch.full((1, 2, 128), value), (128,))
    assert rotated.isfinite().all()
    assert float(rotated[0, 0, 0]) == pytest.approx(math.copysign(FP32_MAX / 128**0.5, value), 1e-5)


def rotated_values(payload: Payload, widths: tuple[int, ...]) -> torch.Tensor:
    """The payload in the rotated frame, FP32 [B, H, S, D]."""
    tensors = {name: tensor.flatten(0, 1) for name, tensor in payload.tensors.items()}
    config, (batch, heads, tokens, width) = payload.config, payload.shape
    value = ops.group_dequantize(
        tensors, "affine_min", config.bits, config.group_size, width, 0, tokens
    )
    assert sum(widths) == width
    return value.unflatten(0, (batch, heads))


@pytest.mark.parametrize("widths", [(), (64, 32), (32, 32, 32)], ids=str)
def test_rotated_queries_see_the_same_logits(widths: tuple[int, ...]) -> None:
    """Keys may stay rotated if queries are rotated too, and values if the output is."""
    x = sample_tokens(2, 2, 70, 96)
    payload = encode(x, CodecConfig("quarot", group_size=32, dim_splits=widths))
    blocks = widths or (96,)
    decoded, rotated = payload.decode(torch.float32), rotated_values(payload, blocks)
    queries = sample_queries(x)
    logits = queries @ decoded.mT
    turned = ops.hadamard(queries, blocks) @ rotated.mT
    scale = float(logits.abs().max())
    torch.testing.assert_close(turned, logits, rtol=0, atol=1e-5 * scale)
    weights = (logits / 96**0.5).softmax(-1)
    output = ops.hadamard(weights @ rotated, blocks)
    torch.testing.assert_close(output, weights @ decoded, rtol=0, atol=1e-4)


def test_the_error_is_that_of_the_rotated_groups() -> None:
    """The bound that the codec states: half a step, or what clipping took, in the rotated frame."""
    x = sample_tokens(1, 2, 70, 96, dtype=torch.float32)
    for bits, ratio in ((2, 0.99), (3, 0.9), (4, 1.0)):
        config = CodecConfig("quarot", bits=bits, group_size=24, clip_ratio=ratio)
        payload = encode(x, config)
        y = ops.hadamard(x.flatten(0, 1), (96,)).view(x.shape)
        off = (y - rotated_values(payload, (96,))).abs()
        parts = y.split(24, -1)
        low = torch.stack([part.amin(-1) for part in parts], -1).repeat_interleave(24, -1)
        high = torch.stack([part.amax(-1) for part in parts], -1).repeat_interleave(24, -1)
        peak = torch.maximum(low.abs(), high.abs())
        step = ratio * (high - low) / (2**bits - 1)
        bound = step / 2 + (1 - ratio) * peak + (peak + 2**bits * step) * 2**-10
        assert (off <= bound).all()
        assert (off > 0.9 * step / 2).any()
        error = (payload.decode(torch.float32) - x).norm(dim=-1)
        torch.testing.assert_close(error, off.norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_splits_decide_the_blocks() -> None:
    """192 alone has blocks of 64; cut into 128 and 64 it has one of each, as two runs would."""
    x = sample_tokens(1, 2, 40, 192)
    whole, cut = (encode(x, CodecConfig("quarot", dim_splits=widths)) for widths in ((), (128, 64)))
    assert whole != cut
    assert whole.nbytes == cut.nbytes
    for at in (slice(0, 128), slice(128, 192)):
        alone = encode(x[..., at].contiguous(), CodecConfig("quarot"))
        assert torch.equal(cut.decode()[..., at], alone.decode())


def test_rotation_tames_a_loud_channel() -> None:
    """What QuaRot is for: plain rounding loses the quiet channels of such a group."""
    x = sample_tokens(1, 2, 100, 128).float()
    x[..., 7] *= 30
    quiet = [c for c in range(128) if c != 7]
    found = {
        name: sqnr(x[..., quiet], encode(x, CodecConfig(name)).decode()[..., quiet])
        for name in ("rtn", "quarot")
    }
    assert found["rtn"] < 1 < 2.5 < found["quarot"] < 6


def test_splits_that_do_not_fit_are_refused() -> None:
    config = CodecConfig("quarot", dim_splits=(128, 128))
    with pytest.raises(ShapeError, match="head_dim is 128: expected 256"):
        encode(sample_tokens(head_dim=128), config)
    with pytest.raises(ShapeError, match="head_dim is 64: expected 256"):
        config.payload_nbytes(1, 1, 8, 64)
    with pytest.raises(ConfigError, match="multiples of it"):
        CodecConfig("quarot", dim_splits=(96, 32))
    assert CodecConfig("quarot", dim_splits=[64, 32]).dim_splits == (64, 32)  # type: ignore[arg-type]
