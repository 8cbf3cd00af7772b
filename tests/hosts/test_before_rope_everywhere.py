"""Keys stored before RoPE, on every host that stores them after it: one list of cases."""

from __future__ import annotations

import pytest
import torch

import steadykv as skv
from steadykv.cache import LayerCache
from tests.hosts.before_rope_cases import CASES, constant, state_owners
from tests.hosts.checks import (
    assert_packed_once,
    assert_same_state,
    notes_of,
    small_config,
    state_of,
    tensors_of,
)

BEFORE = {"store_keys": "before_rope"}
by_name = pytest.mark.parametrize("name", CASES)


def error(got, wanted):
    return float((got - wanted).float().norm() / wanted.float().norm())


@by_name
def test_bf16_is_left_bit_identical(name):
    case = CASES[name]
    wanted = case.run(case.make(), 5, 1)
    host = case.make()
    with skv.attach(host, preset="bf16", **BEFORE) as caches:
        assert torch.equal(case.run(host, 5, 1), wanted)
    assert not caches.turns


@by_name
def test_turned_back_and_forth_it_is_the_same_video(name):
    """Chunks that stay dense: rounding to BF16 once more is all that may be seen.

    Window overflow, sink, rewrites; a second video in the same caches, shorter than the first.
    """
    case = CASES[name]
    wanted = [case.run(case.make(), n, seed) for n, seed in ((6, 1), (4, 2))]
    host = case.make()
    config = small_config("rtn", sink_keep=60)
    with skv.attach(host, config=config, **BEFORE) as caches:
        got = [case.run(host, n, seed) for n, seed in ((6, 1), (4, 2))]
    assert caches.ledger().parts["turns"] > 0
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 0.02
    # The test can fail: keys that are read as they are stored make another video.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadykv.hosts.before_rope.KeyTurns.turn", lambda self, keys, ranges: keys)
        host = case.make()
        with skv.attach(host, config=config, **BEFORE):
            assert error(case.run(host, 6, 1), wanted[0]) > 0.05


@by_name
def test_quantized_it_is_as_close_as_after(name):
    case, errors = CASES[name], {}
    wanted = case.run(case.make(), 6, 1)
    for place in ("after_rope", "before_rope"):
        host = case.make()
        with skv.attach(host, config=small_config("rtn", bits=4), store_keys=place) as caches:
            errors[place] = error(case.run(host, 6, 1), wanted)
        assert_packed_once(caches[case.branch])
        held = caches[case.branch][0].held()
        for turns in caches.turns.values():
            kept = [(a, b) for a, b in turns.pieces if not any(c < b and a < d for c, d in held)]
            assert len(kept) <= 1  # what left with the newest chunk leaves with the next one
    assert 0 < errors["before_rope"] < 1.5 * errors["after_rope"]


@by_name
def test_what_attention_reads_is_the_restored_keys_turned(name, monkeypatch):
    """Of constant keys every token is the same vector; the codec's own error is turned with it."""
    case = CASES[name]
    read, stored = [], []
    original = LayerCache.write

    def write(self, k, v, start, **kwargs):
        stored.append((start, k))
        return original(self, k, v, start, **kwargs)

    monkeypatch.setattr(LayerCache, "write", write)
    turn = skv.hosts.before_rope.KeyTurns.turn

    def turned(self, keys, ranges):
        before = keys.float().clone()
        read.append((before, turn(self, keys, ranges).float(), list(ranges)))
        return keys

    monkeypatch.setattr("steadykv.hosts.before_rope.KeyTurns.turn", turned)
    host = constant(case, case.make(), "k")
    with skv.attach(host, config=small_config("qvg"), **BEFORE):
        case.run(host, 6, 1)
    # What is stored does not depend on the token; every chunk of every layer.
    first = 0 if not case.is_raw else -1
    assert all(k.float().std(1).max() < 0.02 for start, k in stored if start > first)
    # Pairs keep their length, and tokens differ from one another but for the first one.
    for before, after, ranges in read:
        tokens = torch.cat([torch.arange(a, b) for a, b in ranges])
        is_turned = tokens >= (case.chunk * case.frame if case.is_raw else 1)
        assert torch.allclose(before.norm(dim=-1), after.norm(dim=-1), rtol=0.01)
        assert ((before - after).norm(dim=-1) > 0.05)[:, is_turned].all()
    assert any(len(ranges) and ranges[-1][1] > 9 * case.frame for *_, ranges in read)


@by_name
def test_queries_come_as_they_were_before(name, monkeypatch):
    case, seen = CASES[name], {}
    original = LayerCache.observe_queries
    for place in ("after_rope", "before_rope"):
        spread = seen[place] = []

        def observe(self, q, spread=spread):
            spread.append((q.shape, float(q.float().std(1).max())))
            return original(self, q)

        monkeypatch.setattr(LayerCache, "observe_queries", observe)
        host = constant(case, case.make(), "q")
        with skv.attach(host, config=small_config("quantwm"), store_keys=place) as caches:
            case.run(host, 4, 1)
        assert not [n for n in notes_of(caches) if "cannot be observed" not in n]
    assert seen["before_rope"]
    assert max(s for _, s in seen["before_rope"]) < 0.02
    if name != "fastvideo matrix-game":  # which rotates and attends within one function
        assert [a for a, _ in seen["before_rope"]] == [a for a, _ in seen["after_rope"]]
        assert max(s for _, s in seen["after_rope"]) > 0.2


@by_name
def test_nothing_is_left_behind(name):
    case = CASES[name]
    host = case.make()
    case.run(host, 2, 1)  # lists that the host keeps are made by now
    for attribute in ("kv_cache1", "kv_cache_pos", "kv_cache_neg", "kv_cache_clean"):
        if hasattr(host, attribute):
            setattr(host, attribute, None)
    before = state_of(*state_owners(case, host))
    with skv.attach(host, config=small_config("rtn"), **BEFORE) as caches:
        case.run(host, 3, 1)
        during = caches.nbytes
        assert caches.ledger().resident_bytes == during
        layers = sum(x.nbytes for c in caches for y in c for x in tensors_of(y))
        assert during == layers + sum(t.nbytes for t in caches.turns.values())
    if hasattr(host, "crossattn_cache"):
        host.crossattn_cache = before["0..crossattn_cache"]
    after = state_of(*state_owners(case, host))
    ours = {k for k in before if k.endswith((".kv_cache_manager", "causal_kv_cache"))}
    for key in ours & set(after):
        after[key] = before[key]
    assert_same_state(before, after)
    assert caches.nbytes == during  # readable behind the block
    caches.reset()
    assert not any(t.nbytes for t in caches.turns.values())
