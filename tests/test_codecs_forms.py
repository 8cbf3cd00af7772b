"""The forms that parameters give a payload: stages, metadata, FP8 centroids, trits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from steadykv import ops
from steadykv.cache.segments import Segment, TensorStore
from steadykv.codecs import Payload, SpanKey, encode
from steadykv.config import CodecConfig
from steadykv.errors import PayloadError

from .codecs import sample_moment, sample_tokens, sqnr
from .grid_bounds import error_bound

KEY = SpanKey(layer=1, tensor="value", span=4)
CLUSTERED = ("qvg", "qvg4", "quantwm")


def config(method: str, **fields: Any) -> CodecConfig:
    return CodecConfig(method, centroids=16, **fields)


def without_ids(payload: Payload) -> dict[str, Tensor]:
    return {k: t for k, t in payload.tensors.items() if k not in ("ids", "centroids")}


# --- error ----------------------------------------------------------------------------------------

BOUNDED: list[tuple[CodecConfig, str]] = [
    (CodecConfig("rtn"), "affine_min"),
    (CodecConfig("kivi", bits=3, group_size=32), "affine_min"),
    (CodecConfig("rtn", group_size=16, grid="symmetric", packing="trits"), "symmetric"),
    (CodecConfig("qvg", centroids=8, stages=2), "symmetric"),
    (CodecConfig("qvg", centroids=8, bits=3, metadata="int8"), "symmetric_int8"),
    (CodecConfig("qvg4", centroids=8, bits=3), "affine_zero"),
    (CodecConfig("qvg4", centroids=8, metadata="fp8", centroid_format="fp8"), "affine_min_fp8"),
]


@pytest.mark.parametrize(("codec", "grid"), BOUNDED, ids=lambda v: v if isinstance(v, str) else "")
@given(st.integers(0, 1000), st.sampled_from([1e-8, 1e-2, 1.0, 30.0]), st.sampled_from([1, 7, 40]))
def test_no_error_is_larger_than_the_docstring_says(
    codec: CodecConfig, grid: str, seed: int, scale: float, tokens: int
) -> None:
    """The bound of the grid on what is left of each token after its centroids."""
    x = sample_tokens(1, 2, tokens, 50, seed=seed, dtype=torch.float32) * scale
    payload = encode(x, codec)
    residual = x.clone()
    if payload.centroids is not None:
        for stage in range(codec.stages):
            table, ids = payload.centroids[0, :, stage], payload.tensors["ids"][0, :, stage].long()
            residual[0] -= ops.gather_centroids(table, ids)
    base = payload.tensors.get("scale_base")
    bound = error_bound(residual, grid, codec.bits, codec.group_size, base)
    assume(not payload.flags["saturated"].any())
    assert ((payload.decode(torch.float32) - x).abs() <= bound + x.abs() * 2**-20).all()


# --- stages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["qvg", "qvg4"])
def test_a_stage_is_one_stage_on_what_the_ones_before_left(method: str) -> None:
    """Three stages by hand from single ones; the grid sees only the last residual."""
    x = sample_tokens(2, 2, 90, 48)
    payload = encode(x, config(method, stages=3), span_key=KEY)
    assert payload.tensors["ids"].shape == (2, 2, 3, 90)
    assert payload.tensors["centroids"].shape == (2, 2, 3, 16, 48)
    residual = x.float()
    for stage in range(3):
        chosen = torch.randperm(90, generator=KEY.generator(0, stage))[:16]
        alone = encode(residual, config(method), initial_centroids=residual[:, :, None, chosen])
        for name in ("ids", "centroids"):
            assert torch.equal(payload.tensors[name][:, :, stage], alone.tensors[name][:, :, 0])
        ids = alone.tensors["ids"][:, :, 0].long()
        base = alone.tensors["centroids"][:, :, 0].float()
        residual = residual - base.gather(2, ids[..., None].expand(-1, -1, -1, 48))
    for name, tensor in without_ids(alone).items():
        assert torch.equal(payload.tensors[name].float(), tensor.float()), name


def test_every_stage_lowers_the_error() -> None:
    x = sample_tokens(1, 2, 300, 64)
    found = [sqnr(x, encode(x, config("qvg", stages=t)).decode()) for t in (1, 2, 3, 4)]
    assert all(after > before + 0.5 for before, after in pairwise(found))


def test_stages_start_warm_from_all_of_the_span_before() -> None:
    first, second = sample_tokens(tokens=80), sample_tokens(tokens=80, seed=3)
    two = config("qvg", stages=2)
    before = encode(first, two)
    assert encode(second, two, warm=before) == encode(
        second, two, initial_centroids=before.centroids
    )
    one = encode(first, config("qvg"))
    assert encode(second, two, warm=one) == encode(second, two)


# --- FP8 centroids --------------------------------------------------------------------------------


def test_fp8_centroids_by_hand() -> None:
    means = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)) * 100
    means[0, 1], means[0, 2], means[1, 3] = 0.0, 1e-9, 3.4e38
    stored, values, saturated = ops.quantize_centroids(means)
    assert stored["centroids"].dtype == torch.float8_e4m3fn
    assert saturated.tolist() == [0, 1]
    for head in range(2):
        for j in range(5):
            peak = float(means[head, j].abs().max())
            enough = [2.0**k for k in range(-24, 16) if peak <= 448 * 2.0**k]
            scale = torch.tensor(enough[0] if enough else 2.0**15)
            assert stored["centroid_scale"][head, j] == scale
            codes = (means[head, j] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(stored["centroids"][head, j].float(), codes.float())
            assert torch.equal(values[head, j].float(), scale * codes.float())
    assert values.dtype == torch.bfloat16
    assert torch.equal(values.float(), ops.centroid_values(stored))
    good = means.abs().amax(-1) < 1e38
    off = (values - means).abs()[good]
    step = stored["centroid_scale"].float()[good][:, None] * 2**-10
    assert (off <= torch.maximum(means[good].abs() * 2**-4, step)).all()


def test_the_scale_of_fp8_centroids_at_its_borders() -> None:
    """Of all powers of two in FP16, the one just large enough; then what is beyond the last."""
    exponents = torch.arange(-26, 17)
    least = 448 * torch.ldexp(torch.ones(43), exponents)
    means = torch.stack([least, torch.nextafter(least, torch.tensor(torch.inf))])[..., None]
    stored, values, saturated = ops.quantize_centroids(-means)
    scale = torch.ldexp(torch.ones(43), exponents.clamp(-24, 15))
    above = torch.ldexp(torch.ones(43), (exponents + 1).clamp(-24, 15))
    assert torch.equal(stored["centroid_scale"].float(), torch.stack([scale, above]))
    assert saturated.tolist() == [1, 2]  # 448·2^16, and 448·2^15 and a little, too
    assert values.isfinite().all()
    none = ops.quantize_centroids(torch.zeros(1, 1, 4))[1]
    assert torch.equal(none, torch.zeros(1, 1, 4, dtype=torch.bfloat16))
    huge = torch.tensor([[[torch.inf, -torch.inf, 1.0]]])
    assert ops.quantize_centroids(huge)[1].tolist() == [[[448 * 2.0**15, -448 * 2.0**15, 0.0]]]


def test_payloads_with_any_scale_of_fp8_centroids_are_read() -> None:
    """Those of earlier releases: products of FP32 that BF16 would not hold."""
    x = sample_tokens(1, 2, 60, 64)
    payload = encode(x, config("qvg4", centroid_format="fp8"))
    zero = encode(x, config("qvg4", centroid_format="fp8"))
    scale = payload.tensors["centroid_scale"]
    assert torch.equal(torch.frexp(scale.float()).mantissa, torch.full(scale.shape, 0.5))
    scale.mul_(1.2345)
    zero.tensors["centroids"].zero_()
    table = payload.tensors["centroids"].float() * scale.float()[..., None]
    assert not torch.equal(table, table.bfloat16().float())
    ids = payload.tensors["ids"][0, :, 0].long()
    expected = zero.decode(torch.float32)[0] + ops.gather_centroids(table[0, :, 0], ids)
    assert torch.equal(payload.decode(torch.float32)[0], expected)


@pytest.mark.parametrize("method", CLUSTERED)
def test_ids_and_residual_belong_to_the_decoded_fp8_centroids(method: str) -> None:
    x = sample_tokens(1, 2, 120, 64).float()
    payload = encode(x, config(method, centroid_format="fp8"), span_key=KEY)
    table = payload.tensors["centroids"].float() * payload.tensors["centroid_scale"][..., None]
    assert payload.centroids is not None
    assert torch.equal(payload.centroids, table)
    ids = payload.tensors["ids"][0, :, 0].long()
    if method != "quantwm":  # QSAC may prefer another than the nearest
        assert torch.equal(ids, ops.assign_centroids(x[0], table[0, :, 0]))
    residual = x[0] - ops.gather_centroids(table[0, :, 0], ids)
    codec_grid = "symmetric" if method == "qvg" else "affine_zero"
    tensors, _ = ops.group_quantize(residual, codec_grid, 2, 64)
    for name, tensor in tensors.items():
        assert torch.equal(payload.tensors[name][0].float(), tensor.float()), name
    value = ops.group_dequantize(tensors, codec_grid, 2, 64, 64, 0, 120)
    value += ops.gather_centroids(table[0, :, 0], ids)
    assert torch.equal(payload.decode(torch.float32)[0], value)


def test_means_are_rounded_once() -> None:
    """To E4M3 from FP32: BF16 in between would round twice."""
    x = sample_tokens(1, 2, 120, 64, dtype=torch.float32)
    payload = encode(x, config("qvg", centroid_format="fp8"), span_key=KEY)
    chosen = torch.randperm(120, generator=KEY.generator(0, 0))[:16]
    none, means = ops.kmeans(x[0], x[0][:, chosen], 2, rounded=False)
    assert none is None
    assert means.dtype == torch.float32
    assert not torch.equal(means, means.bfloat16().float())
    stored, _, _ = ops.quantize_centroids(means)
    for name, tensor in stored.items():
        assert torch.equal(payload.tensors[name][0, :, 0].float(), tensor.float())
    rounded, _, _ = ops.quantize_centroids(means.bfloat16().float())
    assert not torch.equal(rounded["centroids"].float(), stored["centroids"].float())


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_a_store_remembers_centroids_as_they_are_stored(form: str, with_ids: bool) -> None:
    x = sample_tokens(1, 2, 60, 32)
    codec = config("qvg", centroid_format=form, warm_start="ids" if with_ids else True)
    payload = encode(x, codec)
    store = TensorStore("key", token_dim=2)
    assert store.warm_start(60) is None
    store.append(Segment(0, 60, payload))
    store.remember(payload, with_ids=with_ids)
    warm = store.warm_start(60)
    assert warm is not None
    assert payload.centroids is not None
    assert torch.equal(warm.centroids, payload.centroids)
    assert (warm.ids is payload.tensors["ids"]) is with_ids
    assert warm.ids is None or with_ids
    assert store.warm_start(61) is None
    assert store.nbytes == store.segments[0].nbytes
    store.drop_where(lambda segment: True)  # the span leaves, what was remembered stays
    parts = payload.nbytes_by_part()
    expected = parts["centroids"] + parts.get("centroid_scale", 0)
    ids = {"ids": parts["ids"]} if with_ids else {}
    assert store.parts == {"centroids": expected, **ids}
    assert store.nbytes == sum(store.parts.values())
    store.clear()
    assert store.warm_start(60) is None
    assert store.nbytes == 0


# --- metadata -------------------------------------------------------------------------------------

SCALES = {"scale", "minimum", "scale_codes", "scale_base", "zeros"}


@pytest.mark.parametrize(
    ("method", "metadata", "expected"),
    [
        ("qvg", "fp8", {"scale": torch.float8_e4m3fn}),
        ("qvg", "int8", {"scale_codes": torch.uint8, "scale_base": torch.float16}),
        ("qvg4", "fp8", {"scale": torch.float8_e4m3fn, "minimum": torch.float8_e4m3fn}),
        (
            "qvg4",
            "int8",
            {"scale_codes": torch.uint8, "scale_base": torch.float16, "zeros": torch.uint8},
        ),
    ],
)
def test_what_the_metadata_field_stores(
    method: str, metadata: str, expected: dict[str, torch.dtype]
) -> None:
    x = sample_tokens(1, 2, 50, 80)
    payload = encode(x, config(method, metadata=metadata))
    found = {k: t.dtype for k, t in payload.tensors.items() if k in SCALES}
    assert found == expected
    other = encode(x, config(method, metadata="int8" if metadata == "fp8" else "fp8"))
    for name in ("ids", "centroids"):
        assert torch.equal(payload.tensors[name], other.tensors[name])
    assert abs(sqnr(x, payload.decode()) - sqnr(x, other.decode())) < 1.5


def test_int8_scales_are_finer_than_fp8_where_no_token_sticks_out() -> None:
    """255 steps of the largest scale against 2^-4 of each: the worst rounding of a scale."""
    x = sample_tokens(1, 2, 200, 64).float()
    wanted = {}
    for metadata in ("fp8", "int8"):
        tensors, _ = ops.group_quantize(
            x[0], {"fp8": "symmetric", "int8": "symmetric_int8"}[metadata], 4, 16
        )
        exact = x[0].unflatten(-1, (4, 16)).abs().amax(-1) / 7
        if metadata == "int8":
            stored = tensors["scale_base"].float()[:, None, None] * tensors["scale_codes"]
        else:
            stored = tensors["scale"].float()
        wanted[metadata] = float((stored / exact - 1).abs().max())
    assert 0.04 < wanted["fp8"] <= 2**-4
    assert wanted["int8"] < 0.04


def test_range_scores_follow_the_grid() -> None:
    """A residual of one sign costs its own range on min-max groups, its distance to 0 elsewhere."""
    x = torch.tensor([[[3.0, 3.2, 3.1, 3.0]]])
    centroids = torch.tensor([[[2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 2.6, 3.4]]]).bfloat16()
    for include_zero, expected in ((True, 1), (False, 0)):
        ids = ops.select_centroids(x, centroids, None, 2, 4, include_zero=include_zero)
        assert ids.tolist() == [[expected]]
    tokens = sample_tokens(1, 2, 200, 64)
    stats = sample_moment(tokens)
    fp8, int8 = (
        encode(tokens, config("quantwm", group_size=4, metadata=metadata), stats=stats)
        for metadata in ("fp8", "int8")
    )
    assert not torch.equal(fp8.tensors["ids"], int8.tensors["ids"])
    for payload, include_zero in ((fp8, False), (int8, True)):
        weight, _ = ops.channel_weight(stats.moment[0], stats.count[0])
        chosen = ops.select_centroids(
            tokens[0].float(),
            payload.tensors["centroids"][0, :, 0],
            weight,
            4,
            4,
            include_zero=include_zero,
        )
        assert torch.equal(payload.tensors["ids"][0, :, 0].long(), chosen)


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "rtn", "grid": "symmetric", "group_size": 16},
        {"method": "qvg", "centroids": 16},
        {"method": "qvg", "centroids": 16, "metadata": "int8", "stages": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [37, 64, 80])
def test_trits_are_lossless(fields: dict[str, Any], head_dim: int) -> None:
    x = sample_tokens(1, 2, 33, head_dim)
    bits = encode(x, CodecConfig(**fields))
    trits = encode(x, CodecConfig(**fields, packing="trits"))
    assert torch.equal(trits.decode(torch.float32), bits.decode(torch.float32))
    row = -(-head_dim // 5)
    assert trits.tensors["codes"].shape == (1, 2, 33, row)
    assert bits.nbytes - trits.nbytes == 2 * 33 * (-(-head_dim // 4) - row)


@pytest.mark.parametrize(
    "fields",
    [{"method": "rtn", "grid": "symmetric"}, {"method": "qvg", "centroids": 4}],
    ids=str,
)
def test_bytes_that_no_trits_make_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    payload = encode(sample_tokens(tokens=20), CodecConfig(**fields, packing="trits"))
    path = tmp_path / "p"
    payload.tensors["codes"][0, 1, 3, 2] = 242
    payload.save(path)
    assert Payload.load(path) == payload
    payload.tensors["codes"][0, 1, 3, 2] = 243
    payload.save(path)
    with pytest.raises(PayloadError, match="byte 243: expected at most 242"):
        Payload.load(path)


@pytest.mark.parametrize("method", ["rtn", "kivi", "quarot", *CLUSTERED])
def test_every_bit_is_worth_about_six_decibels(method: str) -> None:
    x = sample_tokens(1, 2, 200, 64)
    found = []
    for bits in (2, 3, 4):
        payload = encode(
            x, config(method, bits=bits) if method in CLUSTERED else CodecConfig(method, bits=bits)
        )
        assert payload.tensors["codes"].shape[-1] == 8 * bits
        found.append(sqnr(x, payload.decode()))
    assert 4.5 < found[1] - found[0] < 8.5
    assert 4.5 < found[2] - found[1] < 8
