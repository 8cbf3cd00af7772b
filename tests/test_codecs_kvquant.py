"""kvquant against a plain-loop reading of its definition, its edges, and its stated error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steadykv import ops
from steadykv.cache import KVCache
from steadykv.codecs import Payload, QueryMoment, encode
from steadykv.config import CacheConfig, CodecConfig, preset
from steadykv.errors import PayloadError

from .codecs import sample_moment, sample_queries, sample_tokens, sqnr

KEYS = CodecConfig("kvquant", axis="tokens")
VALUES = CodecConfig("kvquant", axis="channels")
both_axes = pytest.mark.parametrize("config", [KEYS, VALUES], ids=["keys", "values"])


def vectors_of(x: Tensor, axis: str) -> list[Tensor]:
    """Of one batch row [H, S, D]: channels (h, c), or tokens with all heads."""
    if axis == "tokens":
        return [x[h, :, c] for h in range(x.shape[0]) for c in range(x.shape[2])]
    return [x[:, s].flatten() for s in range(x.shape[1])]


def outliers_of(vector: Tensor, count: int) -> list[int]:
    """The largest first, then the smallest of the rest; the lowest index on ties."""
    values = vector.tolist()
    top = sorted(range(len(values)), key=lambda i: (-values[i], i))[: count // 2]
    rest = [i for i in range(len(values)) if i not in top]
    return top + sorted(rest, key=lambda i: (values[i], i))[: count // 2]


def nearest(u: Tensor, levels: Tensor) -> Tensor:
    """The lower level wins a tie."""
    return (u[:, None] > (levels[1:] + levels[:-1]) / 2).sum(1)


def lloyd(u: Tensor, bits: int, weight: Tensor) -> Tensor:
    """Levels FP32: weighted means of the members, from the middle quantiles of equal shares."""
    shares = (2 * torch.arange(2**bits, dtype=torch.float64) + 1) / 2 ** (bits + 1)
    levels = u.double().quantile(shares).float()
    for _ in range(50):
        code = nearest(u, levels)
        for level in range(2**bits):
            w = weight[code == level]
            if w.sum() > 0:
                levels[level] = ((w * u[code == level].double()).sum() / w.sum()).float()
    return levels


def expected_row(
    x: Tensor, config: CodecConfig, energy: Tensor | None = None
) -> dict[str, list[Tensor] | Tensor]:
    """What the payload of one batch row [H, S, D] holds, vector by vector."""
    vectors = vectors_of(x.float(), config.axis)
    count = 2 * math.ceil(len(vectors[0]) / 200)
    found: dict[str, list[Tensor]] = {"index": [], "center": [], "half": [], "u": [], "inlier": []}
    for vector in vectors:
        index = torch.tensor(outliers_of(vector, count))
        inlier = torch.ones(len(vector), dtype=torch.bool).index_fill_(0, index, False)
        low, high = vector[inlier].min(), vector[inlier].max()
        center, half = ((high + low) / 2).half(), ((high - low) / 2).half()
        u = (vector - center.float()) / half.float() if half > 0 else torch.zeros_like(vector)
        for name, value in zip(found, (index, center, half, u, inlier), strict=True):
            found[name].append(value)
    pooled = torch.cat([u[kept] for u, kept in zip(found["u"], found["inlier"], strict=True)])
    weights = torch.ones(len(vectors)) if energy is None else energy.flatten()
    weights = weights.double() * (
        1 if energy is None else torch.stack(found["half"]).double().square()
    )
    inliers = int(found["inlier"][0].sum())
    levels = lloyd(pooled, config.bits, weights.repeat_interleave(inliers))
    taken = levels[nearest(pooled, levels)].double()
    stored = levels.double()
    if config.q_norm and taken.std() > 0:
        scale = pooled.double().std(correction=0) / taken.std(correction=0)
        stored = (stored - taken.mean()) * scale + pooled.double().mean()
    codes = [
        nearest(u, levels).where(kept, 0)
        for u, kept in zip(found["u"], found["inlier"], strict=True)
    ]
    return {**found, "codes": codes, "levels": stored.float().half()}


def assert_row_is(payload: Payload, row: int, x: Tensor, energy: Tensor | None = None) -> None:
    config = payload.config
    expected = expected_row(x, config, energy)
    tensors = {name: t[row] for name, t in payload.tensors.items()}
    codes = ops.unpack(tensors["codes"], config.bits, x.shape[-1])
    if config.axis == "tokens":
        for name in ("center", "half", "outlier_index", "outlier_values"):
            tensors[name] = tensors[name].flatten(0, 1)
    for number, (code, vector) in enumerate(
        zip(vectors_of(codes, config.axis), vectors_of(x.float(), config.axis), strict=True)
    ):
        index = tensors["outlier_index"][number].long()
        assert torch.equal(index, expected["index"][number])
        assert torch.equal(tensors["outlier_values"][number], vector[index].half())
        assert tensors["center"][number] == expected["center"][number]
        assert tensors["half"][number] == expected["half"][number]
        assert torch.equal(code.long(), expected["codes"][number])
    assert torch.equal(tensors["levels"], expected["levels"])


@both_axes
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("q_norm", [True, False], ids=["q_norm", "plain"])
def test_the_payload_is_the_definition(config: CodecConfig, bits: int, q_norm: bool) -> None:
    """Numbers on a coarse grid, so that values, thresholds and levels tie all the time."""
    config = CodecConfig("kvquant", bits=bits, axis=config.axis, q_norm=q_norm)
    x = (sample_tokens(2, 2, 203, 12, seed=4) * 2).round() / 4
    payload = encode(x, config)
    for row in range(2):
        assert_row_is(payload, row, x[row])


def test_weighted_levels_are_the_definition() -> None:
    config = CodecConfig("kvquant", axis="tokens", level_weight="queries")
    x = sample_tokens(2, 2, 60, 16, seed=2)
    stats = sample_moment(x)
    payload = encode(x, config, stats=stats)
    energy = stats.moment.diagonal(dim1=-2, dim2=-1)
    for row in range(2):
        assert_row_is(payload, row, x[row], energy[row])
    assert payload.flags["weight_active"].all()
    assert not torch.equal(payload.tensors["levels"], encode(x, KEYS).tensors["levels"])


def test_a_batch_row_without_queries_counts_every_channel_alike() -> None:
    """One head without queries is enough: its channels have no weight that compares to others'."""
    config = CodecConfig("kvquant", axis="tokens", level_weight="queries")
    x = sample_tokens(2, 2)
    stats = sample_moment(x)
    stats.count[0, 1] = 0
    payload, plain = encode(x, config, stats=stats), encode(x, KEYS)
    assert payload.flags["weight_active"].tolist() == [[0, 0], [1, 1]]
    for name, tensor in payload.tensors.items():
        assert torch.equal(tensor[0], plain.tensors[name][0]), name
    whole = encode(x, config, stats=sample_moment(x))
    assert torch.equal(payload.tensors["levels"][1], whole.tensors["levels"][1])
    cold = encode(x, config)
    assert not cold.flags["weight_active"].any()
    assert all(torch.equal(t, plain.tensors[name]) for name, t in cold.tensors.items())
    broken = sample_moment(x)
    broken.moment[1, 0, 3, 3] = torch.nan
    assert encode(x, config, stats=broken).flags["weight_active"].tolist() == [[1, 1], [0, 0]]


