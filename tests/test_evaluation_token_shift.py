"""The shift probe: it leaves the trajectory alone, and counts what brute force counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steadykv.cache import KVCache
from steadykv.config import CacheConfig, parse_method, preset
from steadykv.errors import ConfigError, PositionError
from steadykv.evaluation.protocol import ShiftOptions
from steadykv.evaluation.token_shift import ShiftProbe
from steadykv.world import rollout
from tests.brute_force_shift import DIM, FRAME, HEADS, BruteForce, keys_at, packed_tokens
from tests.worlds import TINY, tiny_episodes, tiny_world

COLUMNS = 6
CHUNK = 3 * FRAME


def configs(
    *methods: str, window_frames: int | None = 15, sink_frames: int = 0
) -> dict[str, CacheConfig]:
    return {
        method: parse_method(method)
        .replace(name=method, window_frames=window_frames, sink_frames=sink_frames)
        .with_span(2, centroids=8)
        for method in methods
    }


def new_probe(
    methods: dict[str, CacheConfig], options: ShiftOptions, layers: int = 2, **kwargs: Any
) -> ShiftProbe:
    policy = next(iter(methods.values())).policy
    return ShiftProbe(
        methods,
        options,
        num_layers=layers,
        num_heads=HEADS,
        head_dim=DIM,
        frame_tokens=FRAME,
        patch_columns=COLUMNS,
        reference=preset("bf16").replace(policy=policy),
        **kwargs,
    )


def passes(batch: int, chunks: int, steps: int, query_heads: int, seed: int = 0):  # type: ignore[no-untyped-def]
    """(chunk, step, q, k, v) of one layer, BSHD, keys like a video's: patches that drift."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn((batch, 1, HEADS, DIM), generator=generator) * 2
    patches = patches + torch.randn((batch, CHUNK, HEADS, DIM), generator=generator)
    for chunk in range(chunks):
        for step in range(steps):
            noise = torch.randn((3, batch, CHUNK, HEADS, DIM), generator=generator)
            k = (patches + 0.5 * noise[0]).bfloat16()
            v = noise[1].bfloat16()
            q = (patches + noise[2]).repeat_interleave(query_heads // HEADS, dim=2).bfloat16()
            yield chunk, step, q, k, v
        patches = patches + 0.3 * torch.randn((batch, CHUNK, HEADS, DIM), generator=generator)


def drive(
    cache: object, batch: int, chunks: int, steps: int, layers: int, query_heads: int
) -> None:
    """Denoising passes overwrite the open chunk; the last pass is the clean one."""
    streams = [passes(batch, chunks, steps, query_heads, seed) for seed in range(layers)]
    for per_layer in zip(*streams, strict=True):
        for index, (chunk, _, q, k, v) in enumerate(per_layer):
            cache[index].write(k, v, chunk * CHUNK)  # type: ignore[index]
            cache[index].observe_queries(q)  # type: ignore[index]
            cache[index].read()  # type: ignore[index]
        if per_layer[0][1] == steps - 1:
            cache.commit()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("window_frames", "sink_frames"), [(None, 0), (15, 0), (12, 0), (12, 3)])
def test_counts_equal_brute_force(window_frames: int | None, sink_frames: int) -> None:
    method = configs("quantwm", window_frames=window_frames, sink_frames=sink_frames)
    probe = new_probe(method, ShiftOptions(query_stride=7))
    drive(probe, batch=2, chunks=7, steps=3, layers=2, query_heads=4)
    oracle = BruteForce(method["quantwm"], layers=2, stride=7)
    drive(oracle, batch=2, chunks=7, steps=3, layers=2, query_heads=4)
    shift = probe.result().methods["quantwm"]
    for row in range(2):
        assert shift.top1[row] == pytest.approx(oracle.share(row, clean=False), abs=1e-9)
        assert shift.clean_top1[row] == pytest.approx(oracle.share(row, clean=True), abs=1e-9)
    assert shift.top1_by_head == pytest.approx([oracle.by_head(i) for i in range(4)], abs=1e-9)
    assert shift.top1_by_step == pytest.approx([oracle.by_step(i) for i in range(2)], abs=1e-9)
    assert 0.05 < shift.top1[0] < 0.95
    # Chunks 2-6 see packed keys (with a sink, which is a span of its own, chunk 1 as well), in 2
    # denoising passes, on 2 layers, 4 heads, 11 queries.
    assert shift.queries == (6 if sink_frames else 5) * 2 * 2 * 4 * 11
    assert sum(shift.top1_by_layer) / 2 == pytest.approx(sum(shift.top1) / 2)


