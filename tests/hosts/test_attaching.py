"""Blocks beside and inside each other, modes of torch, and what is refused before anything runs."""

from __future__ import annotations

import sys

import pytest
import torch

import steadykv as skv
from steadykv.errors import CalibrationError, ConfigError, HostError
from tests.hosts import hy_worldplay, self_forcing
from tests.hosts.checks import assert_equal, assert_same_state, small_config, state_of
from tests.hosts.self_forcing import CausalInferencePipeline, noise_of, text_of

MODULE = sys.modules[CausalInferencePipeline.__module__]
CHUNKS = [3] * 5


def video(host):
    return host.inference(noise_of(15), CHUNKS, text_of())


@pytest.mark.parametrize("method", ["bf16", "qvg", "quantwm", "steady"])
def test_a_run_under_inference_mode_is_the_same(method):
    results = []
    for mode in (torch.no_grad, torch.inference_mode):
        host = CausalInferencePipeline(9, 3)
        with skv.attach(host, config=small_config(method)) as caches:
            with mode():
                video(host)
                results.append(video(host).clone())
            caches.commit()
            results[-1] = [results[-1], *caches["main"][0].read()]
            caches.reset()
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("first_leaves_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"attention": "packed"}])
def test_two_hosts_of_one_file_leave_in_any_order(first_leaves_first, options):
    hosts = [CausalInferencePipeline(9, 3) for _ in range(2)]
    before = state_of(*hosts, MODULE)
    with skv.attach(CausalInferencePipeline(9, 3), config=small_config("quantwm"), **options) as c:
        pass
    alone = CausalInferencePipeline(9, 3)
    with skv.attach(alone, config=small_config("quantwm"), **options):
        wanted = video(alone)
    blocks = [skv.attach(host, config=small_config("quantwm"), **options) for host in hosts]
    caches = [block.__enter__() for block in blocks]
    gone, left = (0, 1) if first_leaves_first else (1, 0)
    blocks[gone].__exit__(None, None, None)
    got = video(hosts[left])
    assert torch.equal(got, wanted)
    assert caches[left]["main"][0].stats.has_history
    assert not c.branches
    blocks[left].__exit__(None, None, None)
    after = state_of(*hosts, MODULE)
    for n in range(2):
        after[f"{n}..crossattn_cache"] = before[f"{n}..crossattn_cache"]
    assert_same_state(before, after)


def test_a_pipeline_and_its_model_are_one_host():
    pipeline = hy_worldplay.WorldPlayPipeline()
    before = state_of(pipeline.transformer)
    size = {"frame_tokens": hy_worldplay.FRAME}
    with skv.attach(pipeline, preset="bf16", **size):
        with (
            pytest.raises(HostError, match="is attached already"),
            skv.attach(pipeline.transformer, preset="bf16", **size),
        ):
            pass
        hy_worldplay_runs(pipeline)
    assert_same_state(before, state_of(pipeline.transformer))
    with skv.attach(pipeline.transformer, preset="bf16"):
        pass


def hy_worldplay_runs(pipeline):
    frames = 8
    return pipeline(
        hy_worldplay.noise_of(frames), hy_worldplay.texts_of(), hy_worldplay.cameras_of(frames)
    )


def test_a_configuration_is_a_preset_too():
    host = CausalInferencePipeline(9, 3)
    with skv.attach(host, small_config("qvg", span_chunks=2)) as caches:
        video(host)
    assert caches["main"].config.policy.span_chunks == 2


def test_spans_that_would_not_shrink_are_told():
    host = CausalInferencePipeline(9, 3)
    with (
        pytest.warns(UserWarning, match=r"spans of 48 tokens stay dense .*span_chunks"),
        skv.attach(host, preset="qvg") as caches,
    ):
        video(host)
    assert caches.ledger().packed_tokens == 0
    with (
        pytest.warns(UserWarning, match="more memory than in BF16"),
        skv.attach(host, config=small_config("quantwm")),
    ):
        host.inference(noise_of(6), [3] * 2, text_of())


def test_a_block_in_which_nothing_ran_has_a_ledger():
    with skv.attach(CausalInferencePipeline(9, 3)) as caches:
        pass
    assert caches.ledger().resident_bytes == 0
    assert "compression 1.000x" in str(caches.ledger())


def test_a_write_that_failed_between_keys_and_values_can_be_made_again():
    host = CausalInferencePipeline(9, 3)
    with skv.attach(host, preset="bf16"):
        host._initialize_kv_cache(1, torch.bfloat16, "cpu")
        entry = host.kv_cache1[0]
        k = torch.randn(1, 16, self_forcing.HEADS, self_forcing.DIM).bfloat16()
        entry["k"][:, 0:16] = k
        entry["k"][:, 0:16] = 2 * k
        entry["v"][:, 0:16] = k
        assert torch.equal(entry["k"][:, 0:16], 2 * k)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"centroids": 3}, ConfigError, r"attach got centroids.*preset=skv.preset"),
        ({"preset": None}, ConfigError, "preset is None: expected a name"),
        ({"preset": 3}, ConfigError, "preset is 3: expected a name"),
        ({"adapter": 3}, ConfigError, "adapter is 3: expected a name"),
        ({"calibration": 3}, CalibrationError, "calibration is a int: expected"),
        ({"preset": "kvquant_calibrated"}, CalibrationError, "needs a calibration"),
    ],
)
def test_wrong_arguments_are_named_before_anything_happens(wrong, error, message):
    host = CausalInferencePipeline(9, 3)
    before = state_of(host, MODULE)
    with pytest.raises(error, match=message), skv.attach(host, **wrong):
        pass
    assert_same_state(before, state_of(host, MODULE))
