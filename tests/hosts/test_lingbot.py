"""LingBot-World v1-fast and v2: lists that a video makes and drops, sinks, shares of heads."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import steadykv as skv
from steadykv.cache import KVCache
from steadykv.codecs import CODECS
from steadykv.config import PRESETS, preset
from steadykv.errors import HostError
from tests.hosts.checks import (
    QUANTIZING,
    assert_equal,
    assert_ledger_is_real,
    assert_packed_once,
    assert_same_state,
    peak_bytes,
    small_config,
    state_of,
)
from tests.hosts.lingbot import (
    DIM,
    HEADS,
    LAYERS,
    CausalPipeline,
    Exchange,
    FastPipeline,
    noise_of,
    text_of,
)

MODULE = sys.modules[FastPipeline.__module__]
FRAME = 16
PER_HEAD = [
    name
    for name in PRESETS
    if not any(
        CODECS[codec.method].pools_heads for codec in (preset(name).keys, preset(name).values)
    )
]


def run_twice(host, frames, chunk):
    return [host.generate(noise_of(frames, seed), text_of(seed), chunk) for seed in (1, 2)]


# v1 keeps everything; with a window, which its command line offers too; v2's defaults, whose window
# and sink are no multiples of the chunk (trap 2), and with the chunk of its function.
@pytest.mark.parametrize(
    ("kind", "window", "frames", "chunk"),
    [
        (FastPipeline, (-1, 0), 27, 3),
        (FastPipeline, (-1, 3), 27, 3),
        (FastPipeline, (9, 3), 30, 3),
        (CausalPipeline, (18, 6), 40, 4),
        (CausalPipeline, (18, 6), 30, 3),
        (CausalPipeline, (7, 2), 40, 4),
    ],
)
def test_bf16_is_bit_identical(kind, window, frames, chunk):
    wanted = run_twice(kind(*window), frames, chunk)
    host = kind(*window)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host, frames, chunk)
        assert list(caches.branches) == ["main"]
    assert_equal(got, wanted)


@pytest.mark.parametrize("size", [40, 100, 18 * FRAME, 300, 1_000_000])
@pytest.mark.parametrize("window", [(18, 6), (-1, 0)])
def test_max_attention_size_is_passed_per_call(window, size):
    """Shorter than the window, with and without a part of the sink, equal, longer."""
    host, plain = CausalPipeline(*window), CausalPipeline(*window)
    wanted = plain.generate(noise_of(40), text_of(), 4, size)
    with skv.attach(host, preset="bf16"):
        assert torch.equal(host.generate(noise_of(40), text_of(), 4, size), wanted)


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method):
    host = CausalPipeline()
    with skv.attach(host, config=small_config(method)) as caches:
        got = host.generate(noise_of(40), text_of(), 4)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
        wanted = CausalPipeline().generate(noise_of(40), text_of(), 4)
    assert not torch.equal(got, wanted)
    for layer in caches["main"]:
        assert layer.encoded_tokens == 36 * FRAME
        assert layer.held() == [(0, 6 * FRAME), (28 * FRAME, 40 * FRAME)]


def test_v1_keeps_every_token():
    host = FastPipeline()
    with skv.attach(host, config=small_config("qvg")) as caches:
        host.generate(noise_of(27), text_of())
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert all(layer.held() == [(0, 27 * FRAME)] for layer in caches["main"])


def test_the_pretrained_model_has_two_branches():
    kind = CausalPipeline
    wanted = run_twice(kind(18, 6, "causal_pretrain"), 40, 4)
    host = kind(18, 6, "causal_pretrain")
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host, 40, 4)
        assert list(caches.branches) == ["positive", "negative"]
    assert_equal(got, wanted)
    with skv.attach(host, config=small_config("qvg")) as caches:
        host.generate(noise_of(40), text_of())
        for cache in caches:
            assert_packed_once(cache)
        assert not torch.equal(caches["positive"][1].read()[0], caches["negative"][1].read()[0])


def test_branches_keep_their_names_after_a_failure(monkeypatch):
    """Between the two lists of a video."""
    found = []
    for fails in (False, True):
        host = CausalPipeline(18, 6, "causal_pretrain")
        with skv.attach(host, preset="bf16") as caches:
            if fails:
                with monkeypatch.context() as broken:
                    broken.setattr(host, "_initialize_crossattn_cache", None)
                    with pytest.raises(TypeError):
                        host.generate(noise_of(8), text_of())
            host.generate(noise_of(8), text_of())
            found.append([caches[name][1].read() for name in ("positive", "negative")])
    assert_equal(found[1], found[0])
    assert not torch.equal(found[0][0][0], found[0][1][0])


def test_a_warm_up_writes_and_is_forgotten():
    """Trap 13."""
    wanted = CausalPipeline().generate(noise_of(24), text_of())
    host = CausalPipeline()
    with skv.attach(host, config=small_config("bf16")) as caches:
        host.prewarm(noise_of(24))
        warm = caches["main"]
        assert warm[0].held() == [(0, 4 * FRAME)]
        assert torch.equal(host.generate(noise_of(24), text_of()), wanted)
        assert caches["main"] is not warm
        assert warm[0].held() == []
    with skv.attach(host, config=small_config("quantwm")) as caches:
        host.prewarm(noise_of(24))
        first = host.generate(noise_of(24), text_of())
        assert torch.equal(host.generate(noise_of(24), text_of()), first)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)


def test_queries_reach_the_statistics_of_their_layer_alone():
    host = CausalPipeline()
    with skv.attach(host, config=small_config("quantwm")) as caches:
        host.generate(noise_of(12), text_of())
        counts = [int(layer.stats.for_encoding(10).count.flatten()[0]) for layer in caches["main"]]
    assert counts == [2 * 5 * 4 * FRAME] * LAYERS


@pytest.mark.parametrize("options", [{"store_keys": "before_rope"}, {"attention": "packed"}])
def test_options_of_the_family(options):
    """Two sizes of frames in one block: what the rotary embedding does is asked anew."""
    config = small_config("rtn", bits=4)
    outs = []
    for chosen in ({}, options):
        host = CausalPipeline(8, 2)
        with skv.attach(host, config=config, **chosen) as caches:
            for size in ((8, 8), (4, 16), (16, 4)):
                outs.append(host.generate(noise_of(16, size=size), text_of()).float())
            assert_packed_once(caches["main"])
            assert not caches.notes
    for a, b in zip(outs[:3], outs[3:], strict=True):
        assert 0 < float((a - b).norm() / a.norm()) < 0.1


def test_another_grid_is_another_rotary_embedding():
    """Videos of one chunk read the same tokens first and last: nothing of the first one is kept."""
    sizes = [(8, 8), (4, 16), (16, 4), (8, 16)]
    videos: list[list[torch.Tensor]] = [[], []]
    host, config = CausalPipeline(), small_config("qvg")
    with skv.attach(host, config=config, store_keys="before_rope"):
        videos[0] += [host.generate(noise_of(4, size=size), text_of()) for size in sizes]
    for size in sizes:
        with skv.attach(host, config=config, store_keys="before_rope"):
            videos[1].append(host.generate(noise_of(4, size=size), text_of()))
    assert_equal(*videos)


# Frames follow the aspect of the image: 480 by 832 pixels, 16:9 of the same area, 720 by 1280.
@pytest.mark.parametrize(
    ("size", "tokens"), [((60, 104), 1560), ((52, 116), 1508), ((90, 160), 3600)]
)
def test_frames_of_every_aspect(size, tokens, monkeypatch):
    """Trap 3. Attention over that many tokens is left out: what it would get is compared."""
    sums = []

    def attention(q, k, v):
        sums.append((k.float().sum(), v.float().sum(), k.shape))
        return q

    monkeypatch.setattr(MODULE, "attention", attention)
    noise = noise_of(4, size=size)
    for kind, chunk in ((FastPipeline, 1), (CausalPipeline, 2)):
        args = (-1, 0) if kind is FastPipeline else (3, 1)
        sums.clear()
        wanted = kind(*args).generate(noise, text_of(), chunk)
        before = list(sums)
        sums.clear()
        host = kind(*args)
        with skv.attach(host, preset="bf16") as caches:
            assert torch.equal(host.generate(noise, text_of(), chunk), wanted)
            assert caches["main"][0].geometry.frame_tokens == tokens
        assert sums == before
    with skv.attach(host, config=small_config("rtn")) as caches:
        host.generate(noise, text_of(), 2)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)


def sharded(method, frames):
    """Videos of two ranks, each with half of the heads, and their caches."""
    exchange, outs = Exchange(2), [None, None]
    hosts = [FastPipeline(18, 6, (rank, 2, exchange)) for rank in range(2)]

    def run(rank):
        outs[rank] = hosts[rank].generate(noise_of(frames), text_of(), 4)

    config = small_config(method)
    with skv.attach(hosts[0], config=config) as a, skv.attach(hosts[1], config=config) as b:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return outs, [a, b]


@pytest.mark.parametrize("method", ["bf16", "qvg", "quantwm"])
def test_a_process_keeps_its_share_of_the_heads(method):
    """Trap 9: the ranks make the same video, which is that of one process with all heads."""
    host = FastPipeline(18, 6)
    with skv.attach(host, config=small_config(method)) as whole:
        wanted = host.generate(noise_of(24), text_of(), 4)
    outs, shards = sharded(method, 24)
    assert_equal(outs, [wanted, wanted])
    for i, layer in enumerate(whole["main"]):
        parts = [caches["main"][i] for caches in shards]
        assert all(part.geometry.heads == HEADS // 2 for part in parts)
        joined = [torch.cat(pair, 2) for pair in zip(*(p.read() for p in parts), strict=True)]
        assert_equal(joined, list(layer.read()))


@pytest.mark.parametrize("method", PER_HEAD)
def test_shards_have_the_bytes_of_the_whole(method):
    """Of every method whose statistics are per head; kvquant pools the heads of a process."""
    assert set(PRESETS) - set(PER_HEAD) == {"kvquant", "kvquant_calibrated"}
    config = small_config(method)
    generator = torch.Generator().manual_seed(5)
    caches = [KVCache(1, heads, DIM, FRAME, config) for heads in (4, 2, 2)]
    shares = [slice(0, 4), slice(0, 2), slice(2, 4)]
    for start in range(0, 12 * FRAME, 3 * FRAME):
        k, v, q = (
            torch.randn(1, 3 * FRAME, 4, DIM, generator=generator).bfloat16() for _ in range(3)
        )
        for cache, share in zip(caches, shares, strict=True):
            cache[0].write(k[:, :, share], v[:, :, share], start)
            cache[0].observe_queries(q[:, :, share])
            cache[0].commit()
    whole, first, second = (cache[0].read() for cache in caches)
    for tensor, a, b in zip(whole, first, second, strict=True):
        assert torch.equal(tensor, torch.cat([a, b], 2))


def test_no_second_layer_is_dense_at_a_time():
    plain, packed = FastPipeline(), FastPipeline()
    noise, text, resident = noise_of(24), text_of(), []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.generate(noise, text)
            resident.append(caches.nbytes)

    token = HEADS * DIM * 2 * 2
    window, cache = 24 * FRAME * token, LAYERS * 24 * FRAME * token
    chunk = 3 * FRAME * HEADS * DIM * 4
    dense = peak_bytes(lambda: plain.generate(noise, text))
    assert peak_bytes(run_packed) < dense - cache + resident[0] + window + 6 * chunk


def test_an_untouched_host_comes_back():
    host = CausalPipeline()
    before = state_of(host, host.model, MODULE)

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm"), store_keys="before_rope"):
            host.generate(noise_of(8), text_of())
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    assert_same_state(before, state_of(host, host.model, MODULE))
    with skv.attach(host, config=small_config("qvg"), attention="packed"):
        host.generate(noise_of(8), text_of())
    assert_same_state(before, state_of(host, host.model, MODULE))
    assert not host.model._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: setattr(h, "sp_size", 3), "got sp_size 3 for 4 heads: expected a divisor"),
        (lambda h: setattr(h, "use_chunked_kv", True), "got use_chunked_kv=True"),
        (lambda h: delattr(h, "patch_size"), "without 'patch_size'"),
        (lambda h: delattr(h.model.blocks[0].self_attn, "sink_size"), "without 'sink_size'"),
        (
            lambda h: setattr(h, "_initialize_self_kv_cache", lambda num_layers, shape: []),
            "expected an argument 'dtype' and 'device'",
        ),
    ],
)
def test_a_changed_host_is_refused_before_anything_happens(change, message):
    host = CausalPipeline()
    change(host)
    before = state_of(host, host.model, MODULE)
    with pytest.raises(HostError, match=f"LingBot-World: .*{message}"), skv.attach(host):
        pass
    assert_same_state(before, state_of(host, host.model, MODULE))


def test_a_file_without_the_functions_is_refused(monkeypatch):
    monkeypatch.delattr(MODULE, "attention")
    with (
        pytest.raises(HostError, match=r"without a function 'attention' or 'flash_attention'"),
        skv.attach(CausalPipeline()),
    ):
        pass


def test_keys_before_rope_of_a_share_of_heads():
    """What is stored has been cut behind the rotary embedding, so it is turned back."""

    class Alone(Exchange):
        def joined(self, rank, part):
            return torch.cat([part, part], 2)

    outs = {}
    for place in ("bf16", "after_rope", "before_rope"):
        host = FastPipeline(18, 6, (0, 2, Alone(1)))
        config = skv.preset("bf16") if place == "bf16" else small_config("rtn", bits=4)
        options = {} if place == "bf16" else {"store_keys": place}
        with skv.attach(host, config=config, **options) as caches:
            outs[place] = host.generate(noise_of(24), text_of()).float()
        assert len(caches.turns) == (place == "before_rope")
    errors = [float((outs[p] - outs["bf16"]).norm()) for p in ("after_rope", "before_rope")]
    assert 0 < errors[1] < 1.5 * errors[0]


def test_a_cache_of_half_frames_is_refused():
    host = CausalPipeline()
    entries = None
    with skv.attach(host, preset="bf16"):
        entries = host._initialize_self_kv_cache(2, [1, 100, HEADS, DIM], torch.bfloat16, "cpu")
        with pytest.raises(HostError, match=r"got a cache of 100 tokens.*whole frames of 16"):
            host.model(x=[noise_of(4)], t=0, context=[text_of()], kv_cache=entries)
