"""Hadamard rotation and QuaRot: against the matrix, in both frames, over split widths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import steadykv as skv
from steadykv import ops
from steadykv.codecs import Payload, encode
from steadykv.config import PRESETS, CodecConfig, preset
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


SPLITS = [(64, ()), (64, (32, 32)), (96, ()), (96, (64, 32)), (128, ()), (128, (64, 32, 32)),
          (256, ()), (256, (128, 128))]  # fmt: skip


@pytest.mark.parametrize(("width", "splits"), SPLITS, ids=str)
def test_rotated_queries_see_the_same_logits(width: int, splits: tuple[int, ...]) -> None:
    """Keys may stay rotated if queries are rotated too, and values if the output is."""
    x = sample_tokens(2, 2, 70, width)
    config = CodecConfig("quarot", group_size=32, dim_splits=splits)
    payload = encode(x, config)
    decoded = payload.decode(torch.float32)
    rotated = payload.decode(torch.float32, rotated=True)
    assert torch.equal(rotated, rotated_values(payload, splits or (width,)))
    assert not torch.allclose(rotated, decoded, atol=0.1)
    queries = sample_queries(x, group=2)  # two query heads read each key head
    keys, turned_keys = (t.repeat_interleave(2, 1) for t in (decoded, rotated))
    logits = queries @ keys.mT
    turned = skv.rotate(queries, config) @ turned_keys.mT
    torch.testing.assert_close(turned, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
    expected, found = ((t / width**0.5).softmax(-1) for t in (logits, turned))
    output = skv.rotate(found @ turned_keys, config)
    # A weight is off by at most the factor e^(2d) for logits that are off by d.
    off = float((turned - logits).abs().max()) / width**0.5
    largest = float(keys.abs().max())
    atol = (math.expm1(2 * off) + 1e-5) * largest
    assert atol < 2e-3 * largest
    torch.testing.assert_close(output, expected @ keys, rtol=0, atol=atol)


def test_rotating_only_one_side_is_another_attention() -> None:
    x = sample_tokens(1, 1, 50, 64)
    config = CodecConfig("quarot")
    payload, queries = encode(x, config), sample_queries(x)
    logits = queries @ payload.decode(torch.float32).mT
    for q, rotated in ((queries, True), (skv.rotate(queries, config), False)):
        wrong = q @ payload.decode(torch.float32, rotated=rotated).mT
        assert float((wrong - logits).norm() / logits.norm()) > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_queries_are_turned_in_their_own_dtype(dtype: torch.dtype) -> None:
    config = CodecConfig("quarot", group_size=16, dim_splits=(64, 32))
    queries = sample_queries(sample_tokens(2, 3, 9, 96)).to(dtype)
    strided = queries.transpose(1, 2).contiguous().transpose(1, 2)  # BSHD memory
    turned = skv.rotate(strided, config)
    assert (turned.dtype, turned.shape, turned.is_contiguous()) == (dtype, queries.shape, True)
    expected = (queries.double() @ matrix((64, 32))).to(dtype)
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}[dtype]
    torch.testing.assert_close(turned, expected, rtol=step, atol=1e-5)
    assert torch.equal(strided, queries)
    loud = torch.full((1, 96), torch.finfo(dtype).max, dtype=dtype)
    assert skv.rotate(loud, config).isfinite().all()
    assert skv.rotate(queries[:, :, :0], config).shape == (2, 3, 0, 96)


def test_a_rotated_slice_goes_into_any_view() -> None:
    payload = encode(sample_tokens(2, 3, 67, 80), CodecConfig("quarot", group_size=16))
    whole = payload.decode(torch.float32, rotated=True)
    buffer = torch.full((2, 20, 3, 80), math.nan)
    out = buffer.transpose(1, 2)
    assert payload.decode(out=out, start=13, end=33, rotated=True) is out
    assert torch.equal(out, whole[:, :, 13:33])
    assert torch.equal(payload.decode(rotated=True), whole.bfloat16())


def test_methods_that_store_the_frame_of_the_host_have_no_other() -> None:
    for name in PRESETS:
        if name == "quarot":
            continue
        for config in {preset(name).keys, preset(name).values}:
            with pytest.raises(ConfigError, match="in the frame of the host") as error:
                skv.rotate(torch.zeros(1, 1, 8, 64), config)
            assert "expected" in str(error.value)
            for tokens in (0, 30):
                if config.needs_calibration:
                    continue
                payload = encode(sample_tokens(tokens=tokens), config)
                with pytest.raises(ConfigError, match=f"{config.method} stores"):
                    payload.decode(rotated=True)


def test_what_cannot_be_rotated_is_refused_in_one_line() -> None:
    config = CodecConfig("quarot", dim_splits=(128, 128))
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (ShapeError, "head_dim is 128: expected 256", torch.zeros(2, 128), config),
        (ShapeError, "torch.int64", torch.zeros(2, 256).long(), config),
        (ShapeError, "torch.float64", torch.zeros(2, 256).double(), config),
        (ShapeError, r"\(\) torch.float32", torch.tensor(1.0), config),
        (ShapeError, "D at least 1", torch.zeros(2, 0), CodecConfig("quarot")),
        (ShapeError, "x is list", [1.0], config),
        (ConfigError, "config is a CacheConfig", torch.zeros(2, 256), preset("quarot")),
    ]
    for kind, words, x, given in cases:
        with pytest.raises(kind, match=words) as error:
            skv.rotate(x, given)
        assert "expected" in str(error.value)
        assert "\n" not in str(error.value)


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
