"""AnyFlow-FAR in the real diffusers package: caches that every pass over all frames writes anew."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.attention import flex_attention

from tests.hosts.packages import require

require("diffusers", "transformers")

import steadykv as skv  # noqa: E402
from steadykv.errors import ConfigError, HostError, PositionError  # noqa: E402
from tests.hosts import anyflow_far as host  # noqa: E402
from tests.hosts.checks import (  # noqa: E402
    QUANTIZING,
    assert_ledger_is_real,
    assert_same_state,
    peak_bytes,
    small_config,
    state_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CHUNKS = [1, 2, 2, 2, 1, 2, 2, 2, 1, 1]
SHORT = [1, 2, 1, 2, 1]  # three chunks are compressed in the end
MODULE = sys.modules[host.AnyFlowFARTransformer3DModel.__module__]


@pytest.fixture(autouse=True)
def _attention_runs_eagerly(monkeypatch):
    """Tracing the host's attention for every new length takes ten times as long as the test."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def _plain_attention(monkeypatch):
    """Where the host's numbers do not matter: its masks alone take most of the time on a CPU."""

    def attention(q, k, v, attn_mask, **_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # No token may see later ones in a cache pass: old chunks are the same in every pass.
        is_causal = attn_mask is not None
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal
        ).transpose(1, 2)

    monkeypatch.setattr(MODULE, "dispatch_attention_fn", attention)


plain_attention = pytest.mark.usefixtures("_plain_attention")


@pytest.fixture(scope="module")
def model():
    built = host.model_of()
    host.rollout(built, [1], host.cache_of(built, [1]))  # it keeps its rotary table from now on
    return built


def kept(sides):
    return [segment.data for side in sides for segment in side.keys.segments]


def test_bf16_is_bit_identical_with_a_doubled_batch_and_in_a_second_run(model):
    sizes = {"batch": 2, "size": (8, 8)}
    plain = host.cache_of(model, CHUNKS, **sizes)
    wanted = host.rollout(model, CHUNKS, plain, **sizes)
    again = host.rollout(model, SHORT, plain, seed=2, steps=2, **sizes)
    with skv.attach(model, preset="bf16") as caches:
        cache = host.cache_of(model, CHUNKS, **sizes)
        assert torch.equal(host.rollout(model, CHUNKS, cache, **sizes), wanted)
        assert [layer.batch for layer in caches["full"]] == [2, 2]
        # Only the count starts over; the old tokens still lie in the tensors.
        assert torch.equal(host.rollout(model, SHORT, cache, seed=2, steps=2, **sizes), again)
    assert list(caches.branches) == ["compressed", "full"]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_pipeline_gives_the_same_video(model, guidance):
    pipeline = host.pipeline_of(model)
    wanted = host.run_pipeline(pipeline, SHORT, guidance)
    with skv.attach(pipeline, preset="bf16") as caches:
        got = host.run_pipeline(pipeline, SHORT, guidance)
    assert torch.equal(got, wanted)
    assert caches["compressed"][0].held() == [(0, 3 * 4)]
    assert caches["full"][0].held() == [(0, 3 * 16)]
    assert caches["full"][0].batch == (2 if guidance > 1 else 1)


@plain_attention
@pytest.mark.parametrize("method", QUANTIZING)
def test_old_chunks_are_packed_once_and_new_ones_at_every_pass(model, method):
    wanted = host.rollout(model, SHORT, host.cache_of(model, SHORT))
    with skv.attach(model, config=small_config(method)) as caches:
        got = host.rollout(model, SHORT, host.cache_of(model, SHORT))
        assert_ledger_is_real(caches)
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()
    for old, new in zip(caches["compressed"], caches["full"], strict=True):
        # Chunks of 1 and 2 frames were compressed when the last pass stored 4 chunks.
        assert old.encoded_tokens == 3 * host.COMPRESSED
        assert old.held() == [(0, 3 * host.COMPRESSED)]
        assert len(old.keys.segments) == 2
        # Chunk 0, then the newest two: as one piece, because they move up every time.
        assert new.encoded_tokens == (1 + 3 + 3 + 3) * host.FULL
        assert len(new.keys.segments) == 1
        for layer in (old, new):
            assert layer.status().dense_tokens == 0


def test_the_host_gives_the_same_numbers_for_old_chunks_again(model):
    """What keeping their bytes rests on: measured, in BF16."""
    cache = host.cache_of(model, SHORT)
    video, text = host.normal(1, 7, 4, host.SIDE, host.SIDE, seed=3), host.normal(1, 6, 16, seed=4)
    with skv.attach(model, config=small_config("rtn")) as caches:
        before = []
        for count in range(5):
            frames = sum(SHORT[: count + 1])
            host.store(model, video[:, :frames], SHORT[: count + 1], text, cache, count)
            after = [kept([layer]) for layer in caches["compressed"]]
            for old, new in zip(before, after, strict=False):
                assert all(a is b for a, b in zip(old, new, strict=False))
            before = after
    assert [len(layer) for layer in before] == [3, 3]


