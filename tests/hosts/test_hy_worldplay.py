"""HY-WorldPlay's contract: a new list for every chunk, packed once and unpacked by its readers."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

import steadykv as skv
from steadykv.cache import KVCache
from steadykv.config import PRESETS
from steadykv.errors import ConfigError, HostError
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
from tests.hosts.hy_worldplay import (
    DIM,
    FRAME,
    HEADS,
    LAYERS,
    Transformer,
    WorldPlayPipeline,
    cameras_of,
    noise_of,
    texts_of,
)

MODULE = sys.modules[Transformer.__module__]
KINDS = [(False, 1), (True, 1), (True, 2)]  # WAN 5B; 8B without guidance and with it
FRAMES = 38  # nine chunks of four, and two frames


def run(pipeline, frames=FRAMES, seed=0):
    branches = len(pipeline._kv_caches)
    return pipeline(noise_of(frames, seed), texts_of(branches), cameras_of(frames))


def attached(host, method, **changes):
    return skv.attach(host, config=small_config(method, **changes), frame_tokens=FRAME)


@pytest.mark.parametrize(("on_batch_axis", "branches"), KINDS)
def test_bf16_is_bit_identical(on_batch_axis, branches):
    plain, host = (WorldPlayPipeline(on_batch_axis, branches) for _ in range(2))
    wanted = [run(plain, seed=seed) for seed in (1, 2)]
    with skv.attach(host, preset="bf16", frame_tokens=FRAME) as caches:
        got = [run(host, seed=seed) for seed in (1, 2)]
    assert_equal(got, wanted)
    assert list(caches.branches) == ["main", "second"][:branches]
    chosen = host.selected(36)
    assert any(b - a > 1 for a, b in pairwise(chosen))  # frames that are not contiguous


def test_the_transformer_itself_is_a_host():
    wanted = run(WorldPlayPipeline(), 12)
    host = WorldPlayPipeline()
    with skv.attach(host.transformer, preset="bf16", frame_tokens=FRAME):
        got = run(host, 12)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("method", [*QUANTIZING, "quarot", "kivi", "kvquant"])
@pytest.mark.parametrize(("on_batch_axis", "branches"), [(False, 1), (True, 2)])
def test_every_rebuild_is_packed_once(method, on_batch_axis, branches):
    host = WorldPlayPipeline(on_batch_axis, branches)
    wanted = run(WorldPlayPipeline(on_batch_axis, branches))
    with attached(host, method) as caches:
        got = run(host)
        assert_ledger_is_real(caches)
        for cache in caches:
            for number, layer in enumerate(cache):
                # Lists of 4 frames and eight of 8 (6 recent and 2 retrieved). Four frames keep
                # their place from the first to the second: the same numbers in the first layer.
                kept = 4 if number == 0 else 0
                assert layer.encoded_tokens == (4 + 8 * 8 - kept) * FRAME
                assert layer.status().packed_tokens == 8 * FRAME
                assert layer.held() == [(0, 8 * FRAME)]
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()


def test_what_the_same_list_brings_again_keeps_its_bytes():
    """Position and numbers are the same: nothing is packed. One number differs: its piece is."""
    host = WorldPlayPipeline()
    with attached(host, "qvg") as caches:
        run(host, 4)
        assert len(caches) == 0  # the first chunk has no history
        frames = list(noise_of(8).split(FRAME, 1))
        turns = cameras_of(8).repeat_interleave(FRAME)
        host.rebuild(0, texts_of()[0], frames, list(range(8)), turns)
        layers = list(caches["main"])
        before = [segment.data for segment in layers[0].keys.segments]
        assert len(before) == 2  # pieces of a chunk's four frames
        host.rebuild(0, texts_of()[0], frames, list(range(8)), turns)
        assert_packed_once(caches["main"])
        assert all(a is b.data for a, b in zip(before, layers[0].keys.segments, strict=True))
        frames[5] = frames[5] + 1
        host.rebuild(0, texts_of()[0], frames, list(range(8)), turns)
        after = [segment.data for segment in layers[0].keys.segments]
        assert [a is b for a, b in zip(before, after, strict=True)] == [True, False]
        assert list(caches["main"]) == layers
        host.rebuild(0, texts_of()[0], frames, [1, *range(1, 8)], turns)  # another selection
        assert layers[0].keys.segments[0].data is not before[0]


def test_text_keys_pass_through():
    host = WorldPlayPipeline(True)
    with attached(host, "qvg"):
        run(host, 8)
        entry = host._kv_caches[0][1]
        assert list(entry) == ["k_vision", "v_vision", "k_txt", "v_txt"]
        assert len(entry) == 4
        assert entry["k_txt"] is entry["k_txt"]
        assert entry["k_txt"].shape == (2, HEADS, 8, DIM)
        assert entry["k_vision"].shape == (2, HEADS, 4 * FRAME, DIM)
        entry["extra"] = 3
        del entry["extra"]
        for change in (
            lambda: entry.update(k_vision=None),
            lambda: entry.pop("v_vision"),
        ):
            with pytest.raises(HostError, match="changed in place: expected a new list"):
                change()


def test_readers_get_fresh_memory():
    """Trap 8."""
    host = WorldPlayPipeline()
    with attached(host, "qvg"):
        run(host, 8)
        entry = host._kv_caches[0][0]
        first = entry["k"]
        kept = first.clone()
        first.zero_()
        assert torch.equal(entry["k"], kept)


def test_a_list_without_frames_is_left_alone():
    """`k` is None at first, in a returned list as well."""
    host = WorldPlayPipeline()
    empty = [{"k": None, "v": None}, {"k": None, "v": None}]
    host.transformer.forward = lambda is_cache=False: empty
    with attached(host, "qvg") as caches:
        assert host.transformer(is_cache=True) is empty
        assert len(caches) == 0


@pytest.mark.parametrize("branches", [None, 2])
def test_lists_that_are_rebuilt_before_their_own_passes_need_to_be_counted(branches):
    plain, host = (WorldPlayPipeline(True, 2) for _ in range(2))
    plain.interleaved = host.interleaved = True
    wanted = run(plain, 16)
    options = {"frame_tokens": FRAME} | ({} if branches is None else {"branches": branches})
    with skv.attach(host, preset="bf16", **options):
        if branches is None:
            with pytest.raises(HostError, match=r"rebuilt since is read.*branches=2"):
                run(host, 16)
        else:
            assert torch.equal(run(host, 16), wanted)


@pytest.mark.parametrize(("on_batch_axis", "per_query"), [(False, 2), (True, 1)])
def test_queries_reach_the_statistics_of_their_layer_alone(on_batch_axis, per_query):
    host = WorldPlayPipeline(on_batch_axis)
    with attached(host, "quantwm") as caches:
        run(host, 12)
        for layer in caches["main"]:
            moment = layer.stats.for_encoding(0)
            # The second chunk's passes, settled by the rebuild for the third; no cross-attention,
            # no rebuild, no pass of the first chunk. A query of two halves counts for each.
            assert moment.count.flatten().tolist() == [per_query * 3 * 4 * FRAME] * len(
                moment.count.flatten()
            )
            if not on_batch_axis:
                across = moment.moment[..., :DIM, DIM:]
                assert not across.any()
                assert moment.moment[..., DIM:, DIM:].any()
    assert not notes_of(caches)


def test_each_half_is_weighed_by_its_own_queries(monkeypatch):
    host = WorldPlayPipeline()
    seen = []
    with attached(host, "quantwm") as caches:
        observed = MODULE.sageattn

        def noted(q, k, v, **options):
            seen.append((q, k.shape[2]))
            return observed(q, k, v, **options)

        with monkeypatch.context() as patch:
            patch.setattr(MODULE, "sageattn", noted)
            run(host, 12)
        last = caches["main"][LAYERS - 1].stats.for_encoding(0).moment[0]
    calls = [q for q, keys in seen if keys == 8 * FRAME and q.shape[2] == 4 * FRAME]
    assert len(calls) == 2 * LAYERS * 3  # halves, layers, passes of the second chunk
    for number in range(2):
        q = torch.cat(calls[2 + number :: 2 * LAYERS], 2)[0].float()
        part = slice(number * DIM, (number + 1) * DIM)
        wanted = q.transpose(1, 2) @ q / (2 * q.shape[1])
        torch.testing.assert_close(last[:, part, part], wanted, rtol=1e-3, atol=1e-3)


def test_a_host_without_a_known_attention_is_told_once(monkeypatch):
    def by_hand(q, k, v, tensor_layout="HND"):
        return (q @ k.transpose(2, 3) / DIM**0.5).softmax(3) @ v

    host = WorldPlayPipeline()
    with attached(host, "quantwm") as caches, monkeypatch.context() as patch:
        patch.setattr(MODULE, "sageattn", by_hand)
        with pytest.warns(UserWarning, match="no call of attention with the cached keys") as found:
            run(host, 16)
    assert len(found) == len(caches.notes) == 1


def test_halves_in_another_order_are_not_weighed_wrongly(monkeypatch):
    host = WorldPlayPipeline()
    with attached(host, "quantwm") as caches, monkeypatch.context() as patch:
        observed = MODULE.sageattn
        patch.setattr(
            MODULE, "sageattn", lambda q, k, v, **options: observed(q, k.flip(2), v.flip(2))
        )
        with pytest.warns(UserWarning, match="do not begin with the cached halves"):
            run(host, 16)
        assert len(caches.notes) == 1
        assert all(layer.stats.for_encoding(0) is None for layer in caches["main"])


def test_no_more_than_the_host_makes_is_dense():
    """The host's own new list is dense once; outside of a rebuild one layer is."""
    frames = 16
    plain, packed = (WorldPlayPipeline(recent=12, retrieved=4, steps=1) for _ in range(2))
    window = 12 * FRAME * HEADS * 2 * DIM * 2 * 2  # K and V of one layer, BF16
    resident = []

    def passes(host):
        x, turns = noise_of(4), cameras_of(4).repeat_interleave(FRAME)
        return host.transformer(x, texts_of()[0], turns, 12, host._kv_caches[0])

    run(plain, frames)
    dense = peak_bytes(lambda: passes(plain))
    whole = peak_bytes(lambda: run(plain, frames))
    with attached(packed, "rtn") as caches:
        run(packed, frames)
        used = peak_bytes(lambda: passes(packed))
        resident.append(caches.nbytes)
    assert used <= dense + window
    assert resident[0] < LAYERS * window / 3
    with attached(packed, "rtn"):
        # A plain host holds the old list while it makes the new one.
        assert peak_bytes(lambda: run(packed, frames)) < whole