def test_ties_among_outliers_go_to_the_lowest_index() -> None:
    """Seven numbers, two of them outliers: the first 5 and the first -2; a constant: 0 and 1."""
    x = torch.tensor([[1, 5, -2, 5, -2, 0, 1], [3, 3, 3, 3, 3, 3, 3]]).float().T[None, None]
    tensors = encode(x, KEYS).tensors
    assert tensors["outlier_index"].tolist() == [[[[1, 2], [0, 1]]]]
    assert tensors["outlier_values"].tolist() == [[[[5, -2], [3, 3]]]]
    assert tensors["center"].tolist() == [[[1.5, 3]]]
    assert tensors["half"].tolist() == [[[3.5, 0]]]
    wide = torch.cat([x, x], -1).expand(1, 100, 7, 4)  # 400 numbers a token: two at each end
    index = encode(wide, VALUES).tensors["outlier_index"][0, 1].tolist()
    assert index == [0, 2, 1, 3]  # fives in channels 0 and 2, then the threes that are smallest


@both_axes
def test_minus_zero_is_zero(config: CodecConfig) -> None:
    x = torch.zeros(1, 2, 20, 16)
    x[:, :, ::3] = -0.0
    payload, plain = encode(x, config), encode(torch.zeros_like(x), config)
    assert torch.equal(payload.decode(), torch.zeros_like(x).bfloat16())
    for name, tensor in plain.tensors.items():
        assert torch.equal(payload.tensors[name], tensor), name


