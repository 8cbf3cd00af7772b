"""What a host can get wrong: positions, shapes, dtypes, layouts, numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from steadykv.cache import KVCache
from steadykv.config import CodecConfig
from steadykv.errors import ConfigError, NonFiniteError, PositionError, ShapeError
from tests.cache_cases import DIM, FRAME, HEADS, cache_for, chunks_of, small
from tests.codecs import PACKED_METHODS


def kv(tokens: int, batch: int = 1, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.full((batch, tokens, HEADS, DIM), value, dtype=torch.bfloat16)
    return k, 2 * k


# --- positions ------------------------------------------------------------------------------------


def test_positions_that_skip_or_go_back_are_refused():
    cache = cache_for(small("qvg"))[0]
    with pytest.raises(PositionError, match=r"token 8: expected 0 \(the next chunk\)"):
        cache.write(*kv(24), 8)
    cache.write(*kv(24), 0)
    cache.write(*kv(24), 24)
    for start in (0, 8, 25, 47, 49, 72, -24):
        with pytest.raises(PositionError, match=rf"token {start}: expected 24 .* or 48 "):
            cache.write(*kv(24), start)
    cache.commit()
    # Committed is committed.
    with pytest.raises(PositionError, match=r"token 24: expected 48"):
        cache.write(*kv(24), 24)
    cache.write(*kv(24), 48)
    assert cache.spans() == [(0, 72)]


@pytest.mark.parametrize("start", [torch.tensor(0), 0.0, "0", None, True])
def test_positions_are_host_integers(start):
    with pytest.raises(PositionError, match="expected an int"):
        cache_for(small())[0].write(*kv(24), start)


@pytest.mark.parametrize("token", [torch.tensor(24), 24.0, "24", None, True])
@pytest.mark.parametrize("call", ["evict", "truncate"])
def test_tokens_to_forget_are_named_by_integers(call, token):
    layer = cache_for(small())[0]
    layer.write(*kv(24), 0)
    layer.write(*kv(24), 24)
    with pytest.raises(PositionError, match=r"layer 0: \S.* expected an int"):
        getattr(layer, call)(token)
    assert layer.held() == [(0, 48)]


def test_a_refused_write_changes_nothing():
    cache = cache_for(small("qvg"), debug=True)[0]
    cache.write(*kv(24), 0)
    before = [x.clone() for x in cache.read()]
    status = cache.status()
    bad = kv(24, value=float("inf"))
    for call in (
        lambda: cache.write(*kv(24), 23),
        lambda: cache.write(*kv(24, batch=2), 24),
        lambda: cache.write(kv(24)[0], kv(23)[1], 24),
        lambda: cache.write(*bad, 24),
        lambda: cache.write(*bad, 0),
    ):
        with pytest.raises((PositionError, ShapeError, NonFiniteError)):
            call()
        assert cache.status() == status
        assert all(map(torch.equal, cache.read(), before))


@pytest.mark.parametrize("begun", [0, 1])  # chunks that are there when it happens
@pytest.mark.parametrize("rewrite", [False, True])
def test_a_write_that_breaks_off_between_keys_and_values_leaves_no_half_chunk(
    monkeypatch, begun, rewrite
):
    layer, whole = (cache_for(small("quantwm", span_chunks=1))[0] for _ in range(2))
    chunks = [one.passes[-1][:2] for one in chunks_of([24] * 3)]
    for one in (layer, whole):
        for number in range(begun):
            one.write(*chunks[number], 24 * number)
        if rewrite:
            one.write(*chunks[begun], 24 * begun)
    fill = type(layer)._fill

    def break_off(self, store, *given):
        if store is self.values:
            raise torch.OutOfMemoryError("no memory")
        fill(self, store, *given)

    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "_fill", break_off)
        with pytest.raises(torch.OutOfMemoryError):
            layer.write(*chunks[2], 24 * begun)
    layer.commit()
    assert layer.held() == ([(0, 24 * begun)] if begun else [])
    assert layer.read()[0].shape[1] == layer.read()[1].shape[1] == 24 * begun
    for one in (layer, whole):
        one.write(*chunks[begun], 24 * begun)
        one.commit()
    assert all(torch.equal(a, b) for a, b in zip(layer.read(), whole.read(), strict=True))
    assert layer.nbytes == whole.nbytes


def test_commit_is_idempotent_and_the_next_write_is_one():
    chunks = chunks_of([24] * 4)
    with_commit, without = (cache_for(small("qvg4", span_chunks=2))[0] for _ in range(2))
    with_commit.commit()
    for chunk in chunks:
        k, v, _ = chunk.passes[0]
        for cache in (with_commit, without):
            cache.write(k, v, chunk.start)
        with_commit.commit()
        with_commit.commit()
    without.commit()
    assert with_commit.status() == without.status()
    assert all(map(torch.equal, with_commit.read(), without.read()))


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((24, HEADS, DIM), ""),
        ((1, 24, HEADS, DIM + 1), ""),
        ((1, 24, HEADS + 1, DIM), ""),
        ((1, HEADS, 24, DIM), "layout='BHSD'"),
        ((1, 0, HEADS, DIM), ""),
        ((0, 24, HEADS, DIM), ""),
    ],
)
def test_wrong_shapes_are_refused(shape, hint):
    cache = cache_for(small())[0]
    bad = torch.zeros(shape, dtype=torch.bfloat16)
    pattern = rf"k is \({', '.join(map(str, shape))}\): expected \(B, S>0, {HEADS}, {DIM}\) in"
    with pytest.raises(ShapeError, match=pattern) as error:
        cache.write(bad, bad, 0)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_wrong_dtypes_devices_and_kinds_are_refused():
    cache = cache_for(small())[0]
    k, v = kv(24)
    with pytest.raises(ShapeError, match=r"v is torch.float32: expected torch.bfloat16; cast it"):
        cache.write(k, v.float(), 0)
    with pytest.raises(ShapeError, match=r"k is on meta: expected cpu"):
        cache.write(k.to("meta"), v, 0)
    with pytest.raises(ShapeError, match=r"k is a list: expected a torch.Tensor"):
        cache.write([1.0], v, 0)
    with pytest.raises(ShapeError, match="expected equal shapes"):
        cache.write(k, v[:, 1:], 0)
    cache.write(k, v, 0)
    with pytest.raises(ShapeError, match=r"reset\(\)"):
        cache.write(*kv(24, batch=2), 24)
    cache.reset()
    cache.write(*kv(24, batch=2), 0)
    assert cache.batch == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", 1.5),
        ("num_heads", 0),
        ("head_dim", -1),
        ("frame_tokens", 0),
        ("frame_tokens", True),
        ("layout", "HSBD"),
        ("dtype", torch.int8),
    ],
)
def test_a_cache_that_means_nothing_is_refused(field, value):
    options = {"num_layers": 2, "num_heads": HEADS, "head_dim": DIM, "frame_tokens": FRAME}
    with pytest.raises(ConfigError, match=r"heads|" + field):
        KVCache(**(options | {"config": small(), field: value}))


@pytest.mark.parametrize("config", ["qvg", CodecConfig("qvg"), None, {}], ids=str)
def test_the_configuration_of_a_cache_is_a_cache_config(config):
    for make in (lambda: KVCache(1, HEADS, DIM, FRAME, config), lambda: cache_for(config)[0]):
        with pytest.raises(ConfigError, match=r"config is .*: expected a CacheConfig; preset") as e:
            make()
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", 1.5, "", None])
def test_a_device_that_is_not_there_is_refused(device):
    if device is None:
        if torch.cuda.is_available():
            pytest.skip("CUDA is there")
        device = "cuda"
    with pytest.raises(ConfigError, match=r"device is .*: expected one that this torch") as error:
        cache_for(small(), device=device)
    assert "\n" not in str(error.value)


def test_out_is_a_pair():
    layer = cache_for(small())[0]
    layer.write(*kv(24), 0)
    k, v = layer.read()
    for bad in ((k,), (k, v, k), k, torch.stack([k, v]), (), "kv"):
        with pytest.raises(ShapeError, match=r"out is a .*: expected a pair of tensors") as error:
            layer.read(out=bad)
        assert "\n" not in str(error.value)
    with pytest.raises(ShapeError, match=r"out\[1\] is a NoneType"):
        layer.read(out=(k, None))
    assert torch.equal(layer.read(out=[k, v])[0], k)


# --- NaN and Inf ----------------------------------------------------------------------------------


def poison(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    flat = x.view(-1)
    flat[1], flat[5], flat[9] = float("nan"), float("inf"), float("-inf")
    flat[13], flat[17] = -0.0, torch.finfo(x.dtype).max
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_non_finite_numbers_become_zero_and_are_counted(dtype):
    cache = cache_for(small(), dtype=dtype)
    k = poison(torch.ones(1, 24, HEADS, DIM, dtype=dtype))
    v = torch.ones_like(k)
    cache[0].write(k, v, 0)
    read_k, read_v = cache[0].read()
    assert read_k.view(-1)[[1, 5, 9]].tolist() == [0, 0, 0]
    assert torch.equal(read_k, k.nan_to_num(0.0, 0.0, 0.0))
    assert read_k.view(-1)[17] == torch.finfo(dtype).max
    assert torch.equal(read_v, v)
    count = cache[0].nonfinite_count
    assert count.dtype == torch.int64
    assert int(count) == 3
    cache[0].write(v, k, 0)
    assert int(cache.nonfinite_count) == 6
    cache.reset()
    assert int(cache.nonfinite_count) == 0


@pytest.mark.parametrize("method", PACKED_METHODS)
def test_packed_spans_stay_finite(method):
    cache = cache_for(small(method))
    chunks = chunks_of([24, 24, 24])
    for chunk in chunks:
        k, v, q = (poison(x) for x in chunk.passes[0])
        cache[0].write(k, v, chunk.start)
        cache[0].observe_queries(q)
    cache.commit()
    assert all(bool(x.isfinite().all()) for x in cache[0].read())
    queries = 3 if cache.config.needs_queries else 0
    assert int(cache.nonfinite_count) == 3 * (6 + queries)


def test_debug_mode_raises_instead():
    cache = cache_for(small("quantwm:qvg4"), debug=True)[0]
    k, v = kv(24)
    with pytest.raises(NonFiniteError, match=r"layer 0: v .* has 3 NaN or Inf"):
        cache.write(k, poison(v), 0)
    cache.write(k, v, 0)
    with pytest.raises(NonFiniteError, match="q "):
        cache.observe_queries(poison(k))
    assert int(cache.nonfinite_count) == 0
