"""Fields of the clustering: where k-means starts, empty clusters, centroids moved afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steadykv import ops
from steadykv.cache.segments import nbytes_of
from steadykv.codecs import SpanKey, WarmStart, encode
from steadykv.config import CodecConfig, preset
from steadykv.errors import ShapeError

from .cache_cases import cache_for, chunks_of, drive, small_codec
from .codecs import sample_moment, sample_tokens, sqnr

CLUSTERED = ["qvg", "qvg4", "quantwm"]


@pytest.mark.parametrize("method", CLUSTERED)
def test_a_start_from_ids_is_a_start_from_the_means_they_give(method: str) -> None:
    first, second = sample_tokens(tokens=80), sample_tokens(tokens=80, seed=3)
    config = CodecConfig(method, centroids=16, warm_start="ids")
    before = encode(first, config)
    before.tensors["ids"][before.tensors["ids"] == 5] = 6  # cluster 5 is empty
    start = before.centroids.float()  # type: ignore[union-attr]
    for head in range(2):
        ids = before.tensors["ids"][0, head, 0]
        for j in ids.unique().tolist():
            start[0, head, 0, j] = second[0, head][ids == j].float().mean(0)
    warm = encode(second, config, warm=before)
    expected = encode(second, config, initial_centroids=start)
    assert torch.equal(warm.tensors["ids"], expected.tensors["ids"])
    assert torch.equal(warm.centroids, expected.centroids)  # type: ignore[arg-type]
    given = WarmStart(before.centroids, before.tensors["ids"])  # type: ignore[arg-type]
    assert encode(second, config, warm=given) == warm
    assert warm != encode(second, config)
    centroids = encode(second, CodecConfig(method, centroids=16), warm=before)
    assert not torch.equal(centroids.tensors["ids"], warm.tensors["ids"])


def test_a_start_from_ids_wants_ids_of_as_many_tokens() -> None:
    x = sample_tokens(tokens=80)
    config = CodecConfig("qvg", centroids=16, warm_start="ids")
    cold = encode(x, config)
    longer = encode(sample_tokens(tokens=81), config)
    assert encode(x, config, warm=longer) == cold
    ids = longer.tensors["ids"]
    assert encode(x, config, warm=WarmStart(longer.centroids, ids)) == cold  # type: ignore[arg-type]
    for bare in (cold.centroids, WarmStart(cold.centroids)):  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match="no ids"):
            encode(x, config, warm=bare)


def test_a_start_of_the_wrong_kind_is_refused_in_one_line() -> None:
    x = sample_tokens(tokens=80)
    config = CodecConfig("qvg", centroids=16, warm_start="ids")
    cold = encode(x, config)
    centroids, ids = cold.centroids, cold.tensors["ids"]
    assert centroids is not None
    coded = encode(x, CodecConfig("qvg", centroids=16, centroid_format="fp8")).tensors["centroids"]
    outside, below = ids.clone(), ids.to(torch.int64)
    outside[0, 1, 0, 7], below[0, 0, 0, 3] = 16, -1
    cases: list[tuple[str, dict[str, Any]]] = [
        ("initial_centroids are torch.int32", {"initial_centroids": centroids.int()}),
        ("initial_centroids are torch.float8_e4m3fn", {"initial_centroids": coded}),
        ("warm centroids are torch.float64", {"warm": WarmStart(centroids.double(), ids)}),
        ("warm ids are torch.float32", {"warm": WarmStart(centroids, ids.float())}),
        ("warm ids are torch.bool", {"warm": WarmStart(centroids, ids > 3)}),
        ("warm ids are 0 to 16: expected 0 to 15", {"warm": WarmStart(centroids, outside)}),
        ("warm ids are -1 to 15", {"warm": WarmStart(centroids, below)}),
    ]
    for words, options in cases:
        with pytest.raises(ShapeError, match=words) as error:
            encode(x, config, **options)
        assert "expected" in str(error.value)
        assert "\n" not in str(error.value)
    same = encode(x, config, warm=WarmStart(centroids.half(), ids.to(torch.int32)))
    assert same == encode(x, config, warm=WarmStart(centroids.half().bfloat16(), ids))


@pytest.mark.parametrize("method", ["qvg", "quantwm:qvg4"])
def test_a_cache_starts_spans_from_ids(method: str) -> None:
    """And what is kept for that counts, also when the span it came from has left the window."""
    names = method.split(":")
    codecs = [small_codec(name, warm_start="ids") for name in (names[0], names[-1])]
    config = preset("qvg", keys=codecs[0], values=codecs[1], window_frames=3)
    cache = cache_for(config)
    chunks = chunks_of([24, 24, 24, 16, 16], passes=1)
    before = None
    for number, chunk in enumerate(chunks):
        drive(cache, [chunk])
        values = cache[0].values.segments[-1].payload
        assert values is not None
        x = chunk.passes[0][1].transpose(1, 2)
        warm = before if before is not None and before.shape == values.shape else None
        key = SpanKey(0, "value", number)
        assert values == encode(x, codecs[1], warm=warm, span_key=key)
        before = values
    cache[0].write(*chunks[0].passes[0][:2], start=96 + 8)
    parts = cache.ledger().parts
    assert [s.role for s in cache[0].values.segments] == ["open"]
    assert before is not None
    assert parts["ids"] == 2 * nbytes_of(before.tensors["ids"])
    assert parts["centroids"] == 2 * nbytes_of(before.tensors["centroids"])
    assert sum(parts.values()) == cache.nbytes


def test_empty_clusters_take_the_farthest_tokens() -> None:
    """Three centroids that nobody chooses, in a head each at another place of the list."""
    x = sample_tokens(1, 2, 120, 40, dtype=torch.float32)[0]
    start = x[:, :9].clone()
    start[0, [2, 5, 6]] = 1e4
    start[1, [0, 1, 8]] = -1e4
    for iterations in (1, 3):
        _, found = ops.kmeans(x, start, iterations, reseed_empty=True)
        for n in range(2):
            means = start[n].clone()
            for _ in range(iterations):
                mu = means.bfloat16().float()
                distance = (x[n].bfloat16().double()[:, None] - mu.double()).square().sum(-1)
                ids = distance.argmin(-1)
                own = (x[n] - mu[ids]).double().square().sum(-1)
                farthest = np.argsort(-own.numpy(), kind="stable").tolist()
                for j in range(9):
                    if (ids == j).any():
                        means[j] = x[n][ids == j].mean(0)
                    else:
                        means[j] = x[n, farthest.pop(0)]
            torch.testing.assert_close(found[n], means.bfloat16(), rtol=2**-7, atol=0)
    _, kept = ops.kmeans(x, start, 3)
    assert kept[0, [2, 5, 6]].eq(start[0, [2, 5, 6]].bfloat16()).all()


def test_reseeding_changes_nothing_where_no_cluster_is_empty() -> None:
    x = sample_tokens(1, 2, 120, 40)
    plain, reseeded = (
        encode(x, CodecConfig("qvg", centroids=6, reseed_empty=flag)) for flag in (False, True)
    )
    assert all(len(plain.tensors["ids"][0, n].unique()) == 6 for n in range(2))
    assert torch.equal(plain.tensors["codes"], reseeded.tensors["codes"])
    equal = torch.ones(1, 1, 12, 32)  # every token is as far as the others: at no distance
    payload = encode(equal, CodecConfig("qvg", centroids=4, reseed_empty=True))
    assert torch.equal(payload.decode(torch.float32), equal)


@pytest.mark.parametrize("method", CLUSTERED)
def test_a_warm_start_with_dead_centroids_gains_by_reseeding(method: str) -> None:
    x = sample_tokens(tokens=300)
    start = x[:, :, None, :16].clone()
    start[..., 4:, :] = 1e4
    plain, reseeded = (
        encode(x, CodecConfig(method, centroids=16, reseed_empty=flag), initial_centroids=start)
        for flag in (False, True)
    )
    used = [len(payload.tensors["ids"][0, 0].unique()) for payload in (plain, reseeded)]
    assert used[0] <= 4 < 10 < used[1]
    assert sqnr(x, reseeded.decode()) > sqnr(x, plain.decode()) + 1


@pytest.mark.parametrize("method", CLUSTERED)
def test_refit_moves_centroids_to_the_mean_of_what_is_left(method: str) -> None:
    """With ids and codes as they are; the compensation is measured against the moved ones."""
    x = sample_tokens(1, 3, 200, 64)
    stats = sample_moment(x)
    plain, refit = (
        encode(x, CodecConfig(method, centroids=16, refit=flag), stats=stats)
        for flag in (False, True)
    )
    for name in ("codes", "ids"):
        assert torch.equal(plain.tensors[name], refit.tensors[name])
    assert refit.nbytes == plain.nbytes
    grid = "symmetric" if method == "qvg" else "affine_zero"
    rest = {k: t.flatten(0, 1) for k, t in plain.tensors.items()}
    residual = ops.group_dequantize(rest, grid, 2, 64, 64, 0, 200)
    errors = []
    for n in range(3):
        ids = plain.tensors["ids"][0, n, 0].long()
        mu = plain.centroids[0, n, 0].float().clone()  # type: ignore[index]
        for j in ids.unique().tolist():
            mu[j] = (x[0, n].float() - residual[n])[ids == j].mean(0)
        found = refit.centroids[0, n, 0]  # type: ignore[index]
        torch.testing.assert_close(found, mu.bfloat16(), rtol=2**-7, atol=1e-6)
        error = x[0, n].float() - residual[n] - found.float()[ids]
        before = x[0, n].float() - residual[n] - plain.centroids[0, n, 0].float()[ids]  # type: ignore[index]
        assert error.square().sum() < before.square().sum()
        errors.append(error)
    if "basis" not in refit.tensors:
        assert sqnr(x, refit.decode()) > sqnr(x, plain.decode())
        return
    codes, scales, _ = ops.compensate(
        torch.stack(errors), refit.tensors["basis"][0], stats.moment[0], "row"
    )
    for found, expected in ((codes, "coef_codes"), (scales, "coef_scales")):
        stored = refit.tensors[expected][0].float()
        assert ((found.float() - stored).abs() > 1e-3 * stored.abs() + 1).float().mean() < 0.01


@pytest.mark.parametrize("method", ["qvg", "qvg4"])
def test_refit_moves_the_last_stage_alone(method: str) -> None:
    """The stages before it, ids and codes stay, and the decoded error falls."""
    x = sample_tokens(1, 2, 200, 64)
    plain, refit = (
        encode(x, CodecConfig(method, centroids=16, stages=3, refit=flag)) for flag in (False, True)
    )
    for name in ("codes", "ids"):
        assert torch.equal(plain.tensors[name], refit.tensors[name])
    before, after = plain.tensors["centroids"], refit.tensors["centroids"]
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert not torch.equal(before[:, :, 2], after[:, :, 2])
    assert sqnr(x, refit.decode(torch.float32)) > sqnr(x, plain.decode(torch.float32))


@pytest.mark.parametrize("method", CLUSTERED)
def test_ids_start_fp8_centroids_of_every_stage(method: str) -> None:
    """From the means under the ids; an empty cluster starts from its decoded centroid."""
    stages = 2 if method in ("qvg", "qvg4") else 1
    config = CodecConfig(
        method, centroids=16, centroid_format="fp8", stages=stages, warm_start="ids"
    )
    before = encode(sample_tokens(tokens=80), config)
    before.tensors["ids"][before.tensors["ids"] == 5] = 6  # cluster 5 is empty
    x = sample_tokens(tokens=80, seed=3)
    warm = encode(x, config, warm=before)
    residual = x[0].float()
    for stage in range(stages):
        ids = before.tensors["ids"][0, :, stage].long()
        start = ops.cluster_means(residual, ids, before.centroids[0, :, stage])  # type: ignore[index]
        assert torch.equal(start[:, 5], before.centroids[0, :, stage, 5])  # type: ignore[index]
        _, means = ops.kmeans(residual, start, config.iterations, rounded=False)
        stored, values, _ = ops.quantize_centroids(means)
        for name, tensor in stored.items():
            assert torch.equal(warm.tensors[name][0, :, stage].float(), tensor.float()), name
        found = warm.tensors["ids"][0, :, stage].long()
        residual = residual - ops.gather_centroids(values, found).float()


def test_a_head_that_gains_nothing_keeps_its_centroids() -> None:
    """Tokens that are centroids have no error to lose; the other head moves its centroids."""
    x = sample_tokens(1, 2, 40, 32).float()
    x[0, 0] = x[0, 0, :4].repeat_interleave(10, 0)
    start = x[:, :, None, ::10].clone()
    plain, refit = (
        encode(x, CodecConfig("qvg4", centroids=4, refit=flag), initial_centroids=start)
        for flag in (False, True)
    )
    same = [torch.equal(plain.centroids[0, n], refit.centroids[0, n]) for n in range(2)]  # type: ignore[index]
    assert same == [True, False]
    x = torch.full((1, 1, 20, 16), 3.4e38)  # no square of it is finite
    payload = encode(x, CodecConfig("qvg4", centroids=4, refit=True))
    assert payload.centroids.isfinite().all()  # type: ignore[union-attr]