def test_a_changed_front_is_packed_again(model):
    cache = host.cache_of(model, SHORT)
    text = host.normal(1, 6, 16, seed=4)
    video = host.normal(1, 6, 4, host.SIDE, host.SIDE, seed=3)
    with skv.attach(model, config=small_config("rtn")) as caches:
        host.store(model, video, SHORT[:4], text, cache, 3)
        layer = caches["compressed"][1]
        assert layer.encoded_tokens == 3 * host.COMPRESSED
        host.store(model, video, SHORT[:4], text, cache, 3)
        assert layer.encoded_tokens == 3 * host.COMPRESSED
        video[:, 1] += 1.0  # in the second chunk
        host.store(model, video, SHORT[:4], text, cache, 3)
        assert layer.encoded_tokens == 5 * host.COMPRESSED


@plain_attention
def test_whole_pieces(model):
    with skv.attach(model, config=small_config("rtn"), pieces="whole") as caches:
        host.rollout(model, SHORT, host.cache_of(model, SHORT))
    for layer in caches["compressed"]:
        assert len(layer.keys.segments) == 1
        assert layer.encoded_tokens == (1 + 3) * host.COMPRESSED
    with pytest.raises(ConfigError, match="pieces is 'one'"), skv.attach(model, pieces="one"):
        pass


@plain_attention
def test_queries_of_denoising_passes_reach_their_layer_before_rope(model):
    seen = []
    for block in model.blocks:
        hook = block.attn1.norm_q.register_forward_hook(lambda m, a, out: seen.append(out))
        seen.append(hook)
    hooks, seen[:] = list(seen), []
    chunks = SHORT[:3]
    with skv.attach(model, config=small_config("quantwm")) as caches:
        host.rollout(model, chunks, host.cache_of(model, chunks), steps=2)
    for hook in hooks:
        hook.remove()
    for number in range(host.LAYERS):
        # Two passes of three chunks, and a cache pass after two of them.
        own = seen[number :: host.LAYERS]
        denoising = [q for at, q in enumerate(own) if at not in (2, 5)]
        assert [q.shape[1] for q in denoising] == [n * host.FULL for n in (1, 1, 2, 2, 1, 1)]
        q = torch.cat(denoising[:4], 1).unflatten(2, (host.HEADS, -1))[0].float()
        wanted = torch.einsum("shd,she->hde", q, q) / q.shape[0]
        stats = caches["full"][number].stats
        assert stats is not None
        moment = stats.for_encoding(9)  # the last chunk's queries wait for a pass that stores it
        assert moment is not None
        assert moment.count.flatten().tolist() == [6 * host.FULL] * host.HEADS
        torch.testing.assert_close(moment.moment[0], wanted, rtol=1e-3, atol=1e-4)


@plain_attention
def test_a_second_video_in_the_same_dictionaries_starts_over(model):
    chunks = SHORT[:3]
    cache, videos = host.cache_of(model, chunks), []
    with skv.attach(model, config=small_config("quantwm")) as caches:
        for _ in range(2):
            videos.append(host.rollout(model, chunks, cache))
            stats = caches["full"][0].stats
            assert stats is not None
            moment = stats.for_encoding(9)
            assert moment is not None
            assert moment.count.flatten().tolist() == [3 * host.FULL] * host.HEADS
    assert torch.equal(*videos)


@plain_attention
def test_an_untouched_host_comes_back(model):
    before = state_of(model, MODULE)
    with skv.attach(model, config=small_config("quantwm")):
        host.rollout(model, [1, 1], host.cache_of(model, [1, 1]))
        assert len(model._forward_pre_hooks) == 1
    assert_same_state(before, state_of(model, MODULE))

    def fail():
        with skv.attach(model, config=small_config("quantwm")):
            cache = host.cache_of(model, [1, 1])
            cache[1]["full_cache"] = None
            host.rollout(model, [1, 1], cache)

    with pytest.raises(AttributeError):
        fail()
    assert_same_state(before, state_of(model, MODULE))


@plain_attention
def test_the_tensors_of_the_caller_are_left_alone_and_its_entries_stay_readable(model):
    cache = host.cache_of(model, SHORT)
    tensors = [entry[name] for entry in cache.values() for name in entry]
    with skv.attach(model, config=small_config("rtn")) as caches:
        wanted = host.rollout(model, SHORT, cache)
    assert all(not tensor.any() for tensor in tensors)
    entry = cache[1]["full_cache"]
    assert entry.shape == tensors[0].shape
    assert torch.equal(entry[0, :, :, :7, :], caches["full"][1].read()[0][:, :, :7])
    with pytest.raises(HostError, match="kv_cache of an earlier video or block"):  # noqa: SIM117
        with skv.attach(model, config=small_config("rtn")):
            host.rollout(model, SHORT, cache)
    with skv.attach(model, config=small_config("rtn")):
        assert torch.equal(host.rollout(model, SHORT, host.cache_of(model, SHORT)), wanted)
        with pytest.raises(HostError, match="kv_cache of an earlier video"):
            host.rollout(model, SHORT, cache)


