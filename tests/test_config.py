"""Configurations: validated, exact about bytes, versioned."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from steadykv.config import (
    METHODS,
    PRESETS,
    CacheConfig,
    CachePolicy,
    CodecConfig,
    parse_method,
    preset,
)
from steadykv.errors import ConfigError, ShapeError

DATA = Path(__file__).parent / "data"
BUDGETS = json.loads((DATA / "expected_bits.json").read_text())
# Presets with changed fields, calculated from the formulas of the docstrings without our code.
EXTRA_BUDGETS = json.loads((DATA / "extra_bits.json").read_text())
# Our own rows, from the formulas of the methods: parameters that the papers vary.
VARIANTS = json.loads((DATA / "expected_bits_variants.json").read_text())
# What another spelling of the defaults would say in the budget table.
GRIDS = {
    "qvg": "symmetric",
    "qvg4": "affine_zero",
    "quantwm": "affine_zero",
    "kivi": "affine_min",
    "kvquant": "non_uniform",
    "rtn": "affine_min",
    "quarot": "affine_min",
    "qvg_pro": "symmetric",
}
METADATA = {
    "fp8_scale": "fp8",
    "int8_scale_int2_zero": "int8",
    "fp16_scale_fp16_minimum": None,
    "fp16_center_fp16_half_range": None,
}


def config_of(row: dict[str, Any]) -> CacheConfig:
    """The configuration that a row of the budget table describes."""
    params = dict(row["params"])
    assert params.pop("grid") == GRIDS[row["method"]]
    metadata = METADATA[params.pop("metadata")]
    own = METHODS[preset(row["method"]).keys.method]
    if "metadata" in own:
        params["metadata"] = metadata
    if "stages" not in own:
        assert params.pop("stages", 1) == 1
    names = {f.name for f in dataclasses.fields(CodecConfig)}
    return preset(row["method"], **{k: v for k, v in params.items() if k in names})


@pytest.mark.parametrize(
    "row",
    [row for row in BUDGETS if row["method"] in PRESETS] + VARIANTS,
    ids=lambda row: f"{row['method']}-{row['H']}x{row['S']}x{row['D']}",
)
def test_bit_budgets(row: dict[str, Any]) -> None:
    config = config_of(row)
    shape = (row["B"], row["H"], row["S"], row["D"])
    assert config.keys.payload_nbytes(*shape) == row["bytes_K"]
    assert config.values.payload_nbytes(*shape) == row["bytes_V"]
    assert config.payload_nbytes(*shape) == row["bytes_K"] + row["bytes_V"]
    assert config.bits_per_element(*shape) == pytest.approx(row["bits_per_element"], rel=1e-14)
    if row in BUDGETS:
        assert config == preset(row["method"]), "the table holds the defaults"


def test_the_budget_table_covers_every_packed_method() -> None:
    assert {row["method"] for row in BUDGETS + VARIANTS} >= set(METHODS) - {"bf16"}


@pytest.mark.parametrize(
    "row",
    EXTRA_BUDGETS,
    ids=lambda row: "-".join([row["preset"], *map(str, row["changes"].values()), str(row["S"])]),
)
def test_bit_budgets_of_other_forms(row: dict[str, Any]) -> None:
    config = preset(row["preset"], **row["changes"])
    shape = (row["B"], row["H"], row["S"], row["D"])
    assert config.keys.payload_nbytes(*shape) == row["bytes_K"]
    assert config.values.payload_nbytes(*shape) == row["bytes_V"]
    assert config.bits_per_element(*shape) == pytest.approx(row["bits_per_element"], rel=1e-14)


def test_the_tables_hold_the_rates_that_the_papers_and_their_code_name() -> None:
    """Trits and the asymmetric option over 29,640 tokens, FP8 centroids and two directions."""
    rates = {
        (row["preset"], *row["changes"].items(), row["S"]): round(row["bits_per_element"], 4)
        for row in EXTRA_BUDGETS
    }
    assert rates["qvg", ("packing", "trits"), 29640] == 1.9507
    assert rates["qvg4", ("metadata", "fp8"), 29640] == 2.4507
    assert rates["quantwm", ("centroid_format", "fp8"), 4680] == 2.9894
    assert rates["quantwm", ("rank", 2), 29640] == 2.4825


def test_rates_of_the_embedded_model() -> None:
    """Spans of 2 chunks (1,152 tokens of three heads) with 32 centroids."""
    shape = (1, 3, 1152, 128)
    rates = {
        name: round(preset(name).with_span(2, 32).bits_per_element(*shape), 3)
        for name in ("qvg", "qvg4", "quantwm")
    }
    assert rates == {"qvg": 2.632, "qvg4": 2.663, "quantwm": 3.031}
    assert preset("bf16").bits_per_element(*shape) == 16
    cold = preset("quantwm", centroids=32).bits_per_element(*shape, compensated=False)
    assert cold == preset("qvg4", centroids=32).bits_per_element(*shape)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "qgv"},
        {"method": ["qvg"]},
        {"bits": 5},
        {"bits": True},
        {"group_size": 0},
        {"group_size": 64.0},
        {"centroids": 0},
        {"centroids": 65537},
        {"iterations": -1},
        {"warm_start": 1},
        {"seed": -1},
        {"method": "kivi", "axis": "heads"},
        {"method": "kivi", "centroids": 32},
        {"method": "qvg", "axis": "tokens"},
        {"stages": 0},
        {"stages": 5},
        {"packing": "bytes"},
        {"centroid_format": "fp16"},
        {"metadata": "fp16"},
        {"method": "qvg4", "metadata": 8},
        {"method": "qvg4", "packing": "trits"},
        {"method": "quantwm", "stages": 2},
        {"method": "kivi", "metadata": "fp8"},
        {"method": "kivi", "centroid_format": "fp8"},
        {"method": "qvg", "grid": "symmetric"},
        {"method": "rtn", "grid": "affine_zero"},
        {"method": "rtn", "metadata": "fp8"},
        {"method": "rtn", "grid": "affine_min", "packing": "trits"},
        {"method": "qvg", "bits": 3, "packing": "trits"},
        {"method": "rtn", "clip_ratio": 0.9},
        {"method": "quarot", "clip_ratio": 0},
        {"method": "quarot", "clip_ratio": 1.01},
        {"method": "quarot", "clip_ratio": float("nan")},
        {"method": "quarot", "clip_ratio": True},
        {"method": "quarot", "clip_ratio": "0.9"},
        {"method": "quarot", "dim_splits": 128},
        {"method": "quarot", "dim_splits": (64, 0)},
        {"method": "quarot", "dim_splits": (64, 64.0)},
        {"method": "quarot", "dim_splits": (96, 32)},
        {"method": "rtn", "dim_splits": (64,)},
        {"method": "qvg4", "rank": 4},
        {"method": "bf16", "group_size": 32},
        {"method": "quantwm", "retain": "maybe"},
        {"method": "quantwm", "coef_layout": "sparse"},
        {"method": "quantwm", "first_span": "mine"},
        {"method": "quantwm", "candidates": 0},
        {"method": "quantwm", "rank": -1},
        {"method": "kvquant", "outlier_fraction": 0.02},
        {"method": "kvquant", "outlier_fraction": False},
        {"method": "kvquant", "first_tokens": -1},
        {"method": "kvquant", "levels": "offline"},
        {"method": "kvquant", "axis": "tokens", "level_weight": "keys"},
        {"method": "kvquant", "axis": "channels", "level_weight": "queries"},
        {"method": "kvquant", "q_norm": 1},
        {"method": "kvquant", "group_size": 32},
        {"method": "kivi", "levels": "calibrated"},
        {"method": "quantwm", "metric": "euclidean"},
        {"method": "qvg4", "metric": "full"},
        {"method": "qvg", "warm_start": "centroids"},
        {"method": "qvg", "reseed_empty": 1},
        {"method": "qvg", "refit": "yes"},
        {"method": "kivi", "refit": True},
        {"method": "qvg", "include_zero": False},
        {"method": "qvg", "scale_search": True},
        {"method": "quantwm", "scale_search": True},
        {"method": "qvg4", "metadata": "fp8", "include_zero": False},
        {"method": "quantwm", "metadata": "fp8", "include_zero": False},
        {"method": "qvg4", "metadata": "fp8", "scale_search": True},
        {"method": "qvg", "refit": True, "centroid_format": "fp8"},
        {"method": "quantwm", "rank": 0, "coef_layout": "auto"},
        {"method": "quantwm", "rank": 0, "retain": "always"},
    ],
    ids=str,
)
def test_bad_codec_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        CodecConfig(**fields)
    assert "\n" not in str(caught.value)
    assert str([*fields.values()][-1]) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"span_chunks": 0},
        {"span_chunks": 1.5},
        {"window_frames": 0},
        {"sink_frames": -1},
        {"sink_keep": -1},
        {"recent_keep": "1"},
        {"window_frames": 24, "sink_frames": 24},
    ],
    ids=str,
)
def test_bad_policies(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CachePolicy(**fields)


def test_cache_config_takes_configs() -> None:
    good = CodecConfig()
    for bad in ({"keys": "qvg"}, {"values": None}, {"policy": {}}, {"name": ""}):
        with pytest.raises(ConfigError):
            CacheConfig(**{"keys": good, "values": good, **bad})  # type: ignore[arg-type]


def test_presets() -> None:
    assert preset("quantwm").keys.method == "quantwm"
    assert preset("quantwm").values == preset("qvg4").values == CodecConfig("qvg4")
    assert preset("rtn_g16_sym").keys == preset("rtn_g16_sym").values
    assert preset("rtn_g16_sym").keys == CodecConfig("rtn", group_size=16, grid="symmetric")
    assert preset("qvg_pro").keys == CodecConfig("qvg", group_size=16, stages=4)
    newest = {"centroid_format": "fp8", "refinement": 2}
    trits = {"metadata": "int8", "packing": "trits"}
    assert preset("steady").keys == CodecConfig("qvg4", **newest)
    assert preset("steady").values == CodecConfig("qvg", **newest, **trits)
    assert preset("steady").policy.refined_spans == 1
    assert preset("kivi").keys == CodecConfig("kivi", group_size=32, axis="tokens")
    assert preset("kivi").values == CodecConfig("kivi", group_size=32, axis="channels")
    assert preset("kivi").policy.recent_keep == 0
    assert preset("kivi_recent").policy.recent_keep == 1
    assert all(preset(name).name == name for name in PRESETS)
    needing = {name for name in PRESETS if preset(name).needs_queries}
    assert needing == {"quantwm"}


def test_fields_without_a_common_default_take_that_of_the_method() -> None:
    assert CodecConfig("qvg").metadata == "fp8"
    assert CodecConfig("qvg4").metadata == CodecConfig("quantwm").metadata == "int8"
    assert CodecConfig("qvg4") == CodecConfig("qvg4", metadata="int8")
    assert CodecConfig("rtn").grid == "affine_min"
    assert CodecConfig("kivi").metadata is CodecConfig("qvg").grid is None
    changed = preset("quantwm", metadata="fp8", centroid_format="fp8", bits=3)
    assert changed.keys.metadata == changed.values.metadata == "fp8"
    assert changed.keys.centroid_format == changed.values.centroid_format == "fp8"


def test_what_an_earlier_release_wrote_can_be_read() -> None:
    """Without the fields that came later."""
    later = (
        "grid", "metadata", "packing", "stages", "centroid_format", "clip_ratio", "dim_splits",
        "reseed_empty", "refit", "include_zero", "scale_search", "metric",
    )  # fmt: skip
    for name in ("bf16", "kivi", "qvg", "qvg4", "quantwm"):
        config = preset(name).keys
        old = {k: v for k, v in config.to_dict().items() if k not in later}
        assert len(old) == len(config.to_dict()) - len(later)
        assert CodecConfig.from_dict(old) == CodecConfig.from_dict(old | {"damping": 0.1}) == config


def test_overrides_reach_the_codecs_that_read_them() -> None:
    config = preset("quantwm", centroids=32, rank=4, span_chunks=2, window_frames=24)
    assert (config.keys.centroids, config.values.centroids) == (32, 32)
    assert (config.keys.rank, config.values.rank) == (4, CodecConfig().rank)
    assert (config.policy.span_chunks, config.policy.window_frames) == (2, 24)
    assert config.name == "quantwm"
    assert preset("bf16").with_span(2, 32) == preset("bf16", span_chunks=2)
    assert parse_method("quantwm:bf16").with_span(3, 8).keys.centroids == 8
    dense_values = preset("quantwm", values=CodecConfig("bf16"), name="K2V16")
    assert (dense_values.values.method, dense_values.name) == ("bf16", "K2V16")


@pytest.mark.parametrize("change", [{"rank": 4}, {"axis": "tokens"}, {"method": "qvg"}, {"x": 1}])
def test_an_override_that_changes_nothing_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        preset("qvg", **change)


def test_parse_method() -> None:
    assert parse_method("qvg") == preset("qvg")
    split = parse_method("quantwm:bf16")
    assert (split.keys, split.values) == (CodecConfig("quantwm"), CodecConfig("bf16"))
    assert split.name == "quantwm:bf16"
    assert parse_method("bf16:quantwm").values == CodecConfig("qvg4")
    assert parse_method("kivi_recent:bf16").policy == CachePolicy(recent_keep=1)
    for wrong in ("", "qgv", "qvg:", ":qvg", "qvg:qgv", "a:b:c"):
        with pytest.raises(ConfigError, match="known are bf16, rtn, rtn_g16_sym, kivi"):
            parse_method(wrong)


def test_a_side_may_change_fields() -> None:
    config = parse_method("quantwm@rank=4+retain=always+warm_start=false : qvg4@group_size=32")
    assert config.keys == CodecConfig("quantwm", rank=4, retain="always", warm_start=False)
    assert config.values == CodecConfig("qvg4", group_size=32)
    assert config.name.startswith("quantwm@rank=4")
    both = parse_method("quantwm@centroids=64")
    assert both.keys.centroids == both.values.centroids == 64
    nearest = parse_method("quantwm@candidates=1+metric=none")
    assert nearest.keys == CodecConfig("quantwm", candidates=1, metric="none")
    assert parse_method("qvg@stages=3").keys.stages == 3


def test_widths_are_joined_by_a_letter_that_separates_nothing_else() -> None:
    config = parse_method("quarot@dim_splits=64x32+bits=4:quarot@dim_splits=96")
    assert config.keys == CodecConfig("quarot", dim_splits=(64, 32), bits=4)
    assert config.values == CodecConfig("quarot", dim_splits=(96,))
    both = parse_method("quarot@dim_splits=128x128")
    assert both.keys == both.values == CodecConfig("quarot", dim_splits=(128, 128))
    assert CacheConfig.from_dict(json.loads(json.dumps(both.to_dict()))) == both


def test_defaults_give_way_to_what_a_side_names() -> None:
    config = parse_method("quantwm@centroids=64:qvg4", centroids=32)
    assert (config.keys.centroids, config.values.centroids) == (64, 32)
    assert parse_method("bf16:kivi", centroids=32).values == preset("kivi").values


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("qvg@", "FIELD=VALUE"),
        ("qvg@rank", "FIELD=VALUE"),
        ("qvg@seed=1+seed=2", "each field once"),
        ("qvg@rank=4", "rank"),
        ("qvg@bits=two", "bits"),
        ("qvg@centroids=0", "centroids"),
        ("qvg@centroids=3.5", "centroids"),
        ("qvg@name=x", "name"),
        ("qvg@span_chunks=4", "span_chunks"),
        ("bf16:quantwm@rank=32", "rank"),
        ("quantwm@scale_search=true:bf16", "scale_search"),
        ("qvg@bits=2.0", "bits"),
        ("qvg@method=kivi", "method"),
        ("quarot@dim_splits=64/64", "joined by 'x', such as 64x64"),
        ("quarot@dim_splits=64x", "joined by 'x'"),
        ("quarot@dim_splits=64.0x64", "joined by 'x'"),
        ("quarot@dim_splits=0x64", "integers above 0"),
        ("quarot@dim_splits=96x32", "multiples of it"),
        ("qvg@dim_splits=64x64", "dim_splits"),
    ],
)
def test_a_bad_change_is_named(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        parse_method(text)
    assert "\n" not in str(caught.value)


def test_dictionaries_survive_json() -> None:
    rotated = preset("quarot", dim_splits=(64, 64), clip_ratio=0.95)
    assert json.loads(json.dumps(rotated.to_dict())) == rotated.to_dict()
    assert CacheConfig.from_dict(json.loads(json.dumps(rotated.to_dict()))) == rotated
    for name in PRESETS:
        config = preset(name, seed=7, span_chunks=2) if "qv" in name else preset(name)
        assert CacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert CodecConfig.from_dict(json.loads(json.dumps(config.keys.to_dict()))) == config.keys


def test_foreign_dictionaries_are_refused() -> None:
    good = CodecConfig().to_dict()
    for bad in ({**good, "version": 2}, {**good, "rotation": 1}, {"method": "qvg"}, [], None):
        with pytest.raises(ConfigError):
            CodecConfig.from_dict(bad)  # type: ignore[arg-type]
    whole = preset("qvg").to_dict()
    del whole["values"]
    with pytest.raises(ConfigError, match="values"):
        CacheConfig.from_dict(whole)
    with pytest.raises(ConfigError):
        CachePolicy.from_dict({"version": 1, "window": 3})


@pytest.mark.parametrize("shape", [(1, 1, -1, 64), (1, 1, 8, 0), (1, 1.0, 8, 64)], ids=str)
def test_sizes_of_impossible_shapes(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ShapeError):
        CodecConfig().payload_nbytes(*shape)
