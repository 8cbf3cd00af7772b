"""Caches that a host rebuilds: what is the same keeps its bytes, what is not is packed once."""

from __future__ import annotations

import pytest
import torch

from steadykv.cache import KVCache
from steadykv.errors import ShapeError
from steadykv.hosts.rebuilt import RebuiltLayer, digest
from tests.hosts.checks import small_config

H, D, FRAME = 2, 32, 16


def tensors(frames, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, frames * FRAME, H, D, generator=generator).bfloat16() for _ in range(2)]


def rebuilt(method="qvg", **policy):
    return RebuiltLayer(KVCache(1, H, D, FRAME, small_config(method, **policy))[0])


def payloads(layer):
    return [segment.data for segment in layer.keys.segments]


def test_an_equal_rebuild_packs_nothing():
    side = rebuilt()
    k, v = tensors(4)
    assert side.replace(k, v) == 4 * FRAME
    before = payloads(side.layer)
    assert side.replace(k.clone(), v.clone()) == 0
    assert all(a is b for a, b in zip(before, payloads(side.layer), strict=True))
    assert side.layer.encoded_tokens == 4 * FRAME


@pytest.mark.parametrize("which", [0, 1])
def test_one_changed_number_packs_its_piece_and_what_follows(which):
    side = rebuilt()
    pair = tensors(4)
    side.replace(*pair, [FRAME] * 4)
    before = payloads(side.layer)
    pair[which][0, 2 * FRAME + 3, 1, 7] += 1
    assert side.replace(*pair, [FRAME] * 4) == 2 * FRAME
    after = payloads(side.layer)
    assert [a is b for a, b in zip(before, after, strict=True)] == [True, True, False, False]


def test_a_longer_rebuild_keeps_its_front():
    side = rebuilt()
    k, v = tensors(6)
    for frames in (1, 3, 6):
        lengths = [FRAME, 2 * FRAME, 3 * FRAME][: {1: 1, 3: 2, 6: 3}[frames]]
        side.replace(k[:, : frames * FRAME], v[:, : frames * FRAME], lengths)
    assert side.layer.encoded_tokens == 6 * FRAME
    assert side.replace(k[:, :FRAME], v[:, :FRAME]) == 0
    assert side.layer.held() == [(0, FRAME)]


def test_the_same_input_gives_the_same_bytes_after_other_ones():
    side, other = rebuilt(), rebuilt()
    k, v = tensors(2)
    side.replace(*tensors(3, seed=7))
    side.replace(k, v)
    other.replace(k, v)
    for a, b in zip(side.read(), other.read(), strict=True):
        assert torch.equal(a, b)


def test_what_was_read_and_comes_back_longer_is_not_packed_again():
    side = rebuilt(window_frames=3)
    pieces = [tensors(1, seed) for seed in range(5)]
    side.replace(*pieces[0])
    for new in pieces[1:]:
        old = side.read()
        joined = [torch.cat(pair, 1) for pair in zip(old, new, strict=True)]
        before = payloads(side.layer)
        assert side.extend(*joined) == FRAME
        assert set(map(id, payloads(side.layer)[:-1])) <= set(map(id, before))
    assert side.layer.encoded_tokens == 5 * FRAME
    assert side.layer.spans() == [(2 * FRAME, 5 * FRAME)]


def test_what_was_changed_after_reading_is_packed_again():
    side = rebuilt()
    side.replace(*tensors(2))
    k, v = side.read()
    k[0, 5, 0, 0] += 1
    new = tensors(1, 3)
    joined = [torch.cat(pair, 1) for pair in zip((k, v), new, strict=True)]
    assert side.extend(*joined) == 3 * FRAME


def test_lengths_have_to_add_up():
    with pytest.raises(ShapeError, match=r"lengths \[3, 4\] of 16 tokens"):
        rebuilt().replace(*tensors(1), [3, 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_digests_tell_order_and_bits_apart(dtype):
    x = torch.randn(1, 40, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    known = {int(digest(x))}
    assert int(digest(x.clone())) in known
    assert int(digest(x.transpose(1, 2).contiguous().transpose(1, 2))) in known
    for change in range(x.numel()):
        y = x.clone()
        y.view(-1)[change] = -y.view(-1)[change]
        known.add(int(digest(y)))
    for order in (x.flip(1), x.flip(2), x.flip(3), x.roll(1, 1), x.roll(1, 3), x[:, :39], 2 * x):
        known.add(int(digest(order)))
    assert len(known) == 1 + x.numel() + 7
    assert int(digest(x[:, :0])) == 0