def relative_errors(config, *, apart):
    """Of keys of 2 · 128 channels, the first half 20 times the second, in the second span.

    apart: whether each half's queries are observed with zeros in the other half.
    """
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(1, 1, 880, 256, generator=generator).bfloat16() for _ in range(4)]
    q = torch.randn(1, 1, 64, 256, generator=generator).bfloat16()
    queries = [q.clone(), q.clone()]
    if apart:
        queries[0][..., 128:] = queries[1][..., :128] = 0
    layer = KVCache(1, 1, 256, 880, config, layout="BHSD")[0]
    for number, (k, v) in enumerate(zip(draw[:2], draw[2:], strict=True)):
        k[..., :128] *= 20
        layer.write(k, v, 880 * number)
        for part in queries:
            layer.observe_queries(part)
        layer.commit()
    got = layer.read()[0][:, :, 880:].float()
    halves = zip(got.chunk(2, 3), draw[1].float().chunk(2, 3), strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in halves]


@pytest.mark.parametrize("method", [name for name in PRESETS if name != "kvquant_calibrated"])
def test_heads_of_two_halves_of_128(method):
    """Every preset packs 256 channels whose halves have other statistics."""
    config = skv.preset(method)
    if method == "quarot":
        config = config.replace(dim_splits=(128, 128))
    if method == "kivi_recent":
        config = config.replace(recent_keep=0)
    if method == "qvg_pro":
        config = config.replace(centroids=8)  # four stages of 256 know 880 tokens by heart
    errors = relative_errors(config, apart=True)
    if method == "bf16":
        assert errors == [0, 0]
    else:
        assert all(0.1 < error < 0.75 for error in errors)


