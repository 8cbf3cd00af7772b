"""Keys stored before RoPE on the real flashdreams package, which turns them in place."""

from __future__ import annotations

import pytest
import torch

import steadykv as skv
from tests.hosts import flashdreams as real
from tests.hosts.checks import assert_equal, small_config
from tests.hosts.flashdreams import FRAME, attended, rollout
from tests.hosts.test_flashdreams import HOSTS, package

__all__ = ["package"]  # a fixture that every test here uses


@pytest.mark.parametrize("name", ["wan", "wan guided, sink no multiple of the chunk", "cosmos"])
def test_keys_before_rope(name, monkeypatch):
    """Turned in place by the host, in pairs of neighbours (Wan) or of halves (Cosmos)."""
    seen, original = {}, skv.LayerCache.observe_queries
    wanted = torch.cat([x.flatten() for x in rollout(HOSTS[name](), 9)])
    errors = {}
    for config, place in (
        (skv.preset("bf16"), "before_rope"),
        (small_config("rtn", sink_keep=60), "before_rope"),
        (small_config("rtn", bits=4), "after_rope"),
        (small_config("rtn", bits=4), "before_rope"),
    ):
        host = HOSTS[name]()
        with skv.attach(host, config=config, store_keys=place) as caches:
            got = torch.cat([x.flatten() for x in rollout(host, 9)])
            rollout(host, 2, seed=5, size=16)  # frames of another size
        errors[config, place] = float((got - wanted).float().norm() / wanted.float().norm())
        assert len(caches.turns) == (
            0 if config.keys.is_dense or place == "after_rope" else len(caches)
        )
    exact, dense, after, before = errors.values()
    assert exact == 0 < dense < 0.02
    assert 0 < before < 1.5 * after
    for place in ("after_rope", "before_rope"):
        spread = seen[place] = []

        def observe(self, q, spread=spread):
            spread.append(float(q.float().std(1).max()))
            return original(self, q)

        monkeypatch.setattr(skv.LayerCache, "observe_queries", observe)
        host = HOSTS[name]()
        for attention in attended(host):
            projection = getattr(attention, "q_proj", None) or attention.q
            projection.weight.data.zero_()
            if projection.bias is None:  # no constant queries but zero
                projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))
                projection.to(next(attention.parameters()).dtype)
            projection.bias.data.copy_(torch.linspace(-1, 1, projection.out_features))
        with skv.attach(host, config=small_config("quantwm"), store_keys=place):
            rollout(host, 3)
    assert max(seen["before_rope"]) < 0.02
    assert max(seen["after_rope"]) > 0.2


def test_a_host_that_rotates_on_read_stores_keys_before_rope_anyway():
    wanted = rollout(real.wan(rotates_on_read=True), 3)
    host = real.wan(rotates_on_read=True)
    with skv.attach(host, config=small_config("rtn", sink_keep=60), store_keys="before_rope") as c:
        assert_equal(rollout(host, 3), wanted)
    assert not c.turns


def test_a_compiled_network_with_keys_before_rope():
    wanted = torch.cat([x.flatten() for x in rollout(real.wan(), 4)])
    host = real.wan()
    host.network = torch.compile(host.network, backend="eager")
    rollout(host, 2)
    config = small_config("rtn", sink_keep=60)
    with skv.attach(host, config=config, store_keys="before_rope") as caches:
        got = torch.cat([x.flatten() for x in rollout(host, 4)])
    assert float((got - wanted).float().norm() / wanted.float().norm()) < 0.02
    assert caches["main"][0].progress.newest == 4 * FRAME == caches.turns["main"].pieces[-1][1]
    assert_equal(rollout(host, 4), rollout(real.wan(), 4))
