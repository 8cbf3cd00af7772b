"""Decoding to BF16 with two numbers in each register: the payloads a cache reads all the time."""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import scaled_floor
from .pairs import cut, fused_pairs, halves, rounded_pair

__all__ = ["pairs_kernel"]


@triton.jit(
    do_not_specialize=[
        "s_batch", "s_head", "s_token", "start", "count", "tokens", "first_row", "clusters",
        "zeros_row",
    ]
)  # fmt: skip
def pairs_kernel(
    p_out,
    p_codes,
    p_finer,
    p_scale,
    p_base,
    p_zeros,
    p_ids,
    p_centroids,
    p_centroid_scale,
    p_basis,
    p_coef_codes,
    p_coef_scales,
    s_batch: tl.int64,
    s_head: tl.int64,
    s_token: tl.int64,
    start,
    count,
    tokens,
    first_row,
    clusters,
    zeros_row,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    IS_TRITS: tl.constexpr,
    CONVERTS: tl.constexpr,
    INTERPRET: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Tokens start..start + count, BLOCK_T or more, of the heads of the grid.

    As `groups_kernel` for 2 bits, 2 bits of refinement, and one stage, BF16 as pairs and E4M3 as
    fours in int32; strides are counted in pairs. Without p_base, nothing but BF16 centroids.
    CONVERTS: the device has an instruction for E4M3. SIDE: words that lie side by side in a warp,
    of one group.

    The tile is [SIDE, T / REST, REST, groups, words / SIDE of a group, 4 pairs]: Triton gives the
    lanes to the first axes first, so a warp stores SIDE·16 bytes of each of 32 / SIDE tokens at a
    time. What depends on the other axes alone are constants in the addresses.
    """
    GROUPS: tl.constexpr = WIDTH // GROUP
    RUN: tl.constexpr = GROUP // (8 * SIDE)
    REST: tl.constexpr = BLOCK_T * SIDE // 32
    head = (first_row + tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    # The last tile begins earlier, so that no token needs a mask: it writes some a second time.
    first = tl.minimum(tl.program_id(0) * BLOCK_T, count - BLOCK_T)
    at = head * tokens + start + first
    o_lane = tl.arange(0, 32 // SIDE)[None, :, None, None, None, None]
    o_rest = tl.arange(0, REST)[None, None, :, None, None, None] * (32 // SIDE)
    o_group = tl.arange(0, GROUPS)[None, None, None, :, None, None]
    o_run = (o_group * RUN + tl.arange(0, RUN)[None, None, None, None, :, None]) * SIDE
    o_side = tl.arange(0, SIDE)[:, None, None, None, None, None]
    o_pair = tl.arange(0, 4)[None, None, None, None, None, :]

    ids = tl.load(p_ids + at + o_lane + o_rest).to(tl.int32)
    # One word a thread: longer runs would have to be exchanged.
    o_code = tl.max_contiguous(o_lane * (WIDTH // 8) + o_side, [1, 1, 1, 1, 1, 1])
    o_word = o_rest * (WIDTH // 8) + o_run
    if IS_TRITS:
        word = _trits_word(p_codes, at, o_lane + o_rest, o_run + o_side, (WIDTH + 4) // 5)
    else:
        word = tl.load(p_codes + at * (WIDTH // 8) + o_code + o_word).to(tl.int32) & 0xFFFF
    if p_centroid_scale is None:
        p_mu = p_centroids + head * clusters * (WIDTH // 2) + (4 * o_side + o_pair)
        mu = tl.load(p_mu + ids * (WIDTH // 2) + 4 * o_run)
    else:
        o_four = tl.arange(0, 2)[None, None, None, None, None, :]
        p_mu = p_centroids + head * clusters * (WIDTH // 4) + (2 * o_side + o_four)
        mu = tl.load(p_mu + ids * (WIDTH // 4) + 2 * o_run)
    o_scale = (o_lane + 0 * o_side) * GROUPS + o_group
    scale = tl.load(p_scale + at * GROUPS + o_scale + o_rest * GROUPS)
    if p_base is None:
        # E4M3 as BF16 is 2^120 times too small; the steps are as much too large.
        scale = (scale.to(tl.int8, bitcast=True).to(tl.int32) & 0x87F) * 0x100010
        # Codes as BF16: code 2k + 1 is put sixteen bits above code 2k, and both become the last
        # bits of 128 + code or 128 + 16·code.
        spread = word | (word << 14)
        is_high = o_pair % 2 == 1
        place = tl.where(is_high, 0x00300030, 0x00030003)
        number = cut(spread >> (o_pair // 2 * 8), place, 0x43004300, INTERPRET)
        unit = tl.where(is_high, 0x79807980, 0x7B807B80)
        offset = tl.where(is_high, -0x02EF02F0, -0x00FE00FF)
        steps = fused_pairs(number, unit, offset, INTERPRET)
        value = fused_pairs(steps, scale, mu, INTERPRET)
    else:
        scale = scale.to(tl.float32) * tl.load(p_base + head).to(tl.float32)
        # Codes are put where they make 16 + code and 4 + code. Those times a scale of 19 bits are
        # exact in FP32, and so are the multiples that are taken off again with the zero point.
        if p_zeros is None:
            offset_even = 17.0 * scale
        else:
            o_bit = ((start + first) * GROUPS + o_scale + o_rest * GROUPS) * 2
            zero = tl.load(p_zeros + head * zeros_row + (o_bit >> 3)).to(tl.int32)
            zero = cut(zero << (19 - (o_bit & 6)), 0x180000, 0x41800000, INTERPRET)  # 16 + zero
            offset_even = zero.to(tl.float32, bitcast=True) * scale
        offset_odd = offset_even - 12.0 * scale
        if IS_TRITS:
            even, odd = _trits(word, o_pair, INTERPRET)
            even = even * scale - scale
            odd = odd * scale - scale
        else:
            even, odd = _sixteens(word << (19 - 4 * o_pair), INTERPRET)
            even = even * scale - offset_even
            odd = odd * scale - offset_odd
        if p_finer is not None:
            # (part - 1.5) / 4 of a step; the product is exact, so that the sum is rounded once.
            finer = tl.load(p_finer + at * (WIDTH // 8) + o_code + o_word).to(tl.int32)
            finer = (finer & 0xFFFF) << (19 - 4 * o_pair)
            part_even, part_odd = _sixteens(finer, INTERPRET)
            even += (part_even - 17.5) * (0.25 * scale)
            odd += (part_odd - 5.5) * (0.25 * scale)
        if p_centroid_scale is None:
            mu_even, mu_odd = halves(mu)
            even += mu_even
            odd += mu_odd
        else:
            # Products of 15 bits: exact, fused with the sum or not.
            mu_scale = tl.load(p_centroid_scale + head * clusters + ids).to(tl.float32)
            mu_even, mu_odd = _e4m3_pairs(mu, CONVERTS)
            even += mu_even * mu_scale
            odd += mu_odd * mu_scale
        if RANK > 0:
            low, high = _correction(
                p_basis + head * (WIDTH * RANK // 2), p_coef_codes + at * (RANK // 2),
                WIDTH, GROUPS, RUN, SIDE, RANK, INTERPRET, BLOCK_T,
            )  # fmt: skip
            alpha = tl.load(p_coef_scales + at + o_lane + o_rest).to(tl.float32)
            even += low * alpha
            odd += high * alpha
        value = rounded_pair(even, odd, INTERPRET)
    p_head = p_out.to(tl.pointer_type(tl.int32), bitcast=True)
    out_head = tl.program_id(2) * s_batch + tl.program_id(1) * s_head + first * s_token
    s_row = tl.multiple_of(s_token.to(tl.int32), 8)
    p_lane = p_head + tl.multiple_of(out_head, 8) + (o_lane * s_row + (4 * o_side + o_pair))
    tl.store(p_lane + o_rest * s_row + 4 * o_run, value)


@triton.jit
def _sixteens(codes, INTERPRET: tl.constexpr):
    """FP32 of 16 + the code in bits 19 and 20, and of 4 + the code in bits 21 and 22."""
    even = cut(codes, 0x180000, 0x41800000, INTERPRET).to(tl.float32, bitcast=True)
    odd = cut(codes, 0x600000, 0x40800000, INTERPRET).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def _e4m3_pairs(fours, CONVERTS: tl.constexpr):
    """FP32 of the even and the odd ones of E4M3 numbers, [..., 4] of four in each of [..., 2]."""
    if CONVERTS:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, first, second;
            .reg .b32 pair;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {first, second}, pair;
            cvt.f32.f16 $0, first;
            cvt.f32.f16 $1, second;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {first, second}, pair;
            cvt.f32.f16 $2, first;
            cvt.f32.f16 $3, second;
            }""",
            "=f,=f,=f,=f,r",
            [fours],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        # Of FP32 numbers 2^120 times too small, sign, exponent and mantissa; see `e4m3_value`.
        a = ((fours << 24 >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
        b = ((fours << 16 >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
        c = ((fours << 8 >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
        d = ((fours >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36
    shape: tl.constexpr = [
        fours.shape[0], fours.shape[1], fours.shape[2], fours.shape[3], fours.shape[4], 4
    ]  # fmt: skip
    return tl.reshape(tl.join(a, c), shape), tl.reshape(tl.join(b, d), shape)


@triton.jit
def _trits_word(p_codes, at, o_token, o_word, ROW: tl.constexpr):
    """The trits of a word, the first one lowest, as a number; above them others may be."""
    p_row = p_codes + at * ROW + o_token * ROW
    # Of a word that ends with the row the third byte is not looked at: any that is there will do.
    o_byte = 8 * o_word // 5
    digits = tl.load(p_row + o_byte).to(tl.int32)
    digits += 243 * tl.load(p_row + tl.minimum(o_byte + 1, ROW - 1)).to(tl.int32)
    digits += 59049 * tl.load(p_row + tl.minimum(o_byte + 2, ROW - 1)).to(tl.int32)
    first = 8 * o_word % 5  # the word begins at the first to the fifth trit of its first byte
    inverse = tl.where(first < 3, tl.where(first == 1, 1431655766, 477218589), 159072863)
    inverse = tl.where(first == 4, 53024288, inverse)  # 2^32 / 3^first, rounded up
    return tl.where(first == 0, digits, tl.umulhi(digits, inverse))


@triton.jit
def _trits(digits, o_pair, INTERPRET: tl.constexpr):
    """FP32 of the even and the odd trits of a word."""
    a, b, c, d = _four_trits(digits % 81, INTERPRET)
    e, f, g, h = _four_trits(digits // 81 % 81, INTERPRET)
    low_even, low_odd = tl.where(o_pair % 2 == 0, a, c), tl.where(o_pair % 2 == 0, b, d)
    high_even, high_odd = tl.where(o_pair % 2 == 0, e, g), tl.where(o_pair % 2 == 0, f, h)
    return tl.where(o_pair < 2, low_even, high_even), tl.where(o_pair < 2, low_odd, high_odd)


@triton.jit
def _four_trits(number, INTERPRET: tl.constexpr):
    """The digits to base 3 of 0 to 80, lowest first, by quotients in FP32, rounded down."""
    number = (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    # Inverses of 3, 9 and 27, a little above: no quotient is so close below an integer.
    third = scaled_floor(number, 0.33333337306976318, INTERPRET)
    ninth = scaled_floor(number, 0.11111111938953400, INTERPRET)
    last = scaled_floor(number, 0.03703704103827477, INTERPRET)
    return number - 3.0 * third, third - 3.0 * ninth, ninth - 3.0 * last, last


@triton.jit
def _correction(
    p_basis,
    p_codes,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    SIDE: tl.constexpr,
    RANK: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """codes·U^T, FP32: the lower and the upper numbers of the tile's pairs.

    Nothing changes hands inside a warp. Operands are loaded where the matrix units want them: lane
    4i + q has ranks 2q and 2q + 1 of row, or column, i. Of the product it gets columns 2q and
    2q + 1 of every eight, which are given the channels that it has in the tile: pair k of word q.
    """
    # Interpreted, a product of BF16 operands takes their bits for numbers.
    OPERAND: tl.constexpr = tl.float32 if INTERPRET else tl.bfloat16
    o_q = tl.arange(0, 4)[:, None, None]
    o_eight = tl.arange(0, 8)[None, :, None]
    o_tokens = tl.arange(0, BLOCK_T // 8)[None, None, :] * 8
    codes = _rank_pairs(p_codes, o_eight * (RANK // 2), o_tokens * (RANK // 2), o_q, RANK)
    codes = codes.to(tl.int32)
    o_block = tl.arange(0, WIDTH // 8)[None, None, :]
    o_channel = o_eight // 2 * 8 + o_eight % 2
    basis = _rank_pairs(
        p_basis, o_channel * (RANK // 2), (o_block // 4 * 32 + o_block % 4 * 2) * (RANK // 2), o_q,
        RANK,
    )  # fmt: skip
    if INTERPRET:
        even, odd = halves(basis)
    else:
        even = basis.to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = (basis >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    a = tl.join((codes << 24 >> 24).to(OPERAND), (codes >> 8).to(OPERAND))
    a = tl.reshape(tl.permute(a, [2, 1, 0, 3, 4]), [BLOCK_T, 16])
    b = tl.reshape(tl.permute(tl.join(even, odd), [0, 3, 4, 2, 1]), [16, WIDTH])
    total = tl.reshape(tl.dot(a, b), [BLOCK_T // 8, 8, GROUPS, RUN, 4, SIDE, 2])
    return tl.split(tl.permute(total, [5, 1, 0, 2, 3, 4, 6]))


@triton.jit
def _rank_pairs(p_pairs, o_lane, o_rest, o_q, RANK: tl.constexpr):
    """[4, 8, N, 2]: pairs q and 4 + q of the 16 ranks of each row, zero beyond RANK."""
    # One pair a thread: longer runs would have to be exchanged.
    p_pairs += tl.max_contiguous(o_lane + o_q, [1, 1, 1])
    p_pairs += o_rest
    low = tl.load(p_pairs, mask=(o_rest >= 0) & (o_q < RANK // 2), other=0)
    high = tl.zeros_like(low)
    if RANK > 8:
        high = tl.load(p_pairs + 4, mask=(o_rest >= 0) & (o_q + 4 < RANK // 2), other=0)
    return tl.join(low, high)
