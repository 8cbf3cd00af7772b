"""The planner's replay holds, moment by moment and part by part, the bytes of the real cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import steadykv as skv
from steadykv.cache.workspace import encode_workspace_nbytes
from steadykv.config import METHODS, PRESETS, CacheConfig, preset
from steadykv.hosts.rebuilt import RebuiltLayer
from steadykv.planning.catalog import find_model
from steadykv.planning.needs import Setting, need
from steadykv.planning.replay import Geometry, Replay

METHOD_NAMES = [name for name in PRESETS if not preset(name).needs_calibration]
POLICIES: list[dict[str, Any]] = [
    {},
    {"window_frames": 7, "sink_frames": 2, "span_chunks": 2},
    {"window_frames": 6, "sink_frames": 1, "sink_keep": 2, "recent_keep": 1},
]
GEOMETRY = Geometry(batch=2, heads=1, head_dim=24, frame_tokens=12)
CHUNKS = (12, *[24] * 6)


def small(name: str, **changes: Any) -> CacheConfig:
    """The preset with few centroids, so that spans of 24 tokens are packed."""
    config = skv.parse_method(name)
    if any("centroids" in METHODS[codec.method] for codec in (config.keys, config.values)):
        config = config.replace(centroids=4)
    return config.replace(**changes)


def tensors(geometry: Geometry, tokens: int, seed: int) -> torch.Tensor:
    shape = (3, geometry.batch, tokens, geometry.heads, geometry.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def real_moments(
    config: CacheConfig, geometry: Geometry, chunks: Sequence[int], layers: int = 1
) -> list[dict[str, int]]:
    """Parts of the ledger while each chunk is open and once it is committed."""
    sizes = (geometry.heads, geometry.head_dim, geometry.frame_tokens)
    cache = skv.KVCache(layers, *sizes, config)
    found, start = [], 0
    for number, tokens in enumerate(chunks):
        k, v, q = tensors(geometry, tokens, number)
        for layer in cache:
            layer.write(k, v, start)
            layer.observe_queries(q)
        found.append(cache.ledger().parts)
        cache.commit()
        found.append(cache.ledger().parts)
        start += tokens
    return found


def planned_moments(
    config: CacheConfig, geometry: Geometry, chunks: Sequence[int]
) -> list[dict[str, int]]:
    layer = Replay(geometry, config)
    return [moment.parts for tokens in chunks for moment in layer.chunk(tokens)]


@pytest.mark.parametrize("policy", POLICIES, ids=["all", "window", "kept"])
@pytest.mark.parametrize("name", [*METHOD_NAMES, "quantwm:bf16", "bf16:qvg"])
def test_bytes_of_every_moment_are_the_ledgers(name: str, policy: dict[str, Any]) -> None:
    config = small(name, **policy)
    real = real_moments(config, GEOMETRY, CHUNKS)
    assert planned_moments(config, GEOMETRY, CHUNKS) == real
    packs = any("codes" in parts for parts in real)
    assert packs == (name != "bf16")


@pytest.mark.parametrize(
    "changes",
    [
        {"first_span": "own", "span_chunks": 3},
        {"centroid_format": "fp8"},
        {"warm_start": "ids", "window_frames": 2},  # the span before has left, its ids are kept
        {"centroids": 256, "window_frames": 5},  # more than tokens: such spans stay dense
    ],
    ids=lambda changes: "-".join(changes),
)
def test_bytes_of_other_forms_are_the_ledgers(changes: dict[str, Any]) -> None:
    config = small("quantwm", **changes)
    assert planned_moments(config, GEOMETRY, CHUNKS) == real_moments(config, GEOMETRY, CHUNKS)


def test_a_span_that_cannot_fit_is_refused_as_the_cache_does() -> None:
    config = small("qvg", window_frames=4, span_chunks=4)
    for moments in (planned_moments, real_moments):
        with pytest.raises(skv.ConfigError, match="span_chunks is 4"):
            moments(config, GEOMETRY, CHUNKS)


def setting(name: str, **changes: Any) -> Setting:
    """A model with two layers of small heads."""
    model = replace(find_model(name), layers=2, heads=1, head_dim=24, batch=2, **changes)
    return Setting(model, 12, 4, branches=1, shards=1)


@pytest.mark.parametrize("name", ["bf16", "kivi", "qvg", "quantwm"])
def test_a_windowed_video_needs_what_the_cache_holds(name: str) -> None:
    """All layers, and the largest moment of the whole video."""
    host = setting("lingbot-v2", chunk_latents=4, window_latents=18, sink_latents=6)
    config = small(name)
    found = need(host, config, chunks=9)
    policy = host.policy(config)
    real = real_moments(policy, host.geometry, [4 * 12] * 9, layers=2)
    assert found.resident == max(sum(parts.values()) for parts in real)
    assert found.parts in real
    assert found.bf16 == 2 * 2 * 2 * 24 * 2 * 18 * 12  # K and V, layers, B, D, bytes, tokens


@pytest.mark.parametrize("name", ["bf16", "qvg", "quantwm", "steady"])
def test_a_condition_cache_needs_what_the_cache_holds(name: str) -> None:
    """One clean pass shows its queries, then one span is stored."""
    host = setting("longcat")
    found = need(host, small(name), chunks=1, cached=7)
    cache = skv.KVCache(2, 1, 24, 12, host.policy(small(name)))
    k, v, q = tensors(host.geometry, 7 * 12, 0)
    for layer in cache:
        layer.observe_queries(q)
        layer.write(k, v, 0, observed=True)
        layer.commit()
    assert found.parts == cache.ledger().parts
    assert found.resident == cache.ledger().resident_bytes


@pytest.mark.parametrize(
    ("name", "chunks"), [("bf16", 4), ("kivi", 7), ("quantwm", 2), ("quantwm", 3), ("quantwm", 6)]
)
def test_a_selected_cache_needs_what_the_cache_holds(name: str, chunks: int) -> None:
    """Made anew for each chunk, whose passes show their queries."""
    host = setting("hy-worldplay", window_latents=16, chunk_latents=4)
    found = need(host, small(name), chunks)
    cache = skv.KVCache(2, 1, 24, 12, host.policy(small(name)))
    sides = [RebuiltLayer(layer) for layer in cache]
    for number in range(1, chunks):
        latents = min(16, 4 * number)
        k, v, q = tensors(host.geometry, latents * 12, number)
        for side in sides:
            side.replace(k, v, [4 * 12] * (latents // 4))
            side.layer.observe_queries(q)
    assert found.parts == cache.ledger().parts


def test_packing_is_counted_for_kernels_wherever_the_plan_is_made() -> None:
    codec, cuda = skv.preset("qvg").keys, torch.device("cuda")
    shape = (1, 12, 4680, 128)
    with_kernels = encode_workspace_nbytes(codec, shape, False, cuda, kernels=True)
    without = encode_workspace_nbytes(codec, shape, False, cuda, kernels=False)
    assert with_kernels < without
    assert need(setting("self-forcing"), small("qvg"), 3).encode > 0
