"""Adapters as a whole: names, pages, the table that lists them, and which host is whose."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import steadykv as skv
from steadykv.errors import ConfigError, HostError
from steadykv.hosts import adapters
from steadykv.hosts.registry import adapter_named, find
from tests.hosts import (
    causal_forcing_rolling,
    fastvideo,
    hy_worldplay,
    lightx2v,
    lingbot,
    longcat,
    longlive2,
    matrix_game_2,
    self_forcing,
    sglang,
)
from tests.test_layout import ROOT

HOSTS: dict[str, list[Callable[[], Any]]] = {
    "self-forcing": [
        self_forcing.CausalInferencePipeline,
        self_forcing.CausalDiffusionInferencePipeline,
    ],
    "causal-forcing-rolling": [causal_forcing_rolling.CausalInferencePipeline],
    "matrix-game-2": [matrix_game_2.CausalInferencePipeline],
    "lingbot-world": [lingbot.FastPipeline, lingbot.CausalPipeline],
    "fastvideo": [fastvideo.CausalStage, fastvideo.MatrixGame2Stage],
    "longlive2": [longlive2.CausalDiffusionInferencePipeline],
    "longcat-video": [longcat.LongCatVideoPipeline],
    "hy-worldplay": [hy_worldplay.WorldPlayPipeline],
    "sglang": [sglang.CausalDMDDenoisingStage],
    "lightx2v": [lightx2v.Runner],
}
PACKAGES = {"anyflow-far", "sana-wm-refiner", "flashdreams"}  # found in their own tests


def test_names_and_aliases_are_unique():
    names = [n for a in adapters() for n in (a.name, *a.aliases)]
    plain = ["".join(filter(str.isalnum, name)) for name in names]
    assert len(set(plain)) == len(plain)
    assert {a.name for a in adapters()} == set(HOSTS) | PACKAGES


@pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name, makes in HOSTS.items() for make in makes]
)
def test_a_host_is_known_to_one_adapter(name, make):
    host = make()
    assert [a.name for a in adapters() if a.matches(host)] == [name]
    assert find(host).name == name


@pytest.mark.parametrize("adapter", adapters(), ids=lambda a: a.name)
def test_every_adapter_has_a_page_that_the_table_lists(adapter):
    text = (ROOT / adapter.page).read_text()
    for option in adapter.options:
        assert f"`{option}" in text, f"{adapter.page} lacks {option}"
    table = (ROOT / "docs/hosts/README.md").read_text()
    page = adapter.page.removeprefix("docs/hosts/")
    assert re.search(rf"^\| `{adapter.name}` \| \[.*\]\({page}\) \|", table, re.MULTILINE)


def test_names_are_found_as_people_write_them():
    for written in ("Self Forcing", "self_forcing", "SELF-FORCING", "causal-forcing"):
        assert adapter_named(written).name == "self-forcing"
    with pytest.raises(ConfigError, match="adapter is 'cogvideo': expected one of self-forcing"):
        adapter_named("cogvideo")


@pytest.mark.parametrize("stranger", [{}, None, 3, [self_forcing], object()])
def test_strangers_are_named(stranger):
    message = r"which no adapter knows: expected one of \(self-forcing"
    with pytest.raises(HostError, match=message), skv.attach(stranger):
        pass


def test_an_adapter_that_was_asked_for_checks_its_host():
    host = longcat.LongCatVideoPipeline()
    with (
        pytest.raises(HostError, match="Self-Forcing: got"),
        skv.attach(host, adapter="self-forcing"),
    ):
        pass


def test_query_heads_may_outnumber_heads():
    """Grouped queries: the statistics of a head pool those of its queries."""
    cache = skv.KVCache(1, 2, 32, 16, skv.preset("quantwm"))
    k = torch.randn(1, 48, 2, 32).bfloat16()
    q = torch.randn(1, 48, 6, 32).bfloat16()
    cache[0].write(k, k, 0)
    cache[0].observe_queries(q)
    cache[0].write(k, k, 48)
    assert cache[0].stats is not None
    moment = cache[0].stats.for_encoding(9)
    assert moment is not None
    assert moment.count.tolist() == [[3 * 48] * 2]
    wanted = q.float().view(1, 48, 2, 3, 32).permute(0, 2, 1, 3, 4).reshape(1, 2, -1, 32)
    assert torch.allclose(moment.moment, wanted.mT @ wanted / (3 * 48), atol=1e-4)
