"""Self-Forcing and Causal-Forcing: slices of a dict of tensors, rewritten at every step."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import ConfigError, HostError
from steadykv.hosts.dicts import IndexedEntry
from steadykv.hosts.registry import find
from tests.hosts import lingbot, matrix_game_2
from tests.hosts import self_forcing as fixture
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
from tests.hosts.self_forcing import (
    DIM,
    FRAME,
    HEADS,
    LAYERS,
    CausalDiffusionInferencePipeline,
    CausalInferencePipeline,
    noise_of,
    text_of,
)

MODULE = sys.modules[CausalInferencePipeline.__module__]

# (window, sink) in frames, chunk lengths in frames: with and without overflow, window and sink that
# are no multiples of the chunk, a first chunk of one frame.
SHAPES = [
    (-1, 0, [3] * 7),
    (4, 1, [1] * 12),
    (7, 2, [1, 3, 3, 3, 3, 3, 3, 3, 3]),
    (9, 3, [3] * 12),
    (6, 0, [3] * 9),
    (18, 6, [4] * 9),
]


def run_twice(pipeline, chunks):
    """Two prompts, one after the other, as the host's own script does it."""
    return [
        pipeline.inference(noise_of(sum(chunks), seed), chunks, text_of(seed)) for seed in (1, 2)
    ]


@pytest.mark.parametrize("kind", [CausalInferencePipeline, CausalDiffusionInferencePipeline])
@pytest.mark.parametrize(("window", "sink", "chunks"), SHAPES)
def test_bf16_is_bit_identical(kind, window, sink, chunks):
    wanted = run_twice(kind(window, sink), chunks)
    host = kind(window, sink)
    with skv.attach(host, preset="bf16") as caches:
        got = run_twice(host, chunks)
    assert_equal(got, wanted)
    assert list(caches.branches) == (["main"] if len(kind.LISTS) == 1 else ["positive", "negative"])


@pytest.mark.parametrize("method", QUANTIZING)
def test_every_span_is_packed_once(method):
    host = CausalInferencePipeline(9, 3)
    chunks = [3] * 10
    with skv.attach(host, config=small_config(method)) as caches:
        wanted = CausalInferencePipeline(9, 3).inference(noise_of(30), chunks, text_of())
        got = host.inference(noise_of(30), chunks, text_of())
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert not torch.equal(got, wanted)
    assert torch.isfinite(got).all()
    for layer in caches["main"]:
        assert layer.encoded_tokens == 27 * FRAME  # the newest chunk is still open
        assert layer.held() == [(0, 3 * FRAME), (24 * FRAME, 30 * FRAME)]
    caches.commit()
    assert caches.encoded_tokens == LAYERS * 30 * FRAME


def test_queries_reach_the_statistics_of_their_layer_alone():
    host = CausalInferencePipeline(9, 3)
    with skv.attach(host, config=small_config("quantwm")) as caches:
        host.inference(noise_of(9), [3] * 3, text_of())
        counts = []
        for layer in caches["main"]:
            assert layer.stats is not None
            moment = layer.stats.for_encoding(10)
            assert moment is not None
            counts.append(int(moment.count.flatten()[0]))
    # Two chunks are packed, of three passes each; cross-attention was not counted.
    assert counts == [2 * 3 * 3 * FRAME] * LAYERS


def test_an_untouched_host_comes_back():
    host = CausalInferencePipeline(9, 3)
    before = state_of(host, MODULE)
    with skv.attach(host, config=small_config("quantwm")):
        host.inference(noise_of(9), [3] * 3, text_of())
    after = state_of(host, MODULE)
    before["0..crossattn_cache"] = after["0..crossattn_cache"]  # the host's own
    assert_same_state(before, after)

    def run_with_an_error():
        with skv.attach(host, config=small_config("quantwm")):
            host.inference(noise_of(3), [3], text_of())
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run_with_an_error()
    again = state_of(host, MODULE)
    again["0..crossattn_cache"] = after["0..crossattn_cache"]
    assert_same_state(after, again)


