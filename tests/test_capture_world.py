"""Captures of the world model: the rollout is the plain one, the bytes are those of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steadykv.cache import KVCache
from steadykv.capture import (
    CaptureFile,
    RecordingCache,
    Selection,
    open_capture,
    rotate_pairs,
)
from steadykv.codecs import encode
from steadykv.config import CacheConfig, CachePolicy, preset
from steadykv.evaluation.tensor_comparison import default_methods
from steadykv.evaluation.tensor_packing import SpanPacker
from steadykv.evaluation.world_capture import capture_world
from steadykv.world import rollout
from steadykv.world.rope import apply_rope, rope_table
from tests.worlds import TINY, tiny_episodes, tiny_world


class Tee:
    """Answers like the first of two caches, and shows the second everything."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __getitem__(self, index: int) -> Tee:
        return Tee(self.first[index], self.second[index])

    def write(self, k: Tensor, v: Tensor, start: int) -> None:
        self.first.write(k, v, start)
        self.second.write(k, v, start)

    def observe_queries(self, q: Tensor) -> None:
        self.first.observe_queries(q)
        self.second.observe_queries(q)

    def read(self) -> tuple[Tensor, Tensor]:
        return self.first.read()

    def spans(self) -> list[tuple[int, int]]:
        return self.first.spans()

    def commit(self) -> None:
        self.first.commit()
        self.second.commit()


@pytest.mark.parametrize("key_rope", ["post", "pre"])
def test_the_trajectory_is_the_bf16_one(key_rope: str, tmp_path: Path) -> None:
    world, episodes = tiny_world(), tiny_episodes(2)
    policy = CachePolicy(span_chunks=2, window_frames=TINY.window_frames)
    shape = (TINY.num_layers, TINY.num_heads, TINY.head_dim, TINY.frame_tokens)
    config = preset("bf16").replace(policy=policy)
    expected = rollout(world, episodes, KVCache(*shape, config), 12, 3, key_rope=key_rope)  # type: ignore[arg-type]
    state = torch.get_rng_state()
    cache = RecordingCache(
        KVCache(*shape, config),
        Selection(layers=(1,)),
        num_layers=TINY.num_layers,
        num_heads=TINY.num_heads,
        frame_tokens=TINY.frame_tokens,
        policy=policy,
        rotation=lambda start, end: torch.zeros(2, end - start, TINY.head_dim // 2),
    )
    video = rollout(world, episodes, cache, 12, 3, key_rope=key_rope)  # type: ignore[arg-type]
    assert torch.equal(video, expected)
    assert torch.equal(state, torch.get_rng_state())
    assert [(span.layer, span.index) for span in cache.captured()] == [(1, 0), (1, 1)]
    assert isinstance(cache[0], type(cache.inner[0]))  # not selected: the inner layer itself


class Watched(RecordingCache):
    """A recorder that shows other caches the same calls."""

    others: tuple[Any, ...] = ()

    def __getitem__(self, layer: int) -> Any:
        seen = super().__getitem__(layer)
        for other in self.others:
            seen = Tee(seen, other[layer])
        return seen

    def commit(self) -> None:
        super().commit()
        for other in self.others:
            other.commit()


def capture_watched(path: Path, others: Sequence[Any], **options: Any) -> None:
    """`capture_world` on the tiny world with a long window, shown to other caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watched, "others", tuple(others))
        patch.setattr("steadykv.evaluation.world_capture.RecordingCache", Watched)
        world = tiny_world(replace(TINY, window_frames=60))
        capture_world(world, tiny_episodes(2), path, **options)


@pytest.fixture(scope="module", params=[(0, 1), (1,)], ids=["all heads", "one head"])
def packed_beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CaptureFile, dict[str, KVCache], list[int]]:
    """A capture, and one packing cache a method that was fed the same rollout; kept heads."""
    policy = CachePolicy(span_chunks=2)
    shape = (TINY.num_layers, TINY.num_heads, TINY.head_dim, TINY.frame_tokens)
    caches = {
        method: KVCache(*shape, preset(method).with_span(2, centroids=8).replace(policy=policy))
        for method in default_methods()
    }
    path = tmp_path_factory.mktemp("capture") / "c.safetensors"
    capture_watched(
        path, tuple(caches.values()), selection=Selection(heads=request.param), frames=15, seed=5
    )
    return open_capture(path), caches, list(request.param)


def is_by_head(config: CacheConfig) -> bool:
    """Whether a head's bytes are the same without the other heads."""
    x = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(0))
    pairs = [(encode(x, c).tensors, encode(x[:, 1:], c).tensors)
             for c in (config.keys, config.values)]  # fmt: skip
    return all(
        torch.equal(alone[name].view(torch.uint8), both[name][:, 1:].view(torch.uint8))
        for both, alone in pairs
        for name in both
    )


