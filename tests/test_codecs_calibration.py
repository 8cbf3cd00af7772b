"""Levels and thresholds fixed beforehand: fitted, stored, checked, handed to codecs and caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from steadykv import ops
from steadykv.cache import KVCache
from steadykv.codecs import Calibration, QueryMoment, SpanKey, encode
from steadykv.config import CacheConfig, CodecConfig, preset
from steadykv.errors import CalibrationError, ConfigError, NonFiniteError, ShapeError

from .cache_cases import Allocations
from .codecs import sample_moment, sample_tokens, sqnr

CONFIG = preset("kvquant_calibrated")
ONLINE = preset("kvquant")
HEADS, DIM = 2, 32


def captured(layer: int = 0, tokens: int = 120, **shape: Any) -> Tensor:
    return sample_tokens(heads=HEADS, tokens=tokens, head_dim=DIM, seed=layer, **shape)


def calibration_of(layers: int = 1, config: CacheConfig = CONFIG) -> Calibration:
    return Calibration.fit(
        {(i, name): captured(i) for i in range(layers) for name in ("key", "value")}, config
    )


@pytest.fixture(scope="module")
def fitted() -> Calibration:
    return calibration_of(2)


def same(one: Calibration, other: Calibration) -> bool:
    return one.grids.keys() == other.grids.keys() and all(
        (mine.config, mine.heads, mine.head_dim, mine.tokens, mine.tensors.keys())
        == (theirs.config, theirs.heads, theirs.head_dim, theirs.tokens, theirs.tensors.keys())
        and all(
            torch.equal(t.view(torch.uint8), theirs.tensors[name].view(torch.uint8))
            for name, t in mine.tensors.items()
        )
        for mine, theirs in ((one.grids[key], other.grids[key]) for key in one.grids)
    )


# --- fitting --------------------------------------------------------------------------------------


def test_the_grid_is_that_of_the_captured_span(fitted: Calibration) -> None:
    """What the online codec finds in the same tokens."""
    for name, config in (("key", ONLINE.keys), ("value", ONLINE.values)):
        grid = fitted.grids[1, name]
        online = encode(captured(1), config).tensors
        assert torch.equal(grid.tensors["stored_levels"], online["levels"][0])
        assert (grid.heads, grid.head_dim, grid.tokens) == (HEADS, DIM, 120)
        if name == "key":
            assert torch.equal(grid.tensors["center"], online["center"][0])
            assert torch.equal(grid.tensors["half"], online["half"][0])
        else:
            assert grid.tensors.keys() == {"levels", "stored_levels"}


def test_all_spans_and_batch_rows_count_alike() -> None:
    x = sample_tokens(2, HEADS, 60, DIM)
    joined = torch.cat([x[:1], x[1:]], 2)
    keys = [x, [x[:1], x[1:]], joined, [joined[:, :, :50], joined[:, :, 50:]]]
    whole, *others = (Calibration.fit({(0, "key"): tensors}, CONFIG) for tensors in keys)
    assert whole.grids[0, "key"].tokens == 120
    assert all(same(whole, other) for other in others)


def test_pairs_may_come_one_by_one(fitted: Calibration) -> None:
    pairs = (((i, name), captured(i)) for i in range(2) for name in ("key", "value"))
    assert same(Calibration.fit(pairs, CONFIG), fitted)


def test_tokens_that_stay_dense_are_not_fitted() -> None:
    keys = CodecConfig("kvquant", axis="tokens", levels="calibrated", first_tokens=20)
    config = CacheConfig(keys, CONFIG.values)
    x, y = captured(0), captured(1)
    grid = Calibration.fit({(0, "key"): [x, y]}, config).grids[0, "key"]
    rest = Calibration.fit({(0, "key"): [x[:, :, 20:], y[:, :, 20:]]}, CONFIG).grids[0, "key"]
    assert grid.tokens == rest.tokens == 200
    assert all(torch.equal(t, rest.tensors[name]) for name, t in grid.tensors.items())


def test_levels_weighted_by_captured_queries() -> None:
    """The mean of M_cc over batch rows, weighted by their queries."""
    keys = CodecConfig("kvquant", axis="tokens", levels="calibrated", level_weight="queries")
    config = CacheConfig(keys, CONFIG.values)
    x = captured(batch=2)
    stats = sample_moment(x)
    stats.count[1] = 0
    grid = Calibration.fit({(4, "key"): x}, config, stats={4: stats}).grids[4, "key"]
    online = CodecConfig("kvquant", axis="tokens", level_weight="queries")
    joined = torch.cat([x[:1], x[1:]], 2)
    first = QueryMoment(stats.moment[:1], stats.count[:1])
    expected = encode(joined, online, stats=first).tensors["levels"][0]
    assert torch.equal(grid.tensors["stored_levels"], expected)
    assert not torch.equal(
        expected,
        Calibration.fit({(4, "key"): x}, CONFIG).grids[4, "key"].tensors["stored_levels"],
    )
    for missing in (None, {3: stats}):
        with pytest.raises(CalibrationError, match=r"layer 4 key: .* got no query statistics"):
            Calibration.fit({(4, "key"): x}, config, stats=missing)
    wrong = sample_moment(sample_tokens(1, HEADS + 1, 9, DIM))
    with pytest.raises(ShapeError, match="query moment"):
        Calibration.fit({(4, "key"): x}, config, stats={4: wrong})


def test_what_cannot_be_fitted_is_refused_in_one_line() -> None:
    good = captured()
    bad = good.clone()
    bad[0, 1, 3, 5] = torch.inf
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (ConfigError, "config is a CodecConfig", {}, CONFIG.keys),
        (ConfigError, "layer 0 key: kvquant has levels='online'", {(0, "key"): good}, ONLINE),
        (ConfigError, "layer 0 value: bf16", {(0, "value"): good}, preset("bf16")),
        (ConfigError, "tensor 'query'", {(0, "query"): good}, CONFIG),
        (ConfigError, "layer -1", {(-1, "key"): good}, CONFIG),
        (ShapeError, "layer 0 key: got list", {(0, "key"): [[1]]}, CONFIG),
        (ShapeError, r"got \(2, 120, 32\)", {(0, "key"): good[0]}, CONFIG),
        (ShapeError, "torch.int64", {(0, "key"): good.long()}, CONFIG),
        (ShapeError, "no span", {(0, "key"): []}, CONFIG),
        (ShapeError, "equal numbers", {(0, "key"): [good, good[..., 1:]]}, CONFIG),
        (NonFiniteError, "layer 0 key has 1 NaN", {(0, "key"): bad}, CONFIG),
        (CalibrationError, "got 2 tokens", {(0, "key"): good[:, :, :2]}, CONFIG),
        (CalibrationError, "got 0 tokens", {(0, "value"): good[:, :, :0]}, CONFIG),
    ]
    for kind, words, tensors, config in cases:
        with pytest.raises(kind, match=words) as error:
            Calibration.fit(tensors, config)
        assert "expected" in str(error.value)
        assert "\n" not in str(error.value)


# --- encoding -------------------------------------------------------------------------------------


def test_codes_use_the_fixed_grid(fitted: Calibration) -> None:
    """Keys outside the thresholds: the farthest from the center are stored, the rest clipped."""
    x = captured(0, 300).float()
    x[0, 1, 40:47, 3] = torch.tensor([90.0, -90, 80, -95, 70, 60, 50])
    payload = encode(x, CONFIG.keys, calibration=fitted)
    grid = fitted.grids[0, "key"].tensors
    tensors = payload.tensors
    for name in ("center", "half"):
        assert torch.equal(tensors[name][0], grid[name])
        assert tensors[name].data_ptr() != grid[name].data_ptr()
    assert torch.equal(tensors["levels"][0], grid["stored_levels"])
    assert tensors["outlier_index"][0, 1, 3].tolist() == [43, 41, 40, 42]
    assert tensors["outlier_values"][0, 1, 3].tolist() == [-95, -90, 90, 80]
    codes = ops.unpack(tensors["codes"], 2, DIM)[0, 1, :, 3]
    assert codes[40:47].tolist() == [0, 0, 0, 0, 3, 3, 3]
    u = (x[0, 1, :, 3] - grid["center"][1, 3].float()) / grid["half"][1, 3].float()
    bounds = (grid["levels"][1:] + grid["levels"][:-1]) / 2
    inlier = torch.ones(300, dtype=torch.bool).index_fill_(0, torch.tensor([40, 41, 42, 43]), False)
    assert torch.equal(codes[inlier].long(), (u[:, None] > bounds).sum(1)[inlier])


def test_values_keep_their_own_thresholds(fitted: Calibration) -> None:
    """A token's range cannot be known beforehand: only the levels are fixed."""
    x = captured(1, 90)
    fixed = encode(x, CONFIG.values, calibration=fitted, span_key=SpanKey(1, "value"))
    online = encode(x, ONLINE.values)
    for name in ("center", "half", "outlier_index", "outlier_values"):
        assert torch.equal(fixed.tensors[name], online.tensors[name])
    stored = fitted.grids[1, "value"].tensors["stored_levels"]
    assert torch.equal(fixed.tensors["levels"][0], stored)
    assert not torch.equal(fixed.tensors["levels"], online.tensors["levels"])


