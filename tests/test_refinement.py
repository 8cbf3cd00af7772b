"""Refined codes: what they add, that dropping them leaves the plain payload, and when they go."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import steadykv as skv
from steadykv import ops
from steadykv.codecs import Payload, encode, payload_layout
from steadykv.config import CacheConfig, CachePolicy, CodecConfig
from steadykv.errors import ConfigError
from steadykv.evaluation.packed_keys import PackedKeys
from tests.cache_cases import cache_for, chunks_of, drive
from tests.codecs import sample_moment, sample_tokens

FORMS: list[dict[str, Any]] = [
    {"method": "qvg4"},
    {"method": "qvg4", "bits": 3, "group_size": 48},
    {"method": "qvg4", "stages": 2, "centroid_format": "fp8", "bits": 4},
    {"method": "qvg", "metadata": "int8", "packing": "trits"},
    {"method": "qvg", "metadata": "int8", "bits": 3},
    {"method": "quantwm", "rank": 0},
]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def codec(refinement: int, **form: Any) -> CodecConfig:
    return CodecConfig(**{"centroids": 8, "refinement": refinement, **form})


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_without_its_refinement_a_payload_is_the_plain_one(form: dict[str, Any]) -> None:
    x = sample_tokens(2, 2, 97, 80)
    stats = sample_moment(x)
    plain = encode(x, codec(0, **form), stats=stats)
    for bits in (1, 2, 3, 4):
        refined = encode(x, codec(bits, **form), stats=stats)
        assert refined.unrefined() == plain
        assert plain.unrefined() is plain
        assert refined.unrefined().unrefined().nbytes == plain.nbytes
        assert refined.nbytes == plain.nbytes + 2 * 2 * 97 * -(-80 * bits // 8)
        names = payload_layout(refined.config, refined.shape, compensated=True)
        assert refined.nbytes == sum(item.nbytes for item in names.values())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_every_bit_halves_the_error(form: dict[str, Any]) -> None:
    x = sample_tokens(1, 2, 192, 64)
    errors = [
        (encode(x, codec(bits, **form)).decode(torch.float64) - x.double()).square().mean().sqrt()
        for bits in (1, 2, 3, 4)
    ]
    plain = encode(x, codec(0, **form)).decode(torch.float64)
    errors.insert(0, (plain - x.double()).square().mean().sqrt())
    # Of three levels most numbers round to 0, and lie closer to it than half a step.
    assert errors[0] / errors[2] > (2.2 if "packing" in form else 3.0)
    for before, after in pairwise(errors[1:]):
        assert before / after > 1.9


def test_by_hand() -> None:
    """Values of a step are cut into four parts; their middles are what is read."""
    x = torch.tensor([0.0, 3.0, 1.0, 0.6, 1.4, 1.1, 0.9, 2.0])[None, None]  # steps of 1
    none = torch.zeros(1, 1, 8)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    tensors, _ = ops.quantize_clustered(x, none, ids, "affine_zero", 2, 8)
    tensors["refinement"] = ops.refine_clustered(x, none, ids, tensors, "affine_zero", 2, 8, 2)
    codes = ops.unpack(tensors["codes"], 2, 8)
    assert codes.tolist() == [[[0, 3, 1, 1, 1, 1, 1, 2]]]
    parts = ops.unpack(tensors["refinement"], 2, 8)
    assert parts[0, 0, 3:7].tolist() == [0, 3, 2, 1]
    value = ops.group_dequantize(tensors, "affine_zero", 2, 8, 8, 0, 1, refinement=2)
    assert value[0, 0, 3:7].tolist() == pytest.approx([0.625, 1.375, 1.125, 0.875], abs=0.01)
    plain = ops.group_dequantize(tensors, "affine_zero", 2, 8, 8, 0, 1)
    assert plain[0, 0, 3:7].tolist() == pytest.approx([1.0] * 4, abs=0.01)


def test_a_group_of_zeros_stays_zero() -> None:
    payload = encode(torch.zeros(1, 1, 5, 32), codec(2, method="qvg4"))
    assert not payload.decode(torch.float32).any()


def test_a_refined_payload_is_saved_and_moved(tmp_path: Path) -> None:
    payload = encode(sample_tokens(), codec(2, method="qvg", metadata="int8", packing="trits"))
    payload.save(tmp_path / "span.safetensors")
    assert Payload.load(tmp_path / "span.safetensors") == payload
    assert payload.to("cpu") is payload


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"method": "quantwm", "rank": 8}, "rank is 8 with refinement=2: expected 0"),
        ({"method": "qvg4", "refit": True}, "refit is True with refinement=2: expected False"),
        ({"method": "qvg"}, "metadata is 'fp8' with refinement=2: expected 'int8'"),
        ({"method": "rtn"}, "'rtn' ignores it"),
    ],
)
def test_what_refinement_does_not_go_with(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CodecConfig(**{"refinement": 2, **fields})


def faded_cache(refined_spans: int, **policy: Any) -> Any:
    config = CacheConfig(
        CodecConfig("qvg4", centroids=4, group_size=16, refinement=2),
        CodecConfig(
            "qvg", centroids=4, group_size=16, metadata="int8", refinement=3, packing="trits"
        ),
        CachePolicy(span_chunks=1, refined_spans=refined_spans, **policy),
    )
    return cache_for(config)


@pytest.mark.parametrize("refined_spans", [0, 1, 2, 9])
def test_only_the_newest_spans_are_refined(refined_spans: int) -> None:
    cache = faded_cache(refined_spans, window_frames=15)
    chunks = chunks_of([24] * 7)
    for count, chunk in enumerate(chunks):
        drive(cache, [chunk])
        layer = cache[0]
        for store in (layer.keys, layer.values):
            packed = [s for s in store.segments if s.payload is not None]
            refined = ["refinement" in s.payload.tensors for s in packed]
            assert refined == [i >= len(packed) - refined_spans for i in range(len(packed))]
        assert layer.encoded_tokens == 24 * (count + 1)  # nothing is packed again
        held = sum(t.nbytes for s in layer.keys.segments for t in _tensors(s))
        assert layer.keys.nbytes == held
        assert ("refinement" in layer.ledger().parts) == (refined_spans > 0)
    k, v = cache[0].read()
    assert k.isfinite().all()
    assert v.isfinite().all()


def _tensors(segment: Any) -> list[torch.Tensor]:
    if segment.payload is None:
        return [segment.data]
    flags = {t.untyped_storage().data_ptr(): t for t in segment.payload.flags.values()}
    return [*segment.payload.tensors.values(), *flags.values()]


def test_what_is_read_follows_the_fading() -> None:
    cache = faded_cache(1)
    chunks = chunks_of([24] * 4)
    drive(cache, chunks[:1])
    layer, keys = cache[0], PackedKeys()
    keys.update(layer)
    clean = chunks[0].passes[-1][0].transpose(1, 2)
    near = (keys.keys() - clean).float().norm()
    assert torch.equal(keys.keys(), layer.read_tensor("key", [(0, 24)]).transpose(1, 2))
    drive(cache, chunks[1:])
    keys.update(layer)
    far = (keys.keys()[:, :, :24] - clean).float().norm()
    assert far > 2.5 * near
    assert torch.equal(keys.keys()[:, :, :24], layer.read_tensor("key", [(0, 24)]).transpose(1, 2))


def test_attention_over_packed_tokens_sees_the_refinement() -> None:
    cache = faded_cache(1)
    drive(cache, chunks_of([24] * 4))
    q = torch.randn(1, 24, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    k, v = (x.transpose(1, 2).float() for x in cache[0].read())
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2).float(), k, v)
    got = cache[0].attend(q).transpose(1, 2).float()
    assert (got - expected).abs().max() < 2**-9 * v.abs().max()  # results are BF16


def test_the_policy_is_written_and_read() -> None:
    policy = CachePolicy(refined_spans=3)
    assert CachePolicy.from_dict(policy.to_dict()) == policy
    with pytest.raises(ConfigError, match="refined_spans is -1"):
        CachePolicy(refined_spans=-1)
    with pytest.raises(ConfigError, match="'qvg': refined_spans changes nothing"):
        skv.preset("qvg", refined_spans=2)
    config = skv.preset("qvg4", refinement=2, refined_spans=2)
    assert config.keys.refinement == config.values.refinement == 2
    assert config.policy.refined_spans == 2
