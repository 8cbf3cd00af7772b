"""Packing and the three grids, against scalar arithmetic and their error bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steadykv import ops
from steadykv.ops.group_quantize import GRIDS

from .codecs import sample_tokens

BITS = [2, 4]


@given(st.data(), st.sampled_from(BITS), st.integers(0, 40), st.integers(1, 3))
def test_pack_and_unpack(data: st.DataObject, bits: int, length: int, rows: int) -> None:
    row = st.lists(st.integers(0, 2**bits - 1), min_size=length, max_size=length)
    codes = data.draw(st.lists(row, min_size=rows, max_size=rows))
    packed = ops.pack(torch.tensor(codes, dtype=torch.uint8).view(rows, length), bits)
    assert packed.shape == (rows, ops.packed_length(length, bits))
    for number, values in zip(packed.tolist(), codes, strict=True):
        little_endian = sum(code << (bits * i) for i, code in enumerate(values))
        assert int.from_bytes(bytes(number), "little") == little_endian
    assert ops.unpack(packed, bits, length).tolist() == codes
    assert ops.unpack(packed, bits, length, dtype=torch.float32).tolist() == codes


def groups_of(row: np.ndarray, size: int) -> list[slice]:
    return [slice(at, min(at + size, len(row))) for at in range(0, len(row), size)]


def quantized_by_hand(x: Tensor, grid: str, bits: int, size: int) -> np.ndarray:
    """The definitions, one group at a time, in NumPy's FP32: values [N, S, D]."""
    one, top, half_top = np.float32, np.float32(2**bits - 1), np.float32(2 ** (bits - 1) - 1)
    values = np.zeros(x.shape, np.float32)
    for head in range(x.shape[0]):
        rows = x[head].numpy()
        spans = [
            max(r[g].max(), one(0)) - min(r[g].min(), one(0))
            for r in rows
            for g in groups_of(r, size)
        ]
        base = one(np.float16(max(spans) / top / one(255)))
        for token, row in enumerate(rows):
            for group in groups_of(row, size):
                part = row[group]
                if grid == "symmetric":
                    wanted = np.clip(np.abs(part).max() / half_top, one(2**-9), one(448))
                    s = one(torch.tensor(wanted).to(torch.float8_e4m3fn).float())
                    value = s * np.clip(np.rint(part / s), -half_top, half_top)
                elif grid == "affine_min":
                    m = one(np.float16(part.min()))
                    s = one(np.float16((part.max() - part.min()) / top))
                    code = np.clip(np.rint((part - m) / s), 0, top) if s else 0 * part
                    value = m + s * code
                else:
                    low, high = min(part.min(), one(0)), max(part.max(), one(0))
                    wanted = (high - low) / top
                    s = base * np.clip(np.rint(wanted / base), 1, 255) if base else one(0)
                    z = np.clip(np.rint(-low / s), 0, top) if s else one(0)
                    code = np.clip(np.rint(part / s) + z, 0, top) if s else 0 * part
                    value = s * (code - z)
                values[head, token, group] = value
    return values


@pytest.mark.parametrize("size", [1, 24, 64, 100])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 300.0], ids=str)
def test_grids_match_scalar_arithmetic(grid: str, bits: int, size: int, scale: float) -> None:
    x = sample_tokens(1, 2, 9, 66, seed=size).float()[0] * scale
    x[0, 0] = 0
    x[1, 1] = x[1, 1].abs() + 1
    tensors, _ = ops.group_quantize(x, grid, bits, size)
    value = ops.group_dequantize(tensors, grid, bits, size, 66, 0, 9)
    assert np.array_equal(value.numpy(), quantized_by_hand(x, grid, bits, size))


@pytest.mark.parametrize("bits", BITS)
def test_token_groups_are_channel_groups_of_the_transpose(bits: int) -> None:
    x = sample_tokens(1, 3, 70, 48).float()[0]
    by_tokens, _ = ops.group_quantize(x, "affine_min", bits, 32, axis="tokens")
    turned, _ = ops.group_quantize(x.transpose(1, 2).contiguous(), "affine_min", bits, 32)
    assert torch.equal(by_tokens["scale"], turned["scale"].transpose(1, 2))
    assert torch.equal(by_tokens["minimum"], turned["minimum"].transpose(1, 2))
    value = ops.group_dequantize(by_tokens, "affine_min", bits, 32, 48, 0, 70, axis="tokens")
    other = ops.group_dequantize(turned, "affine_min", bits, 32, 70, 0, 48)
    assert torch.equal(value, other.transpose(1, 2))


