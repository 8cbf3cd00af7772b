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
from .grid_bounds import error_bound

BITS = [2, 3, 4]


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


@given(st.data(), st.integers(0, 40), st.integers(1, 3))
def test_trits_are_digits_of_base_three(data: st.DataObject, length: int, rows: int) -> None:
    row = st.lists(st.integers(0, 2), min_size=length, max_size=length)
    codes = data.draw(st.lists(row, min_size=rows, max_size=rows))
    packed = ops.pack(torch.tensor(codes, dtype=torch.uint8).view(rows, length), 2, "trits")
    assert packed.shape == (rows, ops.packed_length(length, 2, "trits"))
    for number, values in zip(packed.tolist(), codes, strict=True):
        digits = [(byte // 3**k) % 3 for byte in number for k in range(5)]
        assert digits[:length] == values
        assert not any(digits[length:])
        assert all(byte < 243 for byte in number)
    assert ops.unpack(packed, 2, length, "trits").tolist() == codes
    assert ops.unpack(packed, 2, length, "trits", dtype=torch.float32).tolist() == codes


def groups_of(row: np.ndarray, size: int) -> list[slice]:
    return [slice(at, min(at + size, len(row))) for at in range(0, len(row), size)]


def e4m3(value: np.float32) -> np.float32:
    """The nearest E4M3 number, saturating."""
    clamped = torch.tensor(np.clip(value, np.float32(-448), np.float32(448)))
    return np.float32(clamped.to(torch.float8_e4m3fn).float())


def quantized_by_hand(x: Tensor, grid: str, bits: int, size: int, clip: float = 1.0) -> np.ndarray:
    """The definitions, one group at a time, in NumPy's FP32: values [N, S, D]."""
    one, top, half_top = np.float32, np.float32(2**bits - 1), np.float32(2 ** (bits - 1) - 1)
    values = np.zeros(x.shape, np.float32)

    def wanted_scale(part: np.ndarray) -> np.float32:
        if grid.startswith("symmetric"):
            return one(np.abs(part).max() / half_top)
        if grid == "affine_zero":
            return one((max(part.max(), one(0)) - min(part.min(), one(0))) / top)
        return one((one(clip) * part.max() - one(clip) * part.min()) / top)

    for head in range(x.shape[0]):
        rows = x[head].numpy()
        base = one(
            np.float16(max(wanted_scale(r[g]) for r in rows for g in groups_of(r, size)) / one(255))
        )
        for token, row in enumerate(rows):
            for group in groups_of(row, size):
                part = row[group]
                wanted = wanted_scale(part)
                if grid in ("symmetric", "affine_min_fp8"):
                    s = e4m3(max(wanted, one(2**-9)))
                elif grid == "affine_min":
                    s = one(np.float16(wanted))
                else:
                    s = base * np.clip(np.rint(wanted / base), 1, 255) if base else one(0)
                if grid.startswith("symmetric"):
                    value = s * np.clip(np.rint(part / s), -half_top, half_top) if s else 0 * part
                elif grid.startswith("affine_min"):
                    low = one(clip) * part.min()
                    m = e4m3(low) if grid == "affine_min_fp8" else one(np.float16(low))
                    code = np.clip(np.rint((part - m) / s), 0, top) if s else 0 * part
                    value = m + s * code
                else:
                    low = min(part.min(), one(0))
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


@pytest.mark.parametrize("clip", [0.99, 0.5])
def test_clipped_ends_match_scalar_arithmetic(clip: float) -> None:
    x = sample_tokens(1, 2, 9, 66).float()[0]
    x[1, 1] = x[1, 1].abs() + 1  # ends of one sign are moved towards zero as well
    tensors, _ = ops.group_quantize(x, "affine_min", 2, 24, clip_ratio=clip)
    value = ops.group_dequantize(tensors, "affine_min", 2, 24, 66, 0, 9)
    assert np.array_equal(value.numpy(), quantized_by_hand(x, "affine_min", 2, 24, clip))


@pytest.mark.parametrize("grid", ["symmetric", "symmetric_int8"])
def test_packing_changes_bytes_and_nothing_else(grid: str) -> None:
    x = sample_tokens(1, 2, 9, 66).float()[0]
    bits, _ = ops.group_quantize(x, grid, 2, 24)
    trits, _ = ops.group_quantize(x, grid, 2, 24, packing="trits")
    assert trits["codes"].shape == (2, 9, 14)
    values = [
        ops.group_dequantize(tensors, grid, 2, 24, 66, 2, 9, packing=packing)
        for tensors, packing in ((bits, "bits"), (trits, "trits"))
    ]
    assert torch.equal(*values)


@pytest.mark.parametrize("start", range(0, 9, 2))
@pytest.mark.parametrize("bits", BITS)
def test_zero_points_are_found_at_any_token(bits: int, start: int) -> None:
    """They are packed across tokens: three groups of 3 bits straddle bytes in every way."""
    x = sample_tokens(1, 2, 9, 66).float()[0] + torch.linspace(-4, 4, 9)[:, None]
    tensors, _ = ops.group_quantize(x, "affine_zero", bits, 24)
    whole = ops.group_dequantize(tensors, "affine_zero", bits, 24, 66, 0, 9)
    for end in range(start + 1, 10):
        part = ops.group_dequantize(tensors, "affine_zero", bits, 24, 66, start, end)
        assert torch.equal(part, whole[:, start:end])
    assert len(set(ops.unpack(tensors["zeros"], bits, 27).flatten().tolist())) > 2


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
    bound = error_bound(x, grid, bits, size, tensors.get("scale_base"))
    assert ((x - value).abs() <= bound).all()


@pytest.mark.parametrize("grid", GRIDS)
def test_metadata_saturates_and_is_counted(grid: str) -> None:
    """Per head. The last value that fits is not counted."""
    limit = {
        "symmetric": 448.0,
        "symmetric_int8": 65504.0 * 255,
        "affine_min": 65504.0,
        "affine_min_fp8": 448.0,
        "affine_zero": 65504.0 * 255 * 3,
    }[grid]
    x = torch.zeros(3, 4, 8)
    x[0, 1, 2], x[1, 1, 2], x[2, 1, 2] = 1.0, limit, -2.5 * limit
    tensors, saturated = ops.group_quantize(x, grid, 2, 8)
    value = ops.group_dequantize(tensors, grid, 2, 8, 8, 0, 4)
    assert saturated.tolist() == [0, 0, 1]
    assert value.isfinite().all()
    rounding = 2**-4 if grid == "affine_min_fp8" else 1e-3  # of a third of the range, to E4M3
    assert float(value[1, 1, 2]) == pytest.approx(limit, rel=rounding)
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
def test_head_rows_replace_nan_and_inf(fill: float) -> None:
    x = sample_tokens(2, 3, 4, 5)
    x[1, 2, 0, :3] = fill
    rows, count = ops.head_rows(x, 0, 6)
    assert count.dtype == torch.int64
    assert count.tolist() == [0, 0, 0, 0, 0, 3]
    assert rows.dtype == torch.float32
    assert not rows[5, 0, :3].any()
    x[1, 2, 0, :3] = 0
    assert torch.equal(rows, x.flatten(0, 1).float())
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    some, count = ops.head_rows(strided, 1, 5)  # across the batch rows
    assert torch.equal(some, rows[1:5])
