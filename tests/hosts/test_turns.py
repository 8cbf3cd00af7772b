"""A host's rotary embedding, found out by what it does to unit vectors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from steadykv.cache import LayerCache
from steadykv.errors import HostError
from steadykv.hosts.adapter import Session
from steadykv.hosts.before_rope import KeyTurns
from steadykv.hosts.seen_rotation import SeenRotation
from tests.hosts.checks import small_config

HEADS, DIM, TOKENS = 2, 16, 8


def angles_of(start, tokens=TOKENS, per_head=False):
    positions = torch.arange(start, start + tokens)[:, None, None]
    speeds = 30.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
    return positions * (speeds * torch.arange(1, 1 + HEADS)[:, None] if per_head else speeds)


def formula(x, start, neighbours, scale=1.0, per_head=False):
    """x [B, S, H, D] turned in FP64 and multiplied by `scale`."""
    angles = angles_of(start, x.shape[1], per_head)
    y = x.double() * scale
    a, b = (y[..., ::2], y[..., 1::2]) if neighbours else y.chunk(2, -1)
    turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    if neighbours:
        return torch.stack(turned, -1).flatten(-2)
    return torch.cat(turned, -1)


class Host:
    """Functions of several forms that do the same."""

    def __init__(self, neighbours, scale=1.0):
        self.neighbours, self.scale = neighbours, scale

    def turned(self, x, start):
        return formula(x, start, self.neighbours, self.scale)

    def returns(self, x, start):
        return self.turned(x, start).type_as(x)

    def in_place(self, x, *, start):
        x.copy_(self.turned(x, start))

    def pair(self, q, k, start):
        return self.returns(q, start), self.returns(k, start)

    def pair_in_place_of_bf16(self, q, k, start):
        assert q.dtype == k.dtype == torch.bfloat16
        for x in (q, k):
            x.copy_(self.turned(x, start))
        return q, k

    def of_bf16(self, x, start):
        assert x.dtype == torch.bfloat16
        return self.returns(x, start)

    def without_batch(self, x, start):
        return self.returns(x[None], start)[0]

    def joined_heads(self, x, start):
        y = formula(x.unflatten(2, (HEADS, -1)), start, self.neighbours, self.scale, True)
        return y.flatten(2).type_as(x)


def session_of():
    adapter = SimpleNamespace(title="a host", name="a", options={})
    return Session(adapter, small_config("rtn", bits=4, group_size=8), {})


def call(host, form, q, k, start):
    """q and k [B, S, H, D] before; what the host goes on with."""
    if form == "returns":
        return host.returns(q, start), host.returns(k, start)
    if form == "in_place":
        q, k = q.clone(), k.clone()
        host.in_place(q, start=start)
        host.in_place(k, start=start)
        return q, k
    if form == "pair":
        return host.pair(q, k, start)
    if form == "pair_in_place_of_bf16":
        return host.pair_in_place_of_bf16(q.clone(), k.clone(), start)
    if form == "without_batch":
        return host.without_batch(q[0], start)[None], host.without_batch(k[0], start)[None]
    return tuple(host.joined_heads(x.flatten(2), start).unflatten(2, (HEADS, -1)) for x in (q, k))


FORMS = {
    "returns": 1,
    "in_place": 1,
    "pair": 2,
    "pair_in_place_of_bf16": 2,
    "of_bf16": 1,
    "without_batch": 1,
    "joined_heads": 1,
}


def seen_of(session, host, form, **kwargs):
    seen = SeenRotation(session, heads=HEADS if form == "joined_heads" else None, **kwargs)
    seen.watch(host, form, FORMS[form])
    return seen


def chunk(seed, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, TOKENS, HEADS, DIM, generator=generator).bfloat16()


@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "of_bf16"])
def test_every_form_is_turned_back_and_forth(form, neighbours, scale):
    session, host = session_of(), Host(neighbours, scale)
    turns = KeyTurns.of(session, "main", seen_of(session, host, form), 3)
    layer = LayerCache(HEADS, DIM, 4, session.config, layer=0)
    for start in (0, TOKENS, TOKENS, 2 * TOKENS):  # the second chunk is written again
        q, k = chunk(start)
        turned_q, turned_k = call(host, form, q, k, start)
        exact = formula(k, start, neighbours, scale, form == "joined_heads")
        stored = turns.stored(layer, turned_k, start)
        assert torch.allclose(stored.float(), k.float(), rtol=0.02, atol=0.02)
        assert torch.allclose(turns.before(turned_q).float(), q.float(), rtol=0.02, atol=0.02)
        layer.write(stored, k, start)
        # Parts of chunks, in an order of their own.
        cut = k[:, 3:7]
        again = turns.turn(cut.float(), [(start + 3, start + 7)])
        rounded = 0.01 if form == "pair_in_place_of_bf16" else 1e-5
        assert torch.allclose(again, exact[:, 3:7].float(), rtol=rounded, atol=4 * rounded)
        if form in ("returns", "pair"):
            assert torch.equal(stored, k)  # what the function was given, no rounding at all
    assert turns.pieces == [(0, 8), (8, 16), (16, 24)]
    assert turns.nbytes == 3 * TOKENS * DIM * 4 * (HEADS if form == "joined_heads" else 1)
    assert session.caches.meter.resident == turns.nbytes
    # Two ranges in one tensor, as of a sink and a window.
    x = chunk(5)[0].float()
    per_head = form == "joined_heads"
    wanted = [
        formula(torch.cat([x.new_zeros(1, first, HEADS, DIM), part], 1), 0, neighbours, scale,
                per_head)[:, first:]
        for first, part in ((20, x[:, :3]), (1, x[:, 3:]))
    ]  # fmt: skip
    got = turns.turn(x.clone(), [(20, 23), (1, 6)])
    assert torch.allclose(got, torch.cat(wanted, 1).float(), rtol=rounded, atol=4 * rounded)
    session.patches.undo()
    assert "returns" not in vars(host)


def test_turns_that_are_known_to_bf16_alone_are_not_mixed_with_exact_keys():
    """Back and forth by the same factors cancels their rounding; the source would not."""
    session, host = session_of(), Host(True)
    turns = KeyTurns.of(session, "main", seen_of(session, host, "of_bf16"), 8)
    layer = LayerCache(HEADS, DIM, TOKENS, session.config, layer=0)
    q, k = chunk(0)
    turned_q, turned_k = host.of_bf16(q, 40), host.of_bf16(k, 40)
    found = turns.stored(layer, turned_k, 0)
    assert not torch.equal(found, k)
    assert not torch.equal(turns.before(turned_q), q)
    assert torch.allclose(found.float(), k.float(), rtol=0.02, atol=0.02)


def test_turns_of_tokens_that_left_are_dropped():
    session, host = session_of(), Host(True)
    turns = KeyTurns.of(session, "main", seen_of(session, host, "returns"), 8)
    config = session.config.replace(window_frames=4, sink_frames=1)
    layer = LayerCache(HEADS, DIM, TOKENS, config, layer=0)
    for start in range(0, 12 * TOKENS, TOKENS):
        _, k = chunk(start)
        layer.write(turns.stored(layer, host.returns(k, start), start), k, start)
    assert turns.pieces == [(0, 8), *((s, s + 8) for s in range(64, 96, 8))]
    turns.stored(layer, host.returns(k, 0), 0)  # a new video
    assert turns.pieces == [(0, 8)]


def test_the_first_layer_of_a_pass_asks_anew():
    """A second video in the same caches may have other positions, as with another grid."""
    session, host = session_of(), Host(True)
    turns = KeyTurns.of(session, "main", seen_of(session, host, "returns"), 8)
    layers = [LayerCache(HEADS, DIM, TOKENS, session.config, layer=i) for i in range(2)]
    _, k = chunk(0)
    for position in (0, 100):
        for layer in layers:
            assert torch.equal(turns.stored(layer, host.returns(k, position), 0), k)
            got = turns.turn(k.float(), [(0, TOKENS)])
            assert torch.allclose(got, formula(k, position, True).float(), atol=1e-4)


def test_tokens_that_the_host_keeps_unrotated_stay_so():
    session, host = session_of(), Host(True)
    turns = KeyTurns.of(session, "main", seen_of(session, host, "returns"), 8, raw=TOKENS)
    layer = LayerCache(HEADS, DIM, TOKENS, session.config, layer=0)
    q, k = chunk(0)
    turned_q = host.returns(q, 0)
    host.returns(k, 0)
    assert turns.stored(layer, k, 0) is k
    assert torch.equal(turns.before(turned_q), q)
    layer.write(k, k, 0)
    turns.stored(layer, host.returns(k, TOKENS), TOKENS)
    both = turns.turn(torch.cat([k, k], 1).float(), [(0, 2 * TOKENS)])
    assert torch.equal(both[:, :TOKENS], k.float())
    assert torch.allclose(both[:, TOKENS:], formula(k, TOKENS, True).float(), atol=1e-5)


def stored(host, keys, form="returns"):
    session = session_of()
    turns = KeyTurns.of(session, "main", seen_of(session, host, form), 8)
    layer = LayerCache(HEADS, DIM, TOKENS, session.config, layer=0)
    return turns.stored(layer, keys(host), 0)


class Bent(Host):
    def turned(self, x, start):
        return super().turned(x, start) + 0.5


class ByHead(Host):
    def turned(self, x, start):
        return formula(x, start + 1, True, per_head=x.shape[2] == HEADS)


K = chunk(0)[1]


@pytest.mark.parametrize(
    ("host", "keys", "message"),
    [
        (Host(True), lambda host: K, "before the host's rotary embedding was called"),
        (Bent(True), lambda host: host.returns(K, 0), r"off by 0\.\d+ from turns of neighbouring"),
        (ByHead(True), lambda host: host.returns(K, 0), r"off by \d\.\d+ from turns"),
        (Host(True), lambda host: host.returns(K, 0) * 2, "not what the host's rotary embedding"),
        (Host(True), lambda host: (host.returns(K, 0), K)[1], "not what the host's rotary"),
        (Host(True), lambda host: host.returns(K[:, :4], 0).repeat(1, 2, 1, 1), "8 tokens are"),
    ],
)
def test_what_is_no_such_turn_is_refused(host, keys, message):
    with pytest.raises(HostError, match=message) as caught:
        stored(host, keys)
    assert "leave store_keys out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_tokens_of_a_call_are_enough():
    """As of hosts that cut padding off, or that store the first block of a query."""
    found = stored(Host(False), lambda host: host.returns(K, 0)[:, :5])
    assert torch.allclose(found.float(), K[:, :5].float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("neighbours", [True, False])
def test_keys_in_fp32_come_back_to_rounding(neighbours):
    keys = K.float().requires_grad_()
    found = stored(Host(neighbours), lambda host: host.returns(keys, 0).clone())
    assert torch.allclose(found, keys, atol=1e-6)


def test_queries_of_another_pass_are_refused():
    session, host = session_of(), Host(True)
    turns = KeyTurns.of(session, "main", seen_of(session, host, "returns"), 8)
    with pytest.raises(HostError, match="queries of 8 tokens"):
        turns.before(K)
