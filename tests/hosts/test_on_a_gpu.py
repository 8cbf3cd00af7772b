"""An attached host on a GPU: its kernels, its graphs of calls, and nothing left behind."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from tests.hosts.checks import (
    assert_ledger_is_real,
    assert_packed_once,
    assert_same_state,
    small_config,
    state_of,
)
from tests.hosts.self_forcing import CausalInferencePipeline, noise_of, text_of

MODULE = sys.modules[CausalInferencePipeline.__module__]
CHUNKS = [3] * 10

pytestmark = pytest.mark.cuda


def video(host):
    return host.inference(noise_of(30).cuda(), CHUNKS, text_of().cuda())


def test_bf16_is_bit_identical():
    wanted = video(CausalInferencePipeline(9, 3).cuda())
    host = CausalInferencePipeline(9, 3).cuda()
    with skv.attach(host, preset="bf16"):
        got = video(host)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("options", [{}, {"attention": "packed"}, {"store_keys": "before_rope"}])
@pytest.mark.parametrize("method", ["qvg", "quantwm", "steady"])
def test_every_span_is_packed_once_and_the_host_comes_back(method, options):
    host = CausalInferencePipeline(9, 3).cuda()
    before = state_of(host, MODULE)
    with skv.attach(host, config=small_config(method), **options) as caches:
        got = video(host)
        assert_packed_once(caches["main"])
        assert_ledger_is_real(caches)
    assert got.isfinite().all()
    after = state_of(host, MODULE)
    after["0..crossattn_cache"] = before["0..crossattn_cache"]
    assert_same_state(before, after)


def test_it_runs_inside_autocast_and_inference_mode():
    host = CausalInferencePipeline(9, 3).cuda()
    with (
        torch.inference_mode(),
        torch.autocast("cuda", dtype=torch.bfloat16),
        skv.attach(host, config=small_config("quantwm")) as caches,
    ):
        got = video(host)
    assert got.isfinite().all()
    assert_packed_once(caches["main"])