def test_payloads_have_the_bytes_of_the_online_ones_and_decode_alone(
    fitted: Calibration, tmp_path: Path
) -> None:
    for name in ("key", "value"):
        config = CONFIG.keys if name == "key" else CONFIG.values
        online = ONLINE.keys if name == "key" else ONLINE.values
        x = captured(1)[:, :, :77]
        payload = encode(x, config, calibration=fitted, span_key=SpanKey(1, name))
        assert payload.nbytes == config.payload_nbytes(1, HEADS, 77, DIM)
        assert payload.nbytes == online.payload_nbytes(1, HEADS, 77, DIM)
        payload.save(tmp_path / name)
        decoded = type(payload).load(tmp_path / name).decode()
        assert torch.equal(decoded, payload.decode())
        assert 7 < sqnr(x, decoded) < 13


def test_the_grid_of_the_layer_and_tensor_is_taken(fitted: Calibration) -> None:
    x = captured(0, 40)
    first, second = (
        encode(x, CONFIG.keys, calibration=fitted, span_key=SpanKey(layer, "key", 5))
        for layer in (0, 1)
    )
    assert torch.equal(second.tensors["center"][0], fitted.grids[1, "key"].tensors["center"])
    assert first != second


def test_one_clear_error_for_a_calibration_that_does_not_fit(fitted: Calibration) -> None:
    x = captured()
    wide, heads = sample_tokens(1, HEADS, 9, 64), sample_tokens(1, 3, 9, DIM)
    fields = CONFIG.keys.to_dict() | {"outlier_fraction": 0.005}
    other = CodecConfig.from_dict(fields)
    cases: list[tuple[str, Any]] = [
        ("layer 0 key: .* got no calibration", lambda: encode(x, CONFIG.keys)),
        (
            "layer 7 key: .* got a calibration without it",
            lambda: encode(x, CONFIG.keys, calibration=fitted, span_key=SpanKey(7)),
        ),
        (
            "calibrated for 2 heads of 32, got 2 of 64",
            lambda: encode(wide, CONFIG.keys, calibration=fitted),
        ),
        (
            "calibrated for 2 heads of 32, got 3 of 32",
            lambda: encode(heads, CONFIG.keys, calibration=fitted),
        ),
        (
            r"calibrated for outlier_fraction=0.01 \(got 0.005\)",
            lambda: encode(x, other, calibration=fitted),
        ),
        (
            "layer 0 key: kvquant with levels='online' reads no calibration",
            lambda: encode(x, ONLINE.keys, calibration=fitted),
        ),
        (
            "layer 0 key: qvg .* reads no calibration",
            lambda: encode(x, CodecConfig("qvg"), calibration=fitted),
        ),
        (
            "calibration is a dict",
            lambda: encode(x, CONFIG.keys, calibration={}),  # type: ignore[arg-type]
        ),
    ]
    for words, call in cases:
        with pytest.raises(CalibrationError, match=words) as error:
            call()
        assert "expected" in str(error.value)
        assert "\n" not in str(error.value)


