"""Hosts that lack a function, or have another one: refused in one line, before anything happens."""

from __future__ import annotations

from typing import Any

import pytest

import steadykv as skv
from steadykv.errors import HostError
from tests.hosts import longcat, matrix_game_2
from tests.hosts.cases import CASES, at
from tests.hosts.checks import assert_same_state, state_of
from tests.hosts.self_forcing import CausalDiffusionInferencePipeline, CausalInferencePipeline

# Case, path to an object of the host, and what it has that an adapter calls or replaces.
NEEDED = [
    ("self-forcing", "", "_initialize_kv_cache"),
    ("causal-forcing-rolling", "", "_initialize_kv_cache"),
    ("matrix-game-2", "", "_initialize_kv_cache"),
    ("matrix-game-2", "", "_initialize_kv_cache_mouse_and_keyboard"),
    ("lingbot-world", "", "_initialize_self_kv_cache"),
    ("fastvideo", "", "_initialize_kv_cache"),
    ("fastvideo", "transformer.blocks.0.attn1", "attn"),
    ("longlive2", "", "_initialize_kv_cache"),
    ("longcat-video", "", "_cache_clean_latents"),
    ("longcat-video", "", "_update_kv_cache_dict"),
    ("sglang", "", "_allocate_causal_kv_cache"),
    ("sana-wm-refiner", "transformer", "build_rotary_emb_for_absolute_positions"),
    ("flashdreams", "network", "blocks"),
    ("flashdreams", "network.blocks.0.self_attn", "initialize_cache"),
]


def assert_refused(host: Any, owners: list[Any], message: str, **options: Any) -> None:
    before = state_of(*owners)
    with pytest.raises(HostError, match=message) as caught, skv.attach(host, **options):
        pass
    assert "\n" not in str(caught.value)
    assert_same_state(before, state_of(*owners))


@pytest.mark.parametrize(("name", "path", "attribute"), NEEDED)
def test_nothing_in_place_of_what_an_adapter_needs(name, path, attribute, monkeypatch):
    case = CASES[name]
    case.prepare(monkeypatch)
    host = case.make()
    setattr(at(host, path), attribute, None)
    assert_refused(host, [host], "got .* expected ", **case.options)


class SizedByOverride(CausalInferencePipeline):
    """As LongLive 1 does: the length of the cache is an argument of the initializer."""

    def _initialize_kv_cache(self, batch_size, dtype, device, kv_cache_size_override=None):
        super()._initialize_kv_cache(batch_size, dtype, device)


def test_an_initializer_with_arguments_that_nobody_knows():
    host = SizedByOverride(9, 3)
    message = r"Self-Forcing: got SizedByOverride._initialize_kv_cache\(batch_size, dtype, device, "
    message += r"kv_cache_size_override\): expected no argument 'kv_cache_size_override'"
    assert_refused(host, [host], message)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (CausalInferencePipeline, ["kv_cache1"]),
        (CausalDiffusionInferencePipeline, ["kv_cache_pos", "kv_cache_neg"]),
        (matrix_game_2.CausalInferencePipeline, ["kv_cache1"]),
    ],
)
def test_a_list_of_another_name(make, names):
    host = make()
    for name in names:
        host.renamed = vars(host).pop(name)
    assert_refused(host, [host], f"without .*{names[0]}.*: expected the attribute that holds")


class AvatarPipeline(longcat.LongCatVideoPipeline):
    def _cache_clean_latents(self, cond_latents, audio_embs, **options):
        return super()._cache_clean_latents(cond_latents, **options)


def test_the_avatar_pipeline_is_refused():
    host = AvatarPipeline()
    assert_refused(host, [host], "takes audio_embs: expected a LongCatVideoPipeline")