def test_a_moment_across_the_halves_would_move_errors_into_the_other_one():
    config = skv.preset("quantwm")
    together, apart = (relative_errors(config, apart=apart)[1] for apart in (False, True))
    assert together > 1.5 * apart


def test_quarot_rotates_the_halves_alone():
    host = WorldPlayPipeline()
    with attached(host, "quarot") as caches:
        run(host, 8)
        config = caches["main"].config
    assert config.keys.dim_splits == config.values.dim_splits == (DIM, DIM)


@pytest.mark.parametrize("tokens", [880, 1560, 4680])
def test_whole_frames_of_real_resolutions(tokens):
    """Trap 3: none is a multiple of 64."""
    host = WorldPlayPipeline()
    k, v = (torch.randn(1, 1, 5 * tokens, 32).bfloat16() for _ in range(2))
    host.transformer.forward = lambda is_cache=False: [{"k": k, "v": v}]
    with skv.attach(host, config=small_config("qvg"), frame_tokens=tokens) as caches:
        entry = host.transformer(is_cache=True)[0]
        assert entry["k"].shape == k.shape
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
        assert [s.end - s.start for s in caches["main"][0].keys.segments] == [4 * tokens, tokens]


def test_an_untouched_host_comes_back():
    host = WorldPlayPipeline()
    before = state_of(host.transformer, MODULE)
    with attached(host, "quantwm"):
        run(host, 12)
    assert_same_state(before, state_of(host.transformer, MODULE))

    def run_with_an_error():
        with attached(host, "quantwm"):
            run(host, 8)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    assert_same_state(before, state_of(host.transformer, MODULE))
    assert_equal(run(host, 12), run(WorldPlayPipeline(), 12))