def test_short_vectors_stay_dense() -> None:
    """Two outliers of two numbers leave nothing to quantize."""
    for tokens in (1, 2):
        x = sample_tokens(1, 2, tokens, 32)
        payload = encode(x, KEYS)
        assert list(payload.tensors) == ["dense"]
        assert torch.equal(payload.decode(), x)
        assert payload.bits_per_element == 16 == KEYS.bits_per_element(1, 2, tokens, 32)
        assert "codes" in encode(x, VALUES).tensors
    assert "codes" in encode(sample_tokens(1, 2, 3, 32), KEYS).tensors
    assert list(encode(torch.ones(1, 1, 9, 2), VALUES).tensors) == ["dense"]
    none = CodecConfig("kvquant", axis="tokens", outlier_fraction=0.0)
    assert "codes" in encode(sample_tokens(1, 2, 1, 32), none).tensors


def test_a_cache_keeps_short_spans_dense_and_says_so() -> None:
    cache = KVCache(1, 2, 32, 2, CacheConfig(KEYS, VALUES))
    x = sample_tokens(1, 2, 2, 32).transpose(1, 2)
    cache[0].write(x, x, 0)
    cache.commit()
    (segment,) = cache[0].status().segments
    assert (segment.keys, segment.values) == ("dense", "packed")
    assert segment.reason == "keys: 16.0 bits per element predicted, not below 16"


@both_axes
def test_first_tokens_stay_dense(config: CodecConfig) -> None:
    """And the others are what they would be alone."""
    x = sample_tokens(2, 2, 50, 32)
    fields = {"method": "kvquant", "axis": config.axis, "first_tokens": 7}
    payload, rest = encode(x, CodecConfig(**fields)), encode(x[:, :, 7:], config)
    assert torch.equal(payload.tensors["dense"], x[:, :, :7])
    assert torch.equal(payload.decode()[:, :, :7], x[:, :, :7])
    assert torch.equal(payload.decode()[:, :, 7:], rest.decode())
    for name, tensor in rest.tensors.items():
        assert torch.equal(payload.tensors[name], tensor), name
    assert payload.nbytes == rest.nbytes + 2 * 2 * 2 * 7 * 32
    all_dense = encode(x, CodecConfig(**{**fields, "first_tokens": 50}))
    assert list(all_dense.tensors) == ["dense"]
    assert torch.equal(all_dense.decode(), x)


@both_axes
@pytest.mark.parametrize(("fraction", "per_end"), [(0.01, 2), (0.005, 1), (0.001, 1), (0.0, 0)])
def test_the_share_of_outliers(config: CodecConfig, fraction: float, per_end: int) -> None:
    """Of 256 numbers, at each end: ceil of 1.28, .64, .128 and none."""
    chosen = CodecConfig("kvquant", axis=config.axis, outlier_fraction=fraction)
    x = sample_tokens(1, 2, 256, 128)
    payload = encode(x, chosen)
    assert payload.tensors["outlier_index"].shape[-1] == 2 * per_end
    assert payload.nbytes == chosen.payload_nbytes(1, 2, 256, 128)
    if fraction:
        exact = payload.tensors["outlier_values"].float()
        largest, smallest = exact.split(per_end, -1)
        assert (largest.diff() <= 0).all()
        assert (smallest.diff() >= 0).all()
        assert (largest.amin(-1) > smallest.amax(-1)).all()


def test_indices_above_65536_places_take_four_bytes() -> None:
    long = sample_tokens(1, 1, 65537, 2)
    payload = encode(long, KEYS)
    assert payload.tensors["outlier_index"].dtype == torch.int32
    assert payload.nbytes == KEYS.payload_nbytes(1, 1, 65537, 2)
    top = payload.tensors["outlier_index"][0, 0, 0, 0].long()
    assert long[0, 0, top, 0] == long[0, 0, :, 0].max()
    assert KEYS.payload_nbytes(1, 1, 65536, 2) < payload.nbytes - 2 * 2 * 656
    wide = sample_tokens(1, 513, 3, 128)
    payload = encode(wide, VALUES)
    assert payload.tensors["outlier_index"].dtype == torch.int32
    assert 5 < sqnr(wide, payload.decode()) < 15