def test_keys_stored_before_their_rotation_are_compared_after_it() -> None:
    def rotation(start: int, end: int) -> torch.Tensor:
        angles = torch.arange(start, end)[:, None] * torch.logspace(0, -2, DIM // 2)
        return torch.stack((angles.cos(), angles.sin()))

    method = configs("qvg")
    shifts = []
    for turn in (rotation, None):
        probe = new_probe(method, ShiftOptions(query_stride=5), rotation=turn)
        drive(probe, batch=2, chunks=6, steps=2, layers=2, query_heads=4)
        oracle = BruteForce(method["qvg"], layers=2, stride=5, rotation=turn)
        drive(oracle, batch=2, chunks=6, steps=2, layers=2, query_heads=4)
        shifts.append(probe.result().methods["qvg"].top1)
        for row in range(2):
            assert shifts[-1][row] == pytest.approx(oracle.share(row, clean=False), abs=1e-9)
    assert shifts[0] != shifts[1]


def test_the_trajectory_is_the_bf16_one() -> None:
    world, episodes = tiny_world(), tiny_episodes(2)
    config = preset("bf16").replace(window_frames=TINY.window_frames)
    plain = KVCache(TINY.num_layers, TINY.num_heads, TINY.head_dim, TINY.frame_tokens, config)
    expected = rollout(world, episodes, plain, 18, [3, 4])
    state = torch.get_rng_state()
    for key_rope in ("post", "pre"):
        probe = new_probe(configs("qvg", "quantwm"), ShiftOptions())
        video = rollout(world, episodes, probe, 18, [3, 4], key_rope=key_rope)
        if key_rope == "post":
            assert torch.equal(video, expected)
        assert probe.result().methods["qvg"].queries > 0
    assert torch.equal(state, torch.get_rng_state())
    assert probe.ledger().packed_tokens == 0  # the ledger is the reference's


def test_methods_with_equal_key_codecs_share_a_shadow() -> None:
    methods = configs("bf16", "qvg", "qvg:bf16", "bf16:qvg", "quantwm", "quantwm:kivi")
    probe = new_probe(methods, ShiftOptions())
    assert list(probe.shadows) == ["qvg", "quantwm"]
    assert all(cache.config.values.is_dense for cache in probe.shadows.values())
    drive(probe, batch=1, chunks=4, steps=2, layers=2, query_heads=2)
    shift = probe.result().methods
    assert shift["qvg"] == shift["qvg:bf16"]
    assert shift["quantwm"] == shift["quantwm:kivi"]
    assert shift["bf16"].top1 == shift["bf16:qvg"].top1 == [0.0]
    assert shift["qvg"].top1[0] > shift["quantwm"].top1[0] > 0.0
    assert shift["qvg"].top1[0] > shift["qvg"].top5[0] > 0.0


def test_a_batch_equals_its_rows_and_both_layouts_agree() -> None:
    methods = configs("qvg", "kivi")
    together = new_probe(methods, ShiftOptions(query_stride=5))
    drive(together, batch=1, chunks=4, steps=2, layers=2, query_heads=2)
    batched = new_probe(methods, ShiftOptions(query_stride=5))
    heads_first = new_probe(methods, ShiftOptions(query_stride=5), layout="BHSD")
    streams = [list(passes(1, 4, 2, 2, seed)) for seed in range(2)]
    for per_layer in zip(*streams, strict=True):
        for index, (chunk, _, q, k, v) in enumerate(per_layer):
            other = torch.flip(k, dims=(1,))
            batched[index].write(torch.cat((k, other)), torch.cat((v, v)), chunk * CHUNK)
            batched[index].observe_queries(torch.cat((q, -q)))
            heads_first[index].write(k.transpose(1, 2), v.transpose(1, 2), chunk * CHUNK)
            heads_first[index].observe_queries(q.transpose(1, 2))
        if per_layer[0][1] == 1:
            batched.commit()
            heads_first.commit()
    alone = together.result().methods
    for method in methods:
        assert batched.result().methods[method].top1[0] == alone[method].top1[0]
        assert len(batched.result().methods[method].top1) == 2
        assert heads_first.result().methods[method].top1 == alone[method].top1


def test_a_chunk_committed_by_the_next_write_counts_the_same() -> None:
    methods = configs("qvg")
    explicit, implicit = (new_probe(methods, ShiftOptions(), layers=1) for _ in range(2))
    drive(explicit, batch=1, chunks=4, steps=3, layers=1, query_heads=2)
    for chunk, _, q, k, v in passes(1, 4, 3, 2):
        implicit[0].write(k, v, chunk * CHUNK)
        implicit[0].observe_queries(q)
    implicit.commit()
    assert explicit.result().methods == implicit.result().methods


def test_policies_that_differ_are_measured_on_their_own_packed_tokens() -> None:
    methods = configs("kivi", "kivi_recent", "qvg")
    probe = new_probe(methods, ShiftOptions(query_stride=3))
    drive(probe, batch=1, chunks=5, steps=2, layers=2, query_heads=2)
    shift = probe.result().methods
    # kivi_recent packs one chunk later than kivi: chunks 3-4 instead of 2-4.
    assert shift["kivi"].queries == 3 * 2 * 2 * 24
    assert shift["kivi_recent"].queries == 2 * 2 * 2 * 24
    oracle = BruteForce(methods["kivi_recent"], layers=2, stride=3)
    drive(oracle, batch=1, chunks=5, steps=2, layers=2, query_heads=2)
    assert shift["kivi_recent"].top1[0] == pytest.approx(oracle.share(0, clean=False))


def test_options_bound_the_work_and_nothing_packed_gives_zero() -> None:
    queries = {}
    for stride, chunks in ((1, 1), (6, 1), (6, 2)):
        probe = new_probe(configs("qvg"), ShiftOptions(query_stride=stride, chunk_stride=chunks))
        drive(probe, batch=1, chunks=6, steps=2, layers=2, query_heads=2)
        queries[stride, chunks] = probe.result().methods["qvg"].queries
    assert queries[1, 1] == 4 * 2 * 2 * CHUNK
    assert queries[6, 1] == queries[1, 1] / 6
    assert queries[6, 2] == queries[6, 1] / 2
    idle = new_probe(configs("qvg"), ShiftOptions())
    drive(idle, batch=2, chunks=2, steps=2, layers=2, query_heads=2)
    result = idle.result()
    assert result.methods["qvg"].queries == 0
    assert result.example is None


def test_reset_starts_a_new_rollout_and_keeps_what_was_measured() -> None:
    probe = new_probe(configs("qvg"), ShiftOptions(), layers=1)
    drive(probe, batch=1, chunks=3, steps=2, layers=1, query_heads=2)
    first = probe.result().methods["qvg"]
    probe.reset()
    assert probe.result().methods["qvg"] == first
    drive(probe, batch=1, chunks=3, steps=2, layers=1, query_heads=2)
    second = probe.result().methods["qvg"]
    assert second.queries == 2 * first.queries
    assert second.top1 == first.top1


class ForbidHostReads(TorchDispatchMode):
    """Fails when a tensor's value is read by the host, which would wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "_local_scalar_dense" not in func.name(), "the host read a value from the device"
        return func(*args, **(kwargs or {}))


def test_measuring_reads_nothing_back() -> None:
    probe = new_probe(configs("qvg", "quantwm"), ShiftOptions(), layers=1)
    with ForbidHostReads():
        drive(probe, batch=1, chunks=4, steps=2, layers=1, query_heads=2)
    with pytest.raises(AssertionError, match="read a value"), ForbidHostReads():
        torch.ones(1).item()
    assert probe.result().example is not None


@pytest.mark.cuda
def test_measuring_never_waits_for_the_device() -> None:
    probe = new_probe(configs("qvg", "quantwm"), ShiftOptions(), layers=1, device="cuda")
    for chunk, step, q, k, v in passes(1, 4, 2, 2):
        probe[0].write(k.cuda(), v.cuda(), chunk * CHUNK)
        queries = q.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            probe[0].observe_queries(queries)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step == 1:
            probe.commit()
    on_cpu = new_probe(configs("qvg", "quantwm"), ShiftOptions(), layers=1)
    drive(on_cpu, batch=1, chunks=4, steps=2, layers=1, query_heads=2)
    for method, shift in probe.result().methods.items():
        assert shift.top1 == pytest.approx(on_cpu.result().methods[method].top1, abs=0.05)


def test_the_example_is_what_it_says() -> None:
    methods = configs("bf16", "qvg", "quantwm")
    probe = new_probe(methods, ShiftOptions(query_stride=5), example_rows=1)
    drive(probe, batch=2, chunks=4, steps=2, layers=2, query_heads=2)
    example = probe.result().example
    assert example is not None
    assert example["chosen"].startswith("a chosen example, not a typical query")
    assert (example["moving"], example["steady"]) == ("qvg", "quantwm")
    selected = example["selected"]
    assert selected["bf16"] == selected["quantwm"] != selected["qvg"]
    assert 0.0 < example["attention_weight"] <= 1.0
    assert example["row"] == 0  # only the first row may be shown

    # Run the methods again up to that pass and look the selections up.
    token, index, head = example["query"]["token"], example["layer"], example["head"]
    chunk, place = divmod(token, CHUNK)
    assert place % 5 == 0
    for method in ("qvg", "quantwm"):
        oracle = BruteForce(methods[method], layers=2, stride=CHUNK)
        drive(oracle, batch=2, chunks=chunk, steps=2, layers=2, query_heads=2)
        stream = list(passes(2, chunk + 1, 2, 2, seed=index))
        _, _, q, k, v = stream[2 * chunk + example["step"]]
        oracle[index].write(k, v, chunk * CHUNK)
        tokens = packed_tokens(oracle.shadow[index])
        for name, cache in ((method, oracle.shadow), ("bf16", oracle.reference)):
            keys = keys_at(cache[index], tokens)[0, :, head].float()
            best = int((keys @ q[0, place, head].float()).argmax())
            assert tokens[best] == selected[name]["token"]

    for spot in (example["query"], *selected.values()):
        patch = spot["patch_row"] * COLUMNS + spot["patch_column"]
        assert spot["token"] == spot["frame"] * FRAME + patch


def test_without_a_second_method_the_example_shows_one() -> None:
    probe = new_probe(configs("kivi"), ShiftOptions(), layers=1)
    drive(probe, batch=1, chunks=4, steps=2, layers=1, query_heads=2)
    example = probe.result().example
    assert example is not None
    assert example["steady"] is None
    assert example["selected"]["kivi"] != example["selected"]["bf16"]
    hidden = new_probe(configs("kivi"), ShiftOptions(), layers=1, example_rows=0)
    drive(hidden, batch=1, chunks=4, steps=2, layers=1, query_heads=2)
    assert hidden.result().example is None


def test_misuse_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"ShiftOptions.moving is 'bf16'.*quantwm"):
        new_probe(configs("bf16", "qvg", "quantwm"), ShiftOptions(moving="bf16"))
    with pytest.raises(ConfigError, match="divisor"):
        ShiftProbe(
            configs("qvg"),
            ShiftOptions(),
            num_layers=1,
            num_heads=HEADS,
            head_dim=DIM,
            frame_tokens=FRAME,
            patch_columns=7,
        )
    with pytest.raises(ConfigError, match="query_stride"):
        ShiftOptions(query_stride=0)
    probe = new_probe(configs("qvg"), ShiftOptions())
    with pytest.raises(PositionError, match="layer 1 has no open chunk"):
        probe[1].observe_queries(torch.zeros(1, CHUNK, HEADS, DIM))
