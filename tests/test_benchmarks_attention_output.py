"""The error of attention outputs on the BF16 trajectory, on tiny worlds."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from benchmarks import attention_output
from benchmarks.attention_output import OutputProbe, errors_of, measure, output_energies
from steadykv.cache import KVCache
from steadykv.config import CachePolicy, preset
from steadykv.evaluation.fingerprint import world_hash
from steadykv.evaluation.metrics.tensors import attention_errors
from steadykv.evaluation.protocol import Protocol
from steadykv.evaluation.rollouts import new_cache
from steadykv.evaluation.shadows import CLEAN, DENOISING
from steadykv.world import rollout
from steadykv.world.episodes import save_episodes
from steadykv.world.rope import rotation_of
from steadykv.world.weights import load_world, save_world
from tests.worlds import TINY, tiny_episodes, tiny_world

REFINED = "qvg4@refinement=2:qvg@metadata=int8+packing=trits+refinement=2"


def protocol(*methods: str, frames: int = 6, **options: object) -> Protocol:
    policy = CachePolicy(span_chunks=1, window_frames=TINY.window_frames)
    return Protocol(
        methods, frames=frames, policy=policy, centroids=8, floor=False, shift=None, **options
    )


def errors(rows: list[dict[str, object]], method: str) -> list[float]:
    return [row["output_error"] for row in rows if row["method"] == method]  # type: ignore[misc]


def test_energies_are_those_of_steadykv_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 16, generator=generator).bfloat16()
    k, v, other_k, other_v = torch.randn(4, 2, 2, 30, 16, generator=generator).bfloat16()
    same, packed = output_energies(q, k, v, [(k, v), (other_k, other_v)])
    assert same[1:].count_nonzero() == 0
    assert torch.equal(same[0], packed[0])
    for row in range(2):
        one = slice(row, row + 1)
        expected = attention_errors(q[one], k[one], v[one], other_k[one], other_v[one])
        energy, *lost = packed[:, row].sum(dim=-1).tolist()
        assert [math.sqrt(x / energy) for x in lost] == pytest.approx(
            [expected.output_error_keys, expected.output_error_values, expected.output_error],
            rel=1e-5,
        )


def test_the_headline_is_a_mean_over_layers_of_ratios_over_heads() -> None:
    # Two layers, two heads, one rollout: energies 1 and 9, 4 and 4; errors of both packed.
    energies = torch.zeros(2, 4, 1, 2, dtype=torch.float64)
    energies[0, 0, 0], energies[1, 0, 0] = torch.tensor([1.0, 9.0]), torch.tensor([4.0, 4.0])
    energies[0, 3, 0] = torch.tensor([1.0, 0.6])
    energies[1, 1, 0] = torch.tensor([2.0, 0.0])
    (row,) = errors_of(energies)
    assert row["output_error"] == pytest.approx((0.4 + 0) / 2)
    assert row["output_error_keys"] == pytest.approx((0 + 0.5) / 2)
    assert row["output_error_values"] == 0
    assert row["output_error_heads"] == pytest.approx((1 + (0.6 / 9) ** 0.5) / 4)
    assert row["output_error_pooled"] == pytest.approx((1.6 / 18) ** 0.5)
    assert (row["layer_0"], row["layer_1"]) == pytest.approx((0.4, 0.0))
    by_head = [row[f"layer_{layer}_head_{head}"] for layer in (0, 1) for head in (0, 1)]
    assert by_head == pytest.approx([1.0, (0.6 / 9) ** 0.5, 0.0, 0.0])


def test_rows_of_a_tiny_world() -> None:
    world, walks = tiny_world(), tiny_episodes(2)
    methods = ("bf16", "qvg", "qvg:bf16", "bf16:qvg")
    rows = measure(world, walks, protocol(*methods, seeds=(0, 1), max_batch=3), 7, lambda _: None)
    assert [row["method"] for row in rows] == [name for name in methods for _ in range(4)]
    assert [(r["episode"], r["seed"]) for r in rows[:4]] == [
        ("walk-0", 0), ("walk-0", 1), ("walk-1", 0), ("walk-1", 1)
    ]  # fmt: skip
    assert errors(rows, "bf16") == [0.0] * 4
    # Spans of one chunk: chunks 1 and 2 read packed data; 2 denoising passes, 11 queries.
    assert {row["queries"] for row in rows} == {2 * 2 * 11}
    qvg, keys, values = (
        [r for r in rows if r["method"] == name] for name in ("qvg", "qvg:bf16", "bf16:qvg")
    )
    for both, k, v in zip(qvg, keys, values, strict=True):
        assert 0.01 < both["output_error"] < 0.9
        assert both["output_error_keys"] == pytest.approx(k["output_error"], rel=1e-6)
        assert both["output_error_values"] == pytest.approx(v["output_error"], rel=1e-6)
        assert k["output_error_values"] == v["output_error_keys"] == 0.0
    # A rollout's numbers are its own, whatever runs beside it.
    alone = measure(world, walks.select([1]), protocol("qvg", seeds=(1,)), 7, lambda _: None)
    assert alone[0]["output_error"] == pytest.approx(errors(rows, "qvg")[3], rel=1e-4)


def test_one_refined_span_lies_between_none_and_all() -> None:
    spans = {1: REFINED} | {
        n: REFINED.replace("refinement=2", f"refinement=2+refined_spans={n}") for n in (0, 9)
    }
    chosen = protocol(*spans.values(), frames=9)
    rows = measure(tiny_world(), tiny_episodes(2), chosen, 7, lambda _: None)
    found = {n: errors(rows, name) for n, name in spans.items()}
    for every, newest, none in zip(found[9], found[1], found[0], strict=True):
        assert 0 < 1.02 * every < newest < 0.98 * none
    bits = {n: next(r["bits_per_element"] for r in rows if r["method"] == spans[n]) for n in spans}
    assert bits[0] < bits[1] < bits[9]


def test_a_known_perturbation_gives_the_known_ratio() -> None:
    """Values that come back 1.25 times as large: outputs are off by a quarter, in every layer."""

    class Louder(KVCache):
        def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
            layer = super().__getitem__(index)
            read = type(layer).read.__get__(layer)
            layer.read = lambda out=None: (lambda k, v: (k, v * 1.25))(*read())  # type: ignore[method-assign]
            return layer

    world, walks = tiny_world(), tiny_episodes(1)
    configs = protocol("bf16").configurations()
    for key_rope in ("post", "pre"):
        rotation = None if key_rope == "post" else rotation_of(TINY, "cpu")
        probe = OutputProbe(world, configs, first_frame=6, query_stride=5, rotation=rotation)
        louder = new_cache(world, configs["bf16"])
        louder.__class__ = Louder
        for index, layer in enumerate(probe):
            layer.shadows["bf16"] = louder[index]
        rollout(world, walks, probe, 9, key_rope=key_rope)
        (row,) = errors_of(probe.energies()["bf16"])
        assert row["output_error"] == pytest.approx(0.25, rel=0.01)  # BF16 rounds the product
        assert row["output_error_keys"] == 0.0
        assert row["output_error_values"] == row["output_error"]
        # Chunk 1 begins before frame 6; of chunks 2 and 3 the denoising passes count, 2 each.
        assert probe.queries == 2 * 2 * 15
        counts = torch.stack([layer.counts[0] for layer in probe])  # type: ignore[misc]
        assert torch.equal(probe.energies()["bf16"], counts[:, DENOISING])
        assert (counts[:, CLEAN, 0] > 0).all()


def test_keys_stored_before_their_rotation_are_measured_after_it() -> None:
    """Which side of RoPE BF16 keys are stored on changes nothing but roundings, if all is well."""
    world, walks = tiny_world(), tiny_episodes(2)
    configs = protocol("bf16:qvg").configurations()
    policy = configs["bf16:qvg"].policy
    found = {}
    for key_rope, is_rotated in (("post", False), ("pre", True), ("pre", False)):
        rotation = rotation_of(TINY, "cpu") if is_rotated else None
        probe = OutputProbe(world, configs, first_frame=3, query_stride=5, rotation=rotation)
        video = rollout(world, walks, probe, 3, key_rope=key_rope)
        plain = new_cache(world, preset("bf16").replace(policy=policy))
        assert torch.equal(video, rollout(world, walks, plain, 3, key_rope=key_rope))
        found[key_rope, is_rotated] = probe.energies()["bf16:qvg"][:, [0, 2]]
    after = found["post", False]
    torch.testing.assert_close(found["pre", True], after, rtol=0.06, atol=0)
    assert ((found["pre", False] / after - 1).abs() > 0.1).any()


def test_the_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, walks, path = tmp_path / "w.safetensors", tmp_path / "w.zip", tmp_path / "new" / "r.csv"
    save_world(world, TINY, tiny_world().state_dict(), {})
    save_episodes(walks, tiny_episodes(2))
    files = ["--world", str(world), "--walks", str(walks), "--episodes", "1"]
    attention_output.main(
        [*files, "--frames", "6", "--methods", "qvg", "--centroids", "4", "--first-walk", "1",
         "--store-keys", "before_rope", "--query-stride", "31", "--out", str(path)]
    )  # fmt: skip
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["method"], row["key_rope"], row["first_frame"]) == ("qvg", "pre", "6")
    assert row["episode"] == "walk-1"
    assert 0.02 < float(row["output_error"]) < 0.9
    assert row["torch"] == torch.__version__
    assert row["world_sha256"] == world_hash(load_world(world))
    assert f"{float(row['output_error']):.4f}" in capsys.readouterr().out
    attention_output.main([*files, "--frames", "6", "--methods", "qvg", "--centroids", "4",
                           "--dtype", "bfloat16", "--out", str(path)])  # fmt: skip
    with path.open(newline="") as file:
        (coarse,) = csv.DictReader(file)
    assert coarse["world_sha256"] == world_hash(load_world(world, dtype=torch.bfloat16))
    for wrong, why in (("--frames 4", "multiple of 3"), ("--frames 3", "ask for more frames"),
                       ("--methods qgv", "unknown method")):  # fmt: skip
        with pytest.raises(SystemExit, match=why):
            attention_output.main([*files, *wrong.split()])