def test_q_norm_keeps_mean_and_deviation() -> None:
    """Of the normalised inliers, up to the rounding of levels to FP16."""
    x = (sample_tokens(1, 2, 500, 32).float() / 8).exp().bfloat16()  # skewed
    for q_norm, is_kept in ((True, True), (False, False)):
        config = CodecConfig("kvquant", axis="tokens", q_norm=q_norm, outlier_fraction=0.0)
        tensors = encode(x, config).tensors
        center, half = tensors["center"].float(), tensors["half"].float()
        u = (x.float() - center[:, :, None]) / half[:, :, None]
        codes = ops.unpack(tensors["codes"], 2, 32).long()
        taken = tensors["levels"].float()[0][codes]
        assert 0.1 < float(u.std()) < 1
        assert (abs(float(u.std() / taken.std()) - 1) < 1e-3) == is_kept
        assert float(taken.mean()) == pytest.approx(float(u.mean()), abs=1e-3)


def test_saturated_numbers_are_counted_where_they_are() -> None:
    x = sample_tokens(1, 3, 64, 32).float()
    x[0, 1, 5, 3] = 1e6  # an outlier
    x[0, 2, :, 7] = 1e6  # keys: center and both outliers of a channel
    assert encode(x, KEYS).flags["saturated"].tolist() == [[0, 1, 3]]
    y = sample_tokens(1, 3, 64, 32).float()
    y[0, 1, 5, 3] = -1e6  # an outlier
    y[0, 2, 9, :4] = 1e6  # one of four is an outlier; half and center go with the first head
    assert encode(y, VALUES).flags["saturated"].tolist() == [[2, 1, 1]]


@both_axes
@given(
    seed=st.integers(0, 1 << 16),
    tokens=st.integers(3, 40),
    width=st.integers(3, 20),
    exponent=st.integers(-12, 12),
    offset=st.sampled_from([0.0, 1.0, -40.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_the_stated_error_holds(
    config: CodecConfig,
    seed: int,
    tokens: int,
    width: int,
    exponent: int,
    offset: float,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, tokens, width, generator=generator).exp() + offset
    x = (x * 2.0**exponent).clamp(-60000, 60000).to(dtype)
    payload = encode(x, config)
    error = (payload.decode(torch.float32) - x.float()).abs()
    half, center = (payload.tensors[name].float() for name in ("half", "center"))
    largest = 1 + payload.tensors["levels"].float().abs().max()
    rounding = 2**-11 * (half + center.abs()) + 2**-25
    bound = half * largest + rounding * (1 + largest)
    shape = (1, 2, 1, width) if config.axis == "tokens" else (1, 1, tokens, 1)
    exact = 2**-11 * x.float().abs() + 2**-25  # outliers
    assert (error <= torch.maximum(bound.view(shape), exact) * (1 + 2**-20)).all()


def test_an_index_outside_its_vector_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for config in (KEYS, VALUES):
        payload = encode(sample_tokens(1, 2, 40, 32), config)
        payload.tensors["outlier_index"].view(torch.int16).fill_(64)
        payload.save(tmp_path / "p")
        with pytest.raises(PayloadError, match="outlier_index leaves its vector: expected 0 to"):
            Payload.load(tmp_path / "p")


def test_presets_and_what_they_need() -> None:
    online, fixed = preset("kvquant"), preset("kvquant_calibrated")
    assert (online.keys, online.values) == (KEYS, VALUES)
    assert not online.needs_calibration
    assert fixed.needs_calibration
    assert fixed.keys == CodecConfig("kvquant", axis="tokens", levels="calibrated")
    assert not online.needs_queries
    weighted = CodecConfig("kvquant", axis="tokens", level_weight="queries")
    assert weighted.needs_queries
    fitted = CodecConfig("kvquant", axis="tokens", level_weight="queries", levels="calibrated")
    assert not fitted.needs_queries, "they were used when it was calibrated"


def test_a_cache_feeds_its_queries_to_weighted_levels() -> None:
    config = CodecConfig("kvquant", axis="tokens", level_weight="queries")
    cache = KVCache(1, 2, 32, 24, CacheConfig(config, VALUES))
    x = sample_tokens(1, 2, 48, 32)
    queries = sample_queries(x)
    for chunk in range(2):
        rows = x[:, :, 24 * chunk : 24 * chunk + 24].transpose(1, 2)
        cache[0].write(rows, rows, 24 * chunk)
        cache[0].observe_queries(queries.transpose(1, 2).bfloat16())
        cache.commit()
    moment = QueryMoment.empty(1, 2, 32)
    moment.update(queries.bfloat16())
    first, second = (segment.payload for segment in cache[0].keys.segments)
    assert first == encode(x[:, :, :24], config)
    assert second == encode(x[:, :, 24:], config, stats=moment)
    assert second.flags["weight_active"].all()