# --- caches ---------------------------------------------------------------------------------------


def test_a_cache_hands_each_layer_its_grids(fitted: Calibration) -> None:
    cache = KVCache(2, HEADS, DIM, 40, CONFIG, calibration=fitted)
    with Allocations() as allocations:
        for layer in cache:
            x = captured(layer.layer, 40).transpose(1, 2)
            layer.write(x, x.contiguous(), 0)
        cache.commit()
        del x
    for layer in cache:
        for name, store in (("key", layer.keys), ("value", layer.values)):
            config = CONFIG.keys if name == "key" else CONFIG.values
            expected = encode(
                captured(layer.layer, 40),
                config,
                calibration=fitted,
                span_key=SpanKey(layer.layer, name),
            )
            assert store.segments[0].payload == expected
    ledger = cache.ledger()
    # Levels FP32 and FP16 of both; center and half of the keys: held, and no part of payloads.
    assert ledger.parts["calibration"] == 2 * (2 * 4 * (4 + 2) + 2 * 2 * HEADS * DIM)
    assert ledger.parts["calibration"] == fitted.nbytes
    counters = 2 * 8  # allocated with the cache
    assert allocations.now == ledger.resident_bytes - fitted.nbytes - counters
    payloads = 8 * CONFIG.payload_nbytes(1, HEADS, 40, DIM)
    assert ledger.bits_per_element == payloads / (2 * HEADS * 40 * DIM)
    cache.reset()
    assert cache.ledger().parts["calibration"] == fitted.nbytes


