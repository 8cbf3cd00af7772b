"""flashdreams' own Wan and Cosmos transformers, unedited: objects that write between two hooks."""

from __future__ import annotations

import importlib.util
import tomllib
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import steadykv as skv
from steadykv.cache import KVCache
from steadykv.errors import HostError, PositionError, ShapeError
from steadykv.hosts.blocks import BlockCache
from tests.hosts import flashdreams as real
from tests.hosts.checks import (
    QUANTIZING,
    assert_equal,
    assert_ledger_is_real,
    assert_packed_once,
    assert_same_state,
    notes_of,
    peak_bytes,
    small_config,
    state_of,
)
from tests.hosts.flashdreams import DIM, FRAME, HEADS, LAYERS, attended, rollout


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The two modules whose rotary kernel needs a GPU; a listed test dependency has to be there."""
    if importlib.util.find_spec("flashdreams") is None:
        project = Path(__file__).parents[2] / "pyproject.toml"
        extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
        if any(line.startswith("flashdreams") for line in extras["dev"]):
            pytest.fail("flashdreams is a test dependency and is not installed")
        pytest.skip("needs flashdreams")
    import flashdreams.recipes.cosmos.transformer.impl.modules as cosmos_modules
    import flashdreams.recipes.wan.transformer.impl.modules as wan_modules

    for module in (wan_modules, cosmos_modules):
        monkeypatch.setattr(module, "apply_rope_freqs", real.rotated)
    return wan_modules, cosmos_modules


def run_twice(host, chunks=9):
    return [rollout(host, chunks, seed) for seed in (1, 2)]


# Makes a host; (chunk, window without sink, sink) in frames.
HOSTS = {
    "wan": lambda: real.wan(1, 3, 1),
    "wan rotates on read": lambda: real.wan(1, 3, 1, rotates_on_read=True),
    "wan rotates on read, chunks of 2": lambda: real.wan(2, 3, 1, rotates_on_read=True),
    "wan guided, sink no multiple of the chunk": lambda: real.wan(3, 5, 1, guided=True),
    "wan without sink": lambda: real.wan(1, 4, 0),
    "wan, window shorter than the chunk": lambda: real.wan(3, 1, 2),
    "wan without a batch": lambda: real.wan(batch_shape=()),
    "wan fp32": lambda: real.wan(dtype=torch.float32),
    "wan 2.2": lambda: real.two_networks(),
    "cosmos": lambda: real.cosmos(2, 4, 2),
}


@pytest.mark.parametrize("name", HOSTS)
def test_bf16_is_bit_identical(name):
    host = HOSTS[name]()
    wanted = run_twice(host)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host)
        assert_ledger_is_real(caches)
    assert_equal(got, wanted)
    assert_equal(run_twice(host), wanted)
    expected = {"wan guided, sink no multiple of the chunk": ["positive", "negative"]}
    expected["wan 2.2"] = ["high_noise main", "low_noise main"]
    assert list(caches.branches) == expected.get(name, ["main"])


@pytest.mark.parametrize(
    ("chunk", "window", "sink"),
    [(4, 12, 4), (4, 8, 0), (4, 7, 1), (6, 2, 4), (6, 1, 5), (5, 5, 0), (4, 4, 8), (3, 8, 1)],
)
def test_the_object_says_what_the_real_one_says(chunk, window, sink):
    from flashdreams.core.attention import BlockKVCache

    shape = (1, sink + window, HEADS, DIM)
    theirs = BlockKVCache(shape, shape, -3, chunk, window, sink, device="cpu", dtype=torch.bfloat16)
    config = small_config("bf16", window_frames=sink + window, sink_frames=sink)
    ours = BlockCache(KVCache(1, HEADS, DIM, 1, config)[0], chunk, window, sink)
    generator = torch.Generator().manual_seed(0)
    public = {n for n in dir(theirs) if not n.startswith("_")}
    assert public - set(dir(ours)) == {"from_tensor", "k_shape", "v_shape"}
    for index in [0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7, 8, 9]:
        for cache in (ours, theirs):
            cache.before_update(index)
        for _ in range(2):
            assert ours.size == theirs.size
            assert ours.write_end == theirs.write_end
            assert ours.is_steady_state() == theirs.is_steady_state()
            k, v = torch.randn(2, 1, chunk, HEADS, DIM, generator=generator).bfloat16()
            for cache in (ours, theirs):
                cache.update(k, v)
            assert_equal([ours.cached_k(), ours.cached_v()], [theirs.cached_k(), theirs.cached_v()])
        for cache in (ours, theirs):
            cache.after_update(index)
        assert ours.size == theirs.size
    for cache in (ours, theirs):
        cache.reset()
        assert cache.size == 0


@pytest.mark.parametrize("rotates_on_read", [False, True])
@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method, rotates_on_read):
    host = real.wan(rotates_on_read=rotates_on_read)
    wanted = rollout(host, 9)
    with skv.attach(host, config=small_config(method)) as caches:
        got = rollout(host, 9)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert all(torch.isfinite(x).all() for x in got)
    assert not torch.equal(got[-1], wanted[-1])
    for layer in caches["main"]:
        assert layer.encoded_tokens == 9 * FRAME  # the newest chunk too: `finalize` commits
        assert layer.held() == [(0, FRAME), (6 * FRAME, 9 * FRAME)]
    assert not notes_of(caches)


def test_what_is_packed_stays_as_it_is():
    """Trap 1: the host moves its window inside its buffer; ours is never encoded again."""
    config = small_config("qvg", window_frames=4, sink_frames=1)
    cache = BlockCache(KVCache(1, HEADS, DIM, FRAME, config)[0], FRAME, 3 * FRAME, FRAME)
    payloads: list[list[int]] = []
    kept = []  # so that no number of an object is used again
    for index in range(8):
        k, v = torch.randn(2, 1, FRAME, HEADS, DIM).bfloat16()
        cache.before_update(index)
        cache.update(k, v)
        cache.after_update(index)
        kept += [segment.data for segment in cache.layer.keys.segments]
        payloads.append([id(segment.data) for segment in cache.layer.keys.segments])
    for old, new in pairwise(payloads[3:]):
        assert new[:-1] == [old[0], *old[2:]]  # sink and window, but for the oldest chunk


@pytest.mark.parametrize("name", ["wan", "wan rotates on read", "cosmos", "wan 2.2"])
def test_queries_reach_the_statistics_of_their_layer_alone(name):
    host = HOSTS[name]()
    seen = []
    with skv.attach(host, config=small_config("quantwm")) as caches:
        cache = next(iter(caches), None)
        assert cache is None
        if name == "wan rotates on read":
            host.network.blocks[0].self_attn.norm_q.register_forward_hook(
                lambda _module, _args, q: seen.append(q.clone())
            )
        rollout(host, 4)
        tokens = host.latent_shape[-2]
        # Three passes a chunk; each network of Wan 2.2 sees one noisy pass and the clean one.
        passes = 2 if name == "wan 2.2" else 3
        for cache in caches:
            counts = [int(layer.stats.for_encoding(10).count.flatten()[0]) for layer in cache]
            assert counts == [4 * passes * tokens] * LAYERS
    if seen:
        heads = torch.cat(seen, 1).unflatten(-1, (HEADS, DIM)).float()
        moment = torch.einsum("bshd,bshe->bhde", heads, heads) / heads.shape[1]
        found = caches["main"][0].stats.for_encoding(10).moment
        torch.testing.assert_close(found, moment, rtol=1e-3, atol=1e-4)


def test_a_host_that_closes_every_pass_is_exact_and_packs_late():
    """The network's own hooks end the chunk after each pass, with `eager_mode` on."""
    config = small_config("qvg", window_frames=4, sink_frames=1)
    cache = BlockCache(KVCache(1, HEADS, DIM, FRAME, config)[0], FRAME, 3 * FRAME, FRAME)
    generator = torch.Generator().manual_seed(0)
    for index in range(6):
        for _ in range(3):
            k, v = torch.randn(2, 1, FRAME, HEADS, DIM, generator=generator).bfloat16()
            cache.before_update(index)
            cache.update(k, v)
            assert torch.equal(cache.cached_k()[:, -FRAME:], k)
            cache.after_update(index)
    # The first pass of all was packed before it was known; nothing after it was packed twice.
    assert cache.layer.encoded_tokens == (1 + 5) * FRAME