def test_a_changed_host_is_refused_before_anything_happens():
    host = WorldPlayPipeline()
    host.transformer.forward = lambda x, cache_mode=False: x
    before = state_of(host, host.transformer, MODULE)
    with (
        pytest.raises(HostError, match=r"HY-WorldPlay: got .*expected an argument 'is_cache'"),
        skv.attach(host, adapter="hy-worldplay"),
    ):
        pass
    with pytest.raises(HostError, match=r"got builtins.dict: expected a pipeline"):  # noqa: SIM117
        with skv.attach({}, adapter="hy-worldplay"):
            pass
    assert_same_state(before, state_of(host, host.transformer, MODULE))


def test_options_are_checked_first():
    host = WorldPlayPipeline()
    before = state_of(host, host.transformer, MODULE)
    for wrong in ({"frame_tokens": 0}, {"branches": 3}, {"branches": True}):
        with pytest.raises(ConfigError, match="expected an integer"), skv.attach(host, **wrong):
            pass
    assert_same_state(before, state_of(host, host.transformer, MODULE))


def test_other_results_and_resolutions_are_named():
    host = WorldPlayPipeline()
    with (
        skv.attach(host, preset="qvg"),
        pytest.raises(HostError, match=r"64 tokens are cached: expected whole frames of 880"),
    ):
        run(host, 8)
    host.transformer.forward = lambda is_cache=False: (1, 2)
    with (
        attached(host, "qvg"),
        pytest.raises(HostError, match=r"returned builtins.tuple: expected a list of dicts"),
    ):
        host.transformer(is_cache=True)
