"""The object that stands in for SGLang's caches: one call writes a chunk and reads."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

import steadykv as skv
from steadykv.errors import HostError, ShapeError
from steadykv.hosts.sglang import KVView, SGLangCache
from tests.hosts.checks import small_config
from tests.hosts.sglang import (
    DIM,
    FRAME,
    HEADS,
    CausalDMDDenoisingStage,
    DenseCache,
    noise_of,
)


def indices(**fields):
    return {
        "global_end_index": torch.zeros(1, dtype=torch.long),
        "local_end_index": torch.zeros(1, dtype=torch.long),
        **fields,
    }


def our_cache(config="bf16", cache_size=5 * FRAME, sink_tokens=FRAME, heads=HEADS, **fields):
    return SGLangCache(
        batch_size=1,
        cache_size=cache_size,
        num_heads=heads,
        head_dim=DIM,
        dtype=torch.bfloat16,
        device="cpu",
        sink_tokens=sink_tokens,
        config=config,
        **indices(**fields),
    )


def chunk_of(tokens, seed, heads=HEADS, dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, tokens, heads, dim, generator=generator).bfloat16() for _ in range(2)]


def assert_same_view(ours, theirs):
    assert torch.equal(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)


def test_recent_window_of_zero_is_the_sink_and_the_chunk():
    cache = our_cache()
    chunks = [chunk_of(FRAME, i) for i in range(7)]
    for i, (k, v) in enumerate(chunks):
        view = cache.update_and_get_attention_kv(
            key=k, value=v, current_chunk_start=i * FRAME, recent_window_tokens=0
        )
    assert torch.equal(view.k, torch.cat([chunks[0][0], chunks[6][0]], 1))
    with pytest.raises(ValueError, match="recent_window_tokens is -1"):
        cache.update_and_get_attention_kv(
            key=k, value=v, current_chunk_start=6 * FRAME, recent_window_tokens=-1
        )


def test_one_warning_where_queries_never_come():
    cache = our_cache(small_config("quantwm"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            k, v = chunk_of(FRAME, 0)
            cache.update_and_get_attention_kv(key=k, value=v, current_chunk_start=0)
    calls = [(FRAME * i, *chunk_of(FRAME, i)) for i in range(1, 5)]

    def run():
        for start, k, v in calls:
            cache.update_and_get_attention_kv(key=k, value=v, current_chunk_start=start)

    with pytest.warns(UserWarning, match=r"observe_queries was not called .*w = 1") as caught:
        run()
    assert len(caught) == 1


def test_queries_may_be_shown_by_the_engine():
    cache, blind = (our_cache(small_config("quantwm")) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(4):
            k, v = chunk_of(FRAME, i)
            for one in (cache, blind):
                one.update_and_get_attention_kv(key=k, value=v, current_chunk_start=i * FRAME)
            cache.observe_queries(chunk_of(FRAME, 50 + i)[0])
    assert int(cache.layer.stats.for_encoding(10).count.flatten()[0]) == 3 * FRAME
    assert not torch.equal(cache.layer.read()[0], blind.layer.read()[0])


def test_head_slices_fill_the_chunk_bit_by_bit():
    """Trap 9: a call may carry a part of the heads; the chunk is what all of its calls wrote."""
    heads = 6
    fields = {"batch_size": 1, "num_heads": heads, "head_dim": DIM, "device": "cpu"}
    dense = DenseCache(
        cache_size=5 * FRAME, sink_tokens=FRAME, dtype=torch.bfloat16, **fields, **indices()
    )
    cache = our_cache(heads=heads)
    for i in range(9):
        for step in range(2):
            k, v = chunk_of(FRAME, 10 * i + step, heads)
            for first, count in ((0, 2), (4, 2), (2, 2)):
                part = {
                    "key": k[:, :, first : first + count],
                    "value": v[:, :, first : first + count],
                    "current_chunk_start": i * FRAME,
                    "cache_head_start": first,
                }
                view = cache.update_and_get_attention_kv(**part)
                assert view.k.shape[2] == count
                assert_same_view(view, dense.update_and_get_attention_kv(**part))
    whole = {"key": k, "value": v, "current_chunk_start": 8 * FRAME}
    assert_same_view(
        cache.update_and_get_attention_kv(**whole), dense.update_and_get_attention_kv(**whole)
    )
    with pytest.raises(ShapeError, match="2 heads of 6 from head None"):
        cache.update_and_get_attention_kv(
            key=k[:, :, :2], value=v[:, :, :2], current_chunk_start=8 * FRAME
        )


def test_head_slices_are_packed_when_all_are_filled():
    cache = our_cache(small_config("qvg"))
    for i in range(3):
        k, v = chunk_of(FRAME, i)
        for first in range(HEADS):
            part = (x[:, :, first : first + 1] for x in (k, v))
            key, value = part
            cache.update_and_get_attention_kv(
                key=key, value=value, current_chunk_start=i * FRAME, cache_head_start=first
            )
            assert cache.layer.encoded_tokens == i * FRAME
        assert torch.equal(cache.layer.read()[0][:, -FRAME:], k)


def test_what_a_packed_cache_refuses():
    cache = our_cache()
    k, v = chunk_of(FRAME, 0)
    cache.update_and_get_attention_kv(key=k, value=v, current_chunk_start=0)
    with pytest.raises(HostError, match="pin_current_chunk"):
        cache.pin_current_chunk(FRAME)
    with pytest.raises(HostError, match=r"write at token 8: expected 16 or 0"):
        cache.update_and_get_attention_kv(key=k, value=v, current_chunk_start=8)
    with pytest.raises(HostError, match=r"again with 8 tokens: expected 16"):
        cache.update_and_get_attention_kv(key=k[:, :8], value=v[:, :8], current_chunk_start=0)
    assert torch.equal(cache.layer.read()[0], k)


def test_both_forms_of_the_indices_move():
    """Trap 5: hosts read the tensors or the integers."""
    for use_int in (False, True):
        cache = our_cache(use_int_indices=use_int)
        for i in range(7):
            k, v = chunk_of(FRAME, i)
            view = cache.update_and_get_attention_kv(key=k, value=v, current_chunk_start=i * FRAME)
        assert isinstance(view, KVView)
        assert (view.visible_local_end, view.visible_global_end) == (5 * FRAME, 7 * FRAME)
        assert (view.local_start_index, view.local_end_index) == (4 * FRAME, 5 * FRAME)
        ends = (7 * FRAME, 5 * FRAME) if use_int else (None, None)
        assert (cache.global_end_index_int, cache.local_end_index_int) == ends
        assert (int(cache.global_end_index), int(cache.local_end_index)) == (7 * FRAME, 5 * FRAME)
        cache.reset_indices()
        assert int(cache.global_end_index) == int(cache.local_end_index) == 0
        assert cache.global_end_index_int == (0 if use_int else None)
        assert cache.layer.held() == []


def test_direct_attention_is_asked_as_before():
    assert our_cache(cache_size=FRAME, sink_tokens=0).can_direct_current_attention(FRAME)
    assert not our_cache(cache_size=FRAME, sink_tokens=0).can_direct_current_attention(8)
    assert not our_cache().can_direct_current_attention(5 * FRAME)
    wanted = CausalDMDDenoisingStage(2, 0).forward(noise_of(8), [2] * 4)
    stage = CausalDMDDenoisingStage(2, 0)
    with skv.attach(stage, preset="bf16") as caches:
        assert torch.equal(stage.forward(noise_of(8), [2] * 4), wanted)
    assert caches["main"][0].held() == []


@pytest.mark.parametrize("frame", [880, 1560, 4680])
def test_frames_that_are_no_multiples_of_64(frame):
    """Trap 3."""
    cache = our_cache(
        small_config("qvg", group_size=64), cache_size=3 * frame, sink_tokens=frame, heads=1
    )
    plain = our_cache(cache_size=3 * frame, sink_tokens=frame, heads=1)
    for i in range(5):
        k, v = (x.repeat(1, 1, 1, 1) for x in chunk_of(frame, i, 1))
        call = {"key": k, "value": v, "current_chunk_start": i * frame}
        view, wanted = (c.update_and_get_attention_kv(**call) for c in (cache, plain))
    assert view.k.shape == wanted.k.shape == (1, 3 * frame, 1, DIM)
    assert cache.layer.encoded_tokens == 4 * frame
    assert 0 < float((view.k - wanted.k).float().abs().mean()) < 1


# --- SGLang's own class, where it is at hand -------------------------------------------------

FILE = "multimodal_gen/runtime/layers/kvcache/causal_attention_cache.py"


def real_module():
    """SGLang's file of dense caches, which needs torch only: from the package or a directory."""
    folder = os.environ.get("STEADYKV_SGLANG")
    if folder is None:
        spec = importlib.util.find_spec("sglang")
        folder = None if spec is None else (spec.submodule_search_locations or [None])[0]
    if folder is None:
        pytest.skip("needs sglang, or STEADYKV_SGLANG with its folder")
    spec = importlib.util.spec_from_file_location(
        "sglang_causal_attention_cache", Path(folder, FILE)
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recent", [None, 0, 3, 8, 100])
@pytest.mark.parametrize(
    ("size", "sink", "chunk"), [(40, 8, 8), (40, 0, 8), (36, 5, 8), (24, 8, 3)]
)
def test_the_real_dense_class_gives_the_same_views(recent, size, sink, chunk):
    shape = (1, size, 2, 4)
    dense = real_module().CausalSelfAttentionKVCache(
        k=torch.zeros(shape, dtype=torch.bfloat16),
        v=torch.zeros(shape, dtype=torch.bfloat16),
        cache_size=size,
        sink_tokens=sink,
        attention_window_size=size,
        global_end_index_int=0,
        local_end_index_int=0,
        **indices(),
    )
    cache = SGLangCache(
        batch_size=1,
        cache_size=size,
        num_heads=2,
        head_dim=4,
        dtype=torch.bfloat16,
        device="cpu",
        sink_tokens=sink,
        config="bf16",
        use_int_indices=True,
        **indices(),
    )
    public = {name for name in dir(dense) if not name.startswith("_")}
    assert public - set(dir(cache)) <= {"k", "v", "pinned_len", "pinned_start"}
    for seed in (0, 100):
        for i in range(20):
            for step in range(3):
                k, v = chunk_of(chunk, seed + 3 * i + step, 2, 4)
                call = {"key": k, "value": v, "current_chunk_start": i * chunk}
                # The last pass of a chunk is the clean one, which sees the whole window.
                call["recent_window_tokens"] = recent if step < 2 else None
                ours = cache.update_and_get_attention_kv(**call)
                theirs = dense.update_and_get_attention_kv(**call)
                assert_same_view(ours, theirs)
                for name in KVView.__dataclass_fields__:
                    if name not in ("k", "v"):
                        assert getattr(ours, name) == getattr(theirs, name), name
                assert int(cache.global_end_index) == int(dense.global_end_index)
                assert int(cache.local_end_index) == int(dense.local_end_index)
        cache.reset_indices()
        dense.reset_indices()