def test_a_cache_that_is_filled_already_is_taken_over(model):
    text, video = host.normal(1, 6, 16, seed=4), host.normal(1, 6, 4, 16, 16, seed=3)
    cache = host.cache_of(model, SHORT)
    host.store(model, video, SHORT[:4], text, cache, 3)

    def denoise(kv_cache):
        t = torch.full((1, 1), 500.0)
        return model(
            hidden_states=video[:, :1], timestep=t, r_timestep=t, encoder_hidden_states=text,
            chunk_partition=SHORT, kv_cache=kv_cache, return_dict=False,
            kv_cache_flag={"num_cached_chunks": 4, "is_cache_step": False},
        )[0]  # fmt: skip

    wanted = denoise(cache)
    with skv.attach(model, preset="bf16"):
        assert torch.equal(denoise(cache), wanted)


@plain_attention
def test_other_indices_and_half_pairs_are_refused(model):
    with skv.attach(model, preset="bf16"):
        cache = host.cache_of(model, SHORT)
        host.rollout(model, SHORT, cache)
        pair = cache[0]["full_cache"]
        every = slice(None)
        for key in (0, (2, every, every, every, every), (0, every, every, slice(3, 5), every)):
            with pytest.raises(HostError, match=r"expected \[0 or 1, :, :, :n, :\]"):
                pair[key]
        assert pair[1, :, :, :0, :].shape == (1, host.HEADS, 0, host.DIM)
        chunk = torch.ones(1, host.HEADS, 4, host.DIM, dtype=torch.bfloat16)
        for which, end in ((1, 4), (0, 5)):
            with pytest.raises(PositionError, match="expected keys and then values"):
                pair[which, :, :, :end, :] = chunk


@plain_attention
def test_no_second_layer_is_dense_at_a_time():
    """What a block of the transformer leaves behind in the tensors of all layers is packed."""
    model, chunks = host.model_of(layers=6), [2, 2, 2, 2]
    frames = 2 * 2 * host.FULL + 2 * host.COMPRESSED
    layer = frames * host.HEADS * host.DIM * 2 * 2  # what it attends to, K and V in BF16
    text, video = host.normal(1, 6, 16, seed=4), host.normal(1, 8, 4, 16, 16, seed=3)
    used, resident = {}, []
    plain, packed = host.cache_of(model, chunks), host.cache_of(model, chunks)

    def passes(kv_cache):
        for count in range(4):
            host.store(model, video[:, : 2 * count + 2], chunks[: count + 1], text, kv_cache, count)

    used["plain"] = peak_bytes(lambda: passes(plain))
    with skv.attach(model, config=small_config("rtn")) as caches:
        used["packed"] = peak_bytes(lambda: passes(packed))
        resident.append(caches.nbytes)
    # Beside the packed cache, FP32 copies of one tensor of one layer and what it is packed into.
    assert resident[0] < 6 * layer / 3
    assert used["packed"] < used["plain"] + resident[0] + 3 * layer


@plain_attention
@pytest.mark.parametrize("preset", ["bf16", "rtn"])
def test_frames_of_1560_tokens(preset):
    model, size = host.model_of(layers=1, heads=1), (60, 104)
    chunks = [1, 1]
    wanted = host.rollout(model, chunks, host.cache_of(model, chunks, size=size), size=size)
    with skv.attach(model, preset=preset) as caches:
        got = host.rollout(model, chunks, host.cache_of(model, chunks, size=size), size=size)
    assert torch.equal(got, wanted) == (preset == "bf16")
    assert caches["full"][0].geometry.frame_tokens == 1560
    assert caches["compressed"][0].geometry.frame_tokens == 390
    assert caches["full"][0].held() == [(0, 1560)]


def test_a_changed_host_is_refused_before_anything_happens():
    model = host.model_of(layers=1)
    del model.blocks[0].attn1.norm_q
    before = state_of(model, MODULE)
    with (
        pytest.raises(HostError, match=r"AnyFlow-FAR: got .*attn1 without 'norm_q'.*docs/hosts"),
        skv.attach(model),
    ):
        pass
    assert_same_state(before, state_of(model, MODULE))
    model.forward = lambda hidden_states, cache: None
    with pytest.raises(HostError, match="expected an argument 'chunk_partition' and"):  # noqa: SIM117
        with skv.attach(model):
            pass


@plain_attention
def test_training_calls_pass_through(model):
    """Without a kv_cache nothing is built."""
    x, t = host.normal(1, 3, 4, 16, 16, seed=3), torch.full((1, 3), 500.0)
    with skv.attach(model, config=small_config("quantwm")) as caches:
        model(x, t, t, host.normal(1, 6, 16, seed=4), [1, 2], return_dict=False)
    assert len(caches) == 0