@pytest.mark.parametrize("method", default_methods())
def test_captured_spans_encode_to_the_bytes_of_a_cache(
    method: str, packed_beside: tuple[CaptureFile, dict[str, KVCache], list[int]]
) -> None:
    """Through the file: statistics, warm starts, span numbers and tensors are all the cache's."""
    file, caches, heads = packed_beside
    cache = caches[method]
    if len(heads) == 1 and not is_by_head(cache.config):
        pytest.skip("this method pools heads, so a part of them is packed otherwise")
    packer = SpanPacker(cache.config)
    assert len(file.cells) == 2 * 3
    for cell in file.cells:
        packed = packer.pack(file.load(cell))
        for side, store in (("keys", cache[cell[0]].keys), ("values", cache[cell[0]].values)):
            payload, mine = store.segments[cell[1]].payload, packed[side].payload
            assert payload is not None
            if "refinement" not in payload.tensors:
                mine = mine.unrefined()  # as the cache did when a newer span came
            if len(heads) == 2:
                assert mine == payload
                continue
            for name, tensor in mine.tensors.items():
                wanted = payload.tensors[name][:, heads]
                assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))


# --- keys before RoPE --------------------------------------------------------------------------


class Listener:
    """Collects the queries of layer 0."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []

    def __getitem__(self, layer: int) -> Listener:
        return self if layer == 0 else Listener()

    def write(self, k: Tensor, v: Tensor, start: int) -> None:
        """Keys and values play no part."""

    def observe_queries(self, q: Tensor) -> None:
        self.queries.append(q.clone())

    def commit(self) -> None:
        """Nothing ends."""


def test_keys_before_rope_come_with_the_angles_of_their_tokens(tmp_path: Path) -> None:
    """Rotated as the file says, keys and queries are those that attention multiplied."""
    path = tmp_path / "pre.safetensors"
    listener = Listener()
    capture_watched(path, [listener], selection=Selection(queries=5000), frames=12, key_rope="pre")
    file = open_capture(path)
    assert file.needs_rope
    span = file.load((0, 0))
    assert span.rope is not None
    assert span.q is not None
    table = rope_table(TINY, 0, 6, "cpu")
    assert torch.equal(span.rope, torch.stack(table))
    rotated = rotate_pairs(span.k, span.rope)
    assert torch.equal(rotated, apply_rope(span.k.transpose(1, 2), table).transpose(1, 2))
    # Chunks 2, 3 and 4 meet span 0, in three passes of 72 tokens each; chunk 0 has one pass.
    per_pass = TINY.chunk_frames * TINY.frame_tokens
    later = torch.cat(
        [apply_rope(q, rope_table(TINY, 3 * (2 + number // 3), 3, "cpu"))
         for number, q in enumerate(listener.queries[1 + 3 :])], dim=1)  # fmt: skip
    assert later.shape[1] == 9 * per_pass
    assert torch.equal(span.q, later.transpose(1, 2))