def test_the_host_runs_as_before_after_the_block():
    host = CausalInferencePipeline(6, 0)
    wanted = run_twice(CausalInferencePipeline(6, 0), [3] * 4)
    with skv.attach(host, config=small_config("qvg")):
        host.inference(noise_of(6), [3] * 2, text_of())
    assert_equal(run_twice(host, [3] * 4), wanted)


def test_a_cache_that_was_allocated_before_is_put_back_with_a_warning():
    host = CausalInferencePipeline(6, 0)
    host.inference(noise_of(3), [3], text_of())
    before = host.kv_cache1
    with (
        pytest.warns(UserWarning, match="kv_cache1 was allocated before"),
        skv.attach(host, preset="bf16") as caches,
    ):
        assert host.kv_cache1 is None
    assert host.kv_cache1 is before
    assert len(caches.notes) == 1


def test_no_second_layer_is_dense_at_a_time():
    """What the run allocates beyond an untouched host's run, without its cache."""
    frames, chunks = 18, [3] * 6
    plain, packed = (CausalInferencePipeline(-1, 0) for _ in range(2))
    noise, text = noise_of(frames), text_of()
    window = frames * FRAME * HEADS * DIM * 2 * 2  # K and V of one layer, BF16

    def run_packed():
        with skv.attach(packed, config=small_config("rtn")) as caches:
            packed.inference(noise, chunks, text)
            resident.append(caches.nbytes)

    resident: list[int] = []
    dense = peak_bytes(lambda: plain.inference(noise, chunks, text))
    cache = LAYERS * 21 * FRAME * HEADS * DIM * 2 * 2
    used = peak_bytes(run_packed)
    # One dense window, the packed cache, one chunk's joined source and FP32 copies of it.
    chunk = 3 * FRAME * HEADS * DIM * 4
    assert used < dense - cache + resident[0] + window + 6 * chunk


def test_wider_windows():
    host = CausalInferencePipeline(-1, 0)
    wide = CausalInferencePipeline(40, 0)
    chunks = [3] * 10
    wanted = wide.inference(noise_of(30), chunks, text_of())
    with skv.attach(host, preset="bf16", window_frames=40):
        got = host.inference(noise_of(30), chunks, text_of())
    assert torch.equal(got, wanted)
    assert host.generator.model.blocks[1].self_attn.max_attention_size == 21 * FRAME
    for wrong in (0, True, 2.5):
        with (
            pytest.raises(ConfigError, match="window_frames is"),
            skv.attach(host, preset="bf16", window_frames=wrong),
        ):
            pass
    with (
        pytest.raises(ConfigError, match=r"local_attn_size is 6.*leave the option out"),
        skv.attach(CausalInferencePipeline(6, 0), preset="bf16", window_frames=40),
    ):
        pass


def test_a_changed_host_is_refused_before_anything_happens():
    host = CausalInferencePipeline(6, 0)
    del host.generator.model.blocks[0].self_attn.max_attention_size
    before = state_of(host, MODULE)
    with (
        pytest.raises(HostError, match=r"Self-Forcing: got .*without 'max_attention_size'.*docs"),
        skv.attach(host),
    ):
        pass
    assert_same_state(before, state_of(host, MODULE))


def test_a_pipeline_that_disagrees_with_its_attention_is_refused():
    host = CausalInferencePipeline(6, 0)
    host.local_attn_size = 7
    message = "got local_attn_size 7 in the pipeline and 6 in its attention"
    with pytest.raises(HostError, match=message), skv.attach(host):
        pass


