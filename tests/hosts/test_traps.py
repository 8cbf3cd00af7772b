"""Traps of hosts that no other test is named after; docs/hosts/README.md lists the test of each."""

from __future__ import annotations

import re

import pytest
import torch

import steadykv as skv
from steadykv.hosts.dicts import IndexedEntry
from tests.hosts import longcat
from tests.hosts.checks import assert_packed_once, small_config
from tests.hosts.self_forcing import (
    DIM,
    FRAME,
    HEADS,
    CausalInferencePipeline,
    noise_of,
    text_of,
)
from tests.test_layout import ROOT

CHUNKS = [3] * 6


def wanted_shape(host, batch):
    return [batch, host.local_attn_size * host.frame_seq_length, HEADS, DIM]


class ChecksInInitializer(CausalInferencePipeline):
    """As scope does: tensors of the right shape are zeroed and used again, others allocated."""

    dense = 0  # lists that it allocated

    def _initialize_kv_cache(self, batch_size, dtype, device):
        held = self.kv_cache1
        if held is not None and list(held[0]["k"].shape) == wanted_shape(self, batch_size):
            for entry in held:
                entry["k"].zero_()
                entry["v"].zero_()
            return
        self.dense += 1
        super()._initialize_kv_cache(batch_size, dtype, device)

    def inference(self, noise, chunks, text):
        self._initialize_kv_cache(len(noise), noise.dtype, noise.device)
        self._initialize_crossattn_cache(len(noise), noise.dtype, noise.device)
        return super().inference(noise, chunks, text)


class ChecksInInference(CausalInferencePipeline):
    """The same question before the initializer is called."""

    dense = 0

    def _initialize_kv_cache(self, batch_size, dtype, device):
        self.dense += 1
        super()._initialize_kv_cache(batch_size, dtype, device)

    def inference(self, noise, chunks, text):
        held = self.kv_cache1
        if held is not None and list(held[0]["k"].shape) != wanted_shape(self, len(noise)):
            self.kv_cache1 = None
        return super().inference(noise, chunks, text)


@pytest.mark.parametrize("kind", [ChecksInInitializer, ChecksInInference])
def test_a_host_that_asks_for_its_own_shape_gets_no_dense_tensors(kind):
    """Trap 6: ours has another shape, so it would allocate; its initializer is ours meanwhile."""

    def run_twice(host):
        return [host.inference(noise_of(18, n), CHUNKS, text_of(n)) for n in (1, 2)]

    plain, host = kind(6, 3), kind(6, 3)
    wanted = run_twice(plain)
    assert plain.dense == 1
    with skv.attach(host, preset="bf16"):
        got = run_twice(host)
        assert all(isinstance(entry, IndexedEntry) for entry in host.kv_cache1)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    with skv.attach(host, config=small_config("qvg")) as caches:
        run_twice(host)
        assert_packed_once(caches["main"])
    assert host.dense == 0
    assert torch.equal(run_twice(host)[1], wanted[1])
    assert host.dense == 1


def stored_by_self_forcing(method, k, v):
    """Keys [1, S, H, D] and values, as the host reads them once they are packed."""
    host, end = CausalInferencePipeline(), k.shape[1]
    with skv.attach(host, config=small_config(method)) as caches:
        host._initialize_kv_cache(1, torch.bfloat16, "cpu")
        entry = host.kv_cache1[0]
        entry["k"][:, :end], entry["v"][:, :end] = k, v
        caches["main"][0].commit()
        assert caches["main"][0].status().packed_tokens == end
        return entry["k"][:, :end]


def stored_by_longcat(method, k, v):
    host = longcat.LongCatVideoPipeline()
    pair = tuple(x.transpose(1, 2).contiguous() for x in (k, v))
    with skv.attach(host, config=small_config(method)):
        host._update_kv_cache_dict(dict.fromkeys(range(longcat.LAYERS), pair))
        return host._get_kv_cache_dict().get(0, None)[0].transpose(1, 2)


def errors(got, k):
    """Relative, of each head."""
    difference = (got.float() - k.float()).transpose(1, 2).flatten(2).norm(dim=2)[0]
    return (difference / k.float().transpose(1, 2).flatten(2).norm(dim=2)[0]).tolist()


@pytest.mark.filterwarnings("ignore:LongCat-Video. queries cannot be observed")
@pytest.mark.parametrize("stored", [stored_by_self_forcing, stored_by_longcat])
@pytest.mark.parametrize("method", ["rtn", "kivi", "qvg", "quantwm", "steady"])
def test_outliers_across_heads_cost_no_more_than_outliers_within_one(method, stored):
    """Trap 10: a norm over all heads (Wan) lets a head and its channels be large, a norm of each
    head (LongCat) does not. Both are stored with the same relative error, and a quiet head's
    numbers do not depend on a loud one."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 12 * FRAME, HEADS, DIM, generator=generator).unbind(0)
    k[..., 3] *= 8  # the outlier channel of every head
    by_head = (k / k.square().mean(3, keepdim=True).sqrt()).bfloat16()
    across = by_head.clone()
    across[:, :, 0] *= 32
    v = v.bfloat16()
    within, spanning = stored(method, by_head, v), stored(method, across, v)
    assert torch.equal(within[:, :, 1:], spanning[:, :, 1:])
    plain, loud = errors(within, by_head), errors(spanning, across)
    assert all(0.05 < error < 0.8 for error in plain)
    assert loud[0] == pytest.approx(plain[0], rel=0.1)


def test_every_trap_has_its_test():
    """The table of docs/hosts/README.md names files and functions that exist."""
    text = (ROOT / "docs/hosts/README.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| (`.*`) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 14))
    for _, names in rows:
        for file, function in re.findall(r"`(\w+)\.py::(\w+)`", names):
            source = (ROOT / "tests/hosts" / f"{file}.py").read_text()
            assert f"def {function}(" in source, (file, function)
        assert "::" in names