def test_a_cache_without_a_fitting_calibration_is_refused_when_it_is_built(
    fitted: Calibration,
) -> None:
    keys_only = CacheConfig(CONFIG.keys, CodecConfig("bf16"))
    for words, arguments, options in (
        ("layer 0 key: .* got no calibration", (2, HEADS, DIM, 8, CONFIG), {}),
        (
            "layer 2 key: .* a calibration without it",
            (3, HEADS, DIM, 8, CONFIG),
            {"calibration": fitted},
        ),
        ("got 4 of 32", (2, 4, DIM, 8, CONFIG), {"calibration": fitted}),
        (
            "layer 0: kvquant reads no calibration",
            (2, HEADS, DIM, 8, ONLINE),
            {"calibration": fitted},
        ),
    ):
        with pytest.raises(CalibrationError, match=words) as error:
            KVCache(*arguments, **options)  # type: ignore[arg-type]
        assert "expected" in str(error.value)
    cache = KVCache(2, HEADS, DIM, 8, keys_only, calibration=fitted)
    assert cache[1].calibration is not None
    assert cache[1].calibration.grids.keys() == {(1, "key")}


@pytest.mark.cuda
def test_a_cache_moves_its_calibration_to_its_device(fitted: Calibration) -> None:
    cache = KVCache(2, HEADS, DIM, 40, CONFIG, calibration=fitted, device="cuda")
    x = captured(0, 40).transpose(1, 2).cuda()
    cache[0].write(x, x, 0)
    cache[0].commit()
    payload = cache[0].keys.segments[0].payload
    assert payload is not None
    assert payload.to("cpu") == encode(captured(0, 40), CONFIG.keys, calibration=fitted)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_brings_it_back_bit_for_bit(fitted: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.safetensors"
    fitted.save(path)
    assert same(Calibration.load(path), fitted)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]

CHANGES: dict[str, Change] = {
    "version": lambda t, h: h.update(version=2),
    "format": lambda t, h: h.update(format="steadykv.payload"),
    "no grids": lambda t, h: h.pop("grids"),
    "grids": lambda t, h: h.update(grids={}),
    "grid": lambda t, h: h["grids"].append(3),
    "no layer": lambda t, h: h["grids"][0].pop("layer"),
    "layer": lambda t, h: h["grids"][0].update(layer=-1),
    "tensor": lambda t, h: h["grids"][0].update(tensor="query"),
    "heads": lambda t, h: h["grids"][0].update(heads=0),
    "width": lambda t, h: h["grids"][0].update(head_dim=DIM + 1),
    "tokens": lambda t, h: h["grids"][0].update(tokens="120"),
    "config": lambda t, h: h["grids"][0]["config"].update(method="kv"),
    "config version": lambda t, h: h["grids"][0]["config"].update(version=9),
    "online": lambda t, h: h["grids"][0]["config"].update(levels="online"),
    "bits": lambda t, h: h["grids"][0]["config"].update(bits=4),
    "axis": lambda t, h: h["grids"][0]["config"].update(axis="channels"),
    "missing": lambda t, h: t.pop("0/key/levels"),
    "unknown": lambda t, h: t.update({"0/key/more": torch.zeros(1)}),
    "unnamed": lambda t, h: h["grids"].pop(),
    "shape": lambda t, h: t.update({"0/key/half": t["0/key/half"][:, 1:].contiguous()}),
    "dtype": lambda t, h: t.update({"0/key/half": t["0/key/half"].bfloat16()}),
    "negative half": lambda t, h: t["0/key/half"][1, 3].fill_(-1),
    "nan": lambda t, h: t["0/key/center"][1, 3].fill_(torch.nan),
    "infinite level": lambda t, h: t["0/value/stored_levels"][3].fill_(torch.inf),
    "order": lambda t, h: t["0/value/levels"].copy_(t["0/value/levels"].flip(0).clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_lie_are_refused(fitted: Calibration, change: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    fitted.save(path)
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["steadykv.calibration"])
    CHANGES[change](tensors, header)
    save_file(tensors, path, metadata={"steadykv.calibration": json.dumps(header)})
    with pytest.raises(CalibrationError) as caught:
        Calibration.load(path)
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    encode(captured(), ONLINE.keys).save(path)
    with pytest.raises(CalibrationError, match="is not a calibration file"):
        Calibration.load(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CalibrationError, match="expected what save wrote"):
        Calibration.load(path)
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "absent")