def test_options_and_presets_are_checked_first():
    host = CausalInferencePipeline(6, 0)
    before = state_of(host, MODULE)
    for wrong in ({"windows": 3}, {"preset": "quantmw"}, {"adapter": "cog"}, {"config": 3}):
        with pytest.raises(ConfigError), skv.attach(host, **wrong):
            pass
    with skv.attach(host), pytest.raises(HostError, match="attached already"):  # noqa: SIM117
        with skv.attach(host):
            pass
    assert_same_state(before, state_of(host, MODULE))


def test_an_unknown_host_is_named():
    message = r"a builtins.dict, which no adapter knows.*self-forcing"
    with pytest.raises(HostError, match=message), skv.attach({}):
        pass


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (CausalInferencePipeline, "self-forcing"),
        (CausalDiffusionInferencePipeline, "self-forcing"),
        (matrix_game_2.CausalInferencePipeline, "matrix-game-2"),
        (lingbot.FastPipeline, "lingbot-world"),
        (lingbot.CausalPipeline, "lingbot-world"),
    ],
)
def test_pipelines_of_the_family_are_told_apart(kind, name):
    assert find(kind()).name == name


@pytest.mark.parametrize("method", ["bf16", *QUANTIZING])
def test_frame_wise_chunks(method):
    """Causal-Forcing's frame-wise model: one frame a chunk, no window; a span may be several."""
    wanted = CausalInferencePipeline().inference(noise_of(21), [1] * 21, text_of())
    host = CausalInferencePipeline()
    config = skv.preset("bf16") if method == "bf16" else small_config(method, span_chunks=4)
    with skv.attach(host, config=config, adapter="causal-forcing-framewise") as caches:
        got = host.inference(noise_of(21), [1] * 21, text_of())
        assert torch.equal(got, wanted) == (method == "bf16")
        for layer in caches["main"]:
            assert layer.held() == [(0, 21 * FRAME)]
            assert layer.encoded_tokens == (0 if method == "bf16" else 20 * FRAME)


def test_a_host_that_prints_and_asserts_shapes_and_indices(monkeypatch, capsys):
    """Trap 5. Both hosts print the same but for the shape, which has no end here."""
    original = fixture.SelfAttention.forward

    def forward(self, x, kv_cache, current_start):
        out = original(self, x, kv_cache, current_start)
        k, end = kv_cache["k"], current_start + x.shape[1]
        assert kv_cache["global_end_index"] == end
        assert kv_cache["local_end_index"].item() == kv_cache["global_end_index"].item()
        assert k.shape[0] == k.size(0) == len(k) == 1
        assert (k.dim(), k.ndim, *k.shape[2:]) == (4, 4, HEADS, DIM)
        assert (k.dtype, k.device) == (torch.bfloat16, x.device)
        print(f"{kv_cache['local_end_index']} {k.dtype} {k.device} {k.shape[2:]}")
        return out

    monkeypatch.setattr(fixture.SelfAttention, "forward", forward)
    printed = []
    for attached in (False, True):
        host = CausalInferencePipeline()
        if attached:
            with skv.attach(host, preset="bf16"):
                host.inference(noise_of(9), [3] * 3, text_of())
                print(host.kv_cache1[0]["k"], host.kv_cache1[0])
        else:
            host.inference(noise_of(9), [3] * 3, text_of())
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[0] == printed[1][: len(printed[0])]
    assert "SlicedTensor(key, (1, 1099511627776, 2, 32), [(0, 144)])" in printed[1][-1]


def entry_of(host):
    host._initialize_kv_cache(batch_size=1, dtype=torch.bfloat16, device="cpu")
    entry = host.kv_cache1[0]
    assert isinstance(entry, IndexedEntry)
    return entry