def test_cross_attention_stays_dense(package):
    """Trap 12: text is encoded once, into a cache of the host's own."""
    host = real.wan()
    with skv.attach(host, preset="quantwm"):
        cache = host.initialize_autoregressive_cache(
            height=8, width=8, text_embeddings=real.text_of(0, torch.bfloat16)
        )
        for block in cache.network_cache.block_caches:
            assert isinstance(block.self_attn, BlockCache)
            assert type(block.cross_attn.text) is package[0].BlockKVCache


@pytest.mark.parametrize("rotates_on_read", [False, True])
def test_compiled_networks(rotates_on_read):
    """Trap 11: what is compiled leaves our methods out, and still shows its queries."""
    host = real.wan(rotates_on_read=rotates_on_read)
    network = host.network
    wanted = rollout(host, 2)
    host.network = torch.compile(network, backend="eager")
    with skv.attach(host, preset="bf16"):
        assert_equal(rollout(host, 2), wanted)
    with skv.attach(host, config=small_config("quantwm")) as caches:
        rollout(host, 2)
        for layer in caches["main"]:
            assert int(layer.stats.for_encoding(10).count.flatten()[0]) == 2 * 3 * FRAME


def test_cuda_graphs_are_off_while_attached_and_it_is_said():
    """Trap 11: a replayed graph would not call the cache."""
    host = real.wan(cuda_graph=True)
    with (
        pytest.warns(UserWarning, match="CUDA graphs are off while attached"),
        skv.attach(host, preset="bf16") as caches,
    ):
        assert_equal(rollout(host, 6), rollout(real.wan(), 6))
    assert host._use_cuda_graph is True
    assert len(caches.notes) == 1