@pytest.mark.parametrize("grid", GRIDS)
@given(
    st.integers(0, 2**31),
    st.sampled_from(BITS),
    st.sampled_from([3, 16, 50]),
    st.sampled_from([1e-3, 1.0, 10.0]),
)
def test_errors_stay_within_the_step(
    grid: str, seed: int, bits: int, size: int, scale: float
) -> None:
    """Half a step, plus what the rounding of scale, minimum and zero point can move the ends."""
    x = sample_tokens(1, 1, 12, 50, seed=seed % 1000, dtype=torch.float32)[0] * scale
    tensors, saturated = ops.group_quantize(x, grid, bits, size)
    value = ops.group_dequantize(tensors, grid, bits, size, 50, 0, 12)
    assert not saturated.any()
    top = 2**bits - 1
    for part, decoded in zip(x.split(size, -1), value.split(size, -1), strict=True):
        low, high = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        peak = part.abs().amax(-1, keepdim=True)
        if grid == "symmetric":  # E4M3: 2^-4 relative, at least 2^-10, and a floor of 2^-9
            half_top = 2 ** (bits - 1) - 1
            step = (peak / half_top).clamp(min=2**-9)
            scale_error = torch.maximum(step * 2**-4, torch.tensor(2**-10))
            bound = (step + scale_error) / 2 + half_top * scale_error
        elif grid == "affine_min":  # FP16: 2^-11 relative, at least 2^-25
            step = (high - low) / top
            bound = step / 2 + (peak + top * step) * 2**-10 + 2**-23
        else:  # the scale is off by half a unit of base, and the zero point by half a step
            step = (high.clamp(min=0) - low.clamp(max=0)) / top
            base = tensors["scale_base"].float()[:, None, None]
            bound = step + (top + 1) * base
        assert ((part - decoded).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("grid", GRIDS)
def test_metadata_saturates_and_is_counted(grid: str) -> None:
    """Per head. The last value that fits is not counted."""
    limit = {"symmetric": 448.0, "affine_min": 65504.0, "affine_zero": 65504.0 * 255 * 3}[grid]
    x = torch.zeros(3, 4, 8)
    x[0, 1, 2], x[1, 1, 2], x[2, 1, 2] = 1.0, limit, -2.5 * limit
    tensors, saturated = ops.group_quantize(x, grid, 2, 8)
    value = ops.group_dequantize(tensors, grid, 2, 8, 8, 0, 4)
    assert saturated.tolist() == [0, 0, 1]
    assert value.isfinite().all()
    assert float(value[1, 1, 2]) == pytest.approx(limit, rel=1e-3)
    assert abs(float(value[2, 1, 2])) == pytest.approx(limit, rel=1e-3)


def test_one_signed_groups_reach_to_zero() -> None:
    x = torch.tensor([[[10.0, 11.0, 12.0, 13.0]], [[-10.0, -11.0, -12.0, -13.0]]])
    tensors, _ = ops.group_quantize(x, "affine_zero", 2, 4)
    value = ops.group_dequantize(tensors, "affine_zero", 2, 4, 4, 0, 1)
    assert ops.unpack(tensors["zeros"], 2, 1).tolist() == [[0], [3]]
    torch.testing.assert_close(value[0], -value[1])
    assert float(value[0, 0, 3]) == pytest.approx(13, rel=1e-3)


def test_one_outlier_coarsens_the_scales_of_its_head_only() -> None:
    x = sample_tokens(1, 2, 8, 64).float()[0]
    x[1, 3, 5] = 4000
    codes = ops.group_quantize(x, "affine_zero", 2, 64)[0]["scale_codes"]
    assert codes[1, [0, 1, 2, 4, 5, 6, 7]].max() < 10 < codes[0].median()


@pytest.mark.parametrize("fill", [math.nan, math.inf], ids=str)
def test_replace_nonfinite(fill: float) -> None:
    x = sample_tokens(2, 3, 4, 5)
    x[1, 2, 0, :3] = fill
    clean, count = ops.replace_nonfinite(x)
    assert count.dtype == torch.int64
    assert count.tolist() == [[0, 0, 0], [0, 0, 3]]
    assert clean.dtype == x.dtype
    assert not clean[1, 2, 0, :3].any()
    clean[1, 2, 0, :3] = fill
    assert torch.equal(clean.view(torch.int16), x.view(torch.int16))