def test_only_an_index_of_zero_starts_over():
    """Traps 4 and 5: index tensors that are replaced with old data in place, and ints."""
    host, kv = CausalInferencePipeline(), torch.ones(1, FRAME, HEADS, DIM).bfloat16()
    with skv.attach(host, preset="bf16") as caches:
        entry, layer = entry_of(host), caches["main"][0]
        for value in (0, torch.tensor([0]), torch.tensor(0)):
            for start in (0, FRAME):
                entry["k"][:, start : start + FRAME] = kv
                entry["v"][:, start : start + FRAME] = kv
                entry["global_end_index"] = start + FRAME
                entry["local_end_index"] = torch.tensor([start + FRAME])
            assert layer.held() == [(0, 2 * FRAME)]
            entry["local_end_index"] = value
            assert layer.held() == [(0, 2 * FRAME)]
            entry["global_end_index"] = value
            assert layer.held() == []


def test_what_was_read_is_the_hosts_own():
    """Traps 7 and 8: edits of a slice, and entries that are detached and assigned again."""
    host = CausalInferencePipeline()
    with skv.attach(host, preset="bf16") as caches:
        entry = entry_of(host)
        for name in ("k", "v"):
            entry[name][:, :FRAME] = torch.ones(1, FRAME, HEADS, DIM).bfloat16()
        entry["k"][:, :FRAME].mul_(7)
        entry["k"] = entry["k"].detach()
        assert torch.equal(entry["k"][:, :FRAME], torch.ones(1, FRAME, HEADS, DIM).bfloat16())
        entry["k"].zero_()
        assert caches["main"][0].held() == []


def test_assigning_casts_as_a_tensor_does():
    host = CausalInferencePipeline()
    x = torch.randn(1, FRAME, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    with skv.attach(host, preset="bf16"):
        entry = entry_of(host)
        entry["k"][:, :FRAME] = x
        entry["v"][:, :FRAME] = x.double()
        for name in ("k", "v"):
            assert torch.equal(entry[name][:, :FRAME], x.bfloat16())


def test_the_tensor_is_no_cache_of_another_library():
    """Hosts ask `hasattr` for these, to call methods of a chunked cache in place of slices."""
    with skv.attach(CausalInferencePipeline(), preset="bf16") as caches:
        assert len(caches) == 0
    host = CausalInferencePipeline()
    with skv.attach(host, preset="bf16"):
        tensor = entry_of(host)["k"]
        for name in ("read", "write", "evict_range", "kv_cache_size", "store_quantized"):
            assert not hasattr(tensor, name)


@pytest.mark.parametrize("attended", [2, 5, 6, 7, 50])
@pytest.mark.parametrize("sink", [0, 3])
def test_a_window_that_is_not_what_is_attended_to(attended, sink):
    """A fixed max_attention_size with frames of another size: shorter or longer than the buffer."""
    hosts = [CausalInferencePipeline(6, sink) for _ in range(2)]
    for host in hosts:
        for block in host.generator.model.blocks:
            block.self_attn.max_attention_size = attended * FRAME + 5
    wanted = run_twice(hosts[0], [1] * 12)
    with skv.attach(hosts[1], preset="bf16"):
        assert_equal(run_twice(hosts[1], [1] * 12), wanted)


def test_frames_of_1560_tokens(monkeypatch):
    """Trap 3: 30 by 52, with a first chunk of one. What attention would get is compared."""
    seen = []

    def attention(q, k, v):
        seen.append((k.shape, k.float().sum(), v.float().sum()))
        return q

    monkeypatch.setattr(MODULE, "attention", attention)
    host, plain = (CausalInferencePipeline(6, 1, grid=(30, 52)) for _ in range(2))
    noise, chunks = noise_of(10, frame=1560), [1, 3, 3, 3]
    wanted = plain.inference(noise, chunks, text_of())
    before = list(seen)
    seen.clear()
    with skv.attach(host, preset="bf16"):
        assert torch.equal(host.inference(noise, chunks, text_of()), wanted)
    assert seen == before
    host.kv_cache1 = None
    with skv.attach(host, config=small_config("rtn")) as caches:
        host.inference(noise, chunks, text_of())
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
        assert caches["main"][0].encoded_tokens == 7 * 1560