@pytest.mark.parametrize("size", [(40, 22 * 4), (52, 30 * 4), (60, 78 * 4)])
def test_frames_that_are_no_multiples_of_64(size):
    """Trap 3: 880, 1560 and 4680 tokens; the object alone, with one head."""
    tokens = size[0] * size[1] // 4
    assert tokens in (880, 1560, 4680)
    config = small_config("qvg", window_frames=3, sink_frames=1)
    cache = BlockCache(KVCache(1, 1, DIM, tokens, config)[0], tokens, 2 * tokens, tokens)
    generator = torch.Generator().manual_seed(0)
    for index in range(4):
        k, v = torch.randn(2, 1, tokens, 1, DIM, generator=generator).bfloat16()
        cache.before_update(index)
        cache.update(k, v)
        assert cache.cached_k().shape == (1, cache.size, 1, DIM)
        cache.after_update(index)
    assert cache.layer.encoded_tokens == 4 * tokens


def test_prewarm_rollouts_are_forgotten():
    """Trap 13: a warm-up rollout writes too; the next one gets caches of its own."""
    host = real.wan()
    with skv.attach(host, config=small_config("quantwm")) as caches:
        wanted = rollout(host, 5)
    with skv.attach(host, config=small_config("quantwm")) as caches:
        rollout(host, 2, seed=7)
        before = caches["main"]
        got = rollout(host, 5)
    assert_equal(got, wanted)
    assert [layer.held() for layer in before] == [[]] * LAYERS


def test_calls_out_of_order_are_named():
    config = small_config("bf16", window_frames=4, sink_frames=1)
    cache = BlockCache(KVCache(1, HEADS, DIM, FRAME, config)[0], FRAME, 3 * FRAME, FRAME)
    k = torch.zeros(1, FRAME, HEADS, DIM, dtype=torch.bfloat16)
    for call in (cache.cached_k, cache.cached_v, lambda: cache.update(k, k)):
        with pytest.raises(PositionError, match="expected before_update first"):
            call()
    with pytest.raises(PositionError, match=r"before_update\(1\): expected -1 or 0"):
        cache.before_update(1)
    cache.before_update(0)
    with pytest.raises(PositionError, match=r"expected after_update\(0\) first"):
        cache.before_update(0)
    with pytest.raises(ShapeError, match="a chunk of 3 tokens: expected 16"):
        cache.update(k[:, :3], k[:, :3])
    with pytest.raises(PositionError, match=r"after_update\(1\): expected 0"):
        cache.after_update(1)


def test_an_untouched_host_comes_back(package):
    host = real.wan(guided=True)
    before = state_of(host, *package)
    kept = {"0.._output_height", "0.._output_width"}  # the host's own, of its newest rollout

    def same():
        after = state_of(host, *package)
        assert_same_state(
            {k: v for k, v in before.items() if k not in kept},
            {k: v for k, v in after.items() if k not in kept},
        )

    with skv.attach(host, config=small_config("quantwm")):
        rollout(host, 2)
        assert any("initialize_cache" in vars(module) for module in attended(host))
    same()

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm")):
            rollout(host, 1)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    same()


def test_a_changed_host_is_refused_before_anything_happens(package):
    for name, message in (
        ("n_heads", r"flashdreams: got .*without 'n_heads'.*docs"),
        ("attn_op", r"without 'attn_op'"),
    ):
        host = real.wan()
        delattr(host.network.blocks[1].self_attn, name)
        before = state_of(host, *package)
        with pytest.raises(HostError, match=message), skv.attach(host):
            pass
        assert_same_state(before, state_of(host, *package))


def test_no_second_layer_is_dense_at_a_time():
    """What a rollout allocates beyond the untouched host's, without its caches."""
    window = 12
    plain, packed = (real.wan(1, window, 0) for _ in range(2))
    resident: list[int] = []

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            rollout(packed, window)
            resident.append(caches.nbytes)

    dense = peak_bytes(lambda: rollout(plain, window))
    used = peak_bytes(run_packed)
    layer = window * FRAME * HEADS * DIM * 2 * 2  # K and V of one layer's window, BF16
    chunk = FRAME * HEADS * DIM * 4
    assert used < dense - LAYERS * layer + resident[0] + layer + 6 * chunk


def test_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with skv.attach(real.wan(), preset="quantwm@group_size=16+centroids=4") as caches:
            pass
    assert not notes_of(caches)
    assert len(caches) == 0
