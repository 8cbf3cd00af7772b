"""Fields that the papers vary or leave open: each against the plain way of saying it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload, QueryMoment, WarmStart, encode
from steadykv.config import CodecConfig

from .codecs import sample_moment, sample_tokens, sqnr
from .conftest import poisoned_allocations


def encoded_bytes(config: CodecConfig, shape: tuple[int, int, int, int]) -> int:
    """Size of a compensated payload, from the formulas of the methods."""
    batch, heads, tokens, width = shape
    bits, groups = config.bits, -(-width // config.group_size)
    nbytes = tokens * -(-width * bits // 8) + tokens * (1 if config.centroids <= 256 else 2)
    nbytes += 2 * min(config.centroids, tokens) * width
    zeros = -(-tokens * groups * bits // 8)
    nbytes += tokens * groups + (0 if config.method == "qvg" else zeros + 2)
    rank = min(config.rank, width) if config.needs_queries else 0
    return batch * heads * (nbytes + (2 * width * rank + tokens * (rank + 2) if rank else 0))


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "qvg", "centroids": 512},
        {"method": "qvg4", "centroids": 512, "group_size": 16},
        {"method": "quantwm", "centroids": 512},
        {"method": "quantwm", "centroids": 257, "candidates": 256},
        {"method": "quantwm", "centroids": 64, "candidates": 1, "rank": 0},
        {"method": "quantwm", "centroids": 64, "rank": 32, "group_size": 128},
        {"method": "quantwm", "centroids": 64, "rank": 1, "coef_layout": "auto"},
        {"method": "quantwm", "centroids": 512, "rank": 32},
        {"method": "quantwm", "centroids": 64, "candidates": 256, "rank": 2, "metric": "full"},
        {"method": "quantwm", "centroids": 64, "rank": 200},
    ],
    ids=str,
)
def test_the_ranges_of_the_papers(fields: dict[str, Any], tmp_path: Path) -> None:
    x = sample_tokens(1, 2, 700, 128)
    config = CodecConfig(**fields)
    payload = encode(x, config, stats=sample_moment(x))
    if config.coef_layout == "dense":
        assert payload.nbytes == config.payload_nbytes(*x.shape) == encoded_bytes(config, x.shape)
    assert payload.tensors["ids"].dtype == (
        torch.uint8 if config.centroids <= 256 else torch.uint16
    )
    ids = payload.tensors["ids"].to(torch.int32)
    assert ids.max() < config.centroids
    assert len(ids.unique()) > config.centroids / 2
    assert sqnr(x, payload.decode()) > 10
    payload.save(tmp_path / "p")
    loaded = Payload.load(tmp_path / "p")
    assert loaded == payload
    assert torch.equal(loaded.decode(), payload.decode())
    assert torch.equal(loaded.decode(start=300, end=411), payload.decode()[:, :, 300:411])


# --- the full metric of QSAC ----------------------------------------------------------------------


def chosen_by_hand(
    x: Tensor, mu: Tensor, m: Tensor, candidates: int, size: int, include_zero: bool = True
) -> list[int]:
    """One head in FP64: the nearest by e^T M e, then the least weighted range."""
    w = m.diagonal() / m.diagonal().mean()
    chosen = []
    for token in x.double():
        error = token - mu.double()
        distance = ((error @ m.double()) * error).sum(-1)
        near = np.argsort(distance.numpy(), kind="stable")[:candidates]
        scores = []
        for j in near:
            score = 0.0
            for part, share in zip(error[j].split(size), w.double().split(size), strict=True):
                low, high = float(part.min()), float(part.max())
                if include_zero:
                    low, high = min(low, 0.0), max(high, 0.0)
                score += float(share.sum()) * (high - low) ** 2
            scores.append(score)
        chosen.append(int(near[int(np.argmin(scores))]))
    return chosen


@pytest.mark.parametrize("candidates", [1, 4, 11])
@pytest.mark.parametrize("include_zero", [True, False])
def test_the_full_metric_by_hand(candidates: int, include_zero: bool) -> None:
    x = sample_tokens(1, 2, 60, 40, dtype=torch.float32)
    stats = sample_moment(x)
    m, count = stats.moment[0], stats.count[0]
    _, mu = ops.kmeans(x[0], x[0, :, :11].clone(), 2)
    weight, _ = ops.channel_weight(m, count)
    root, active = ops.query_metric(m, count)
    assert (root.dtype, active.tolist()) == (torch.float32, [1, 1])
    mean = m.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    torch.testing.assert_close(root @ root.mT, m / mean, rtol=1e-4, atol=1e-4)
    ids = ops.select_centroids(
        x[0], mu, weight, candidates, 16, metric=root, include_zero=include_zero
    )
    for n in range(2):
        expected = chosen_by_hand(x[0, n], mu[n], m[n], candidates, 16, include_zero)
        assert ids[n].tolist() == expected


def test_a_diagonal_moment_makes_both_metrics_one() -> None:
    x = sample_tokens(1, 2, 200, 64)
    stats = sample_moment(x)
    diagonal = torch.diag_embed(stats.moment.diagonal(dim1=-2, dim2=-1))
    stats = QueryMoment(diagonal, stats.count)
    full, plain = (
        encode(x, CodecConfig("quantwm", centroids=16, metric=metric), stats=stats)
        for metric in ("full", "diagonal")
    )
    assert torch.equal(full.tensors["ids"], plain.tensors["ids"])
    other = encode(
        x, CodecConfig("quantwm", centroids=16, metric="full"), stats=sample_moment(x, seed=2)
    )
    assert not torch.equal(other.tensors["ids"], plain.tensors["ids"])


def test_without_statistics_the_full_metric_is_the_plain_one() -> None:
    """Cold, without queries, with a moment of zero or a broken one: and the payload says so."""
    x = sample_tokens(1, 4, 80, 64)
    stats = sample_moment(x)
    stats.count[0, 1] = 0
    stats.moment[0, 2] = 0
    stats.moment[0, 3, 5, 6] = torch.nan
    config = CodecConfig("quantwm", centroids=16, metric="full")
    cold, mixed = encode(x, config), encode(x, config, stats=stats)
    assert mixed.flags["weight_active"].tolist() == [[1, 0, 0, 0]]
    assert torch.equal(mixed.tensors["ids"][:, 1:], cold.tensors["ids"][:, 1:])
    assert not torch.equal(mixed.tensors["ids"][:, :1], cold.tensors["ids"][:, :1])
    diagonal = encode(x, CodecConfig("quantwm", centroids=16))
    assert torch.equal(cold.tensors["ids"], diagonal.tensors["ids"])


# --- grids ----------------------------------------------------------------------------------------


def by_groups(
    x: np.ndarray, size: int, include_zero: bool, factors: tuple[float, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One head: codes, scale codes and zero points, a group at a time in FP32."""
    f32 = np.float32
    parts = [[row[at : at + size] for at in range(0, len(row), size)] for row in x]
    lows = [[min(p.min(), f32(0)) if include_zero else p.min() for p in row] for row in parts]
    highs = [[max(p.max(), f32(0)) if include_zero else p.max() for p in row] for row in parts]
    wanted = (np.array(highs, f32) - np.array(lows, f32)) / f32(3)
    base = f32(np.float16(wanted.max() / f32(255)))
    codes, steps, zeros = np.zeros(x.shape, int), np.zeros(wanted.shape), np.zeros(wanted.shape)
    for t, row in enumerate(parts):
        for g, part in enumerate(row):
            least = None
            for factor in factors:
                a = np.clip(np.rint(f32(f32(factor) * wanted[t, g]) / base), 1, 255)
                s = f32(base * f32(a))
                z = np.clip(np.rint(-lows[t][g] / s), 0, 3).astype(f32)
                q = np.clip(np.rint(part / s) + z, 0, 3)
                error = ((part.astype(np.float64) - s * (q - z)) ** 2).sum()
                if least is None or error < least * (1 - 1e-6):
                    least = error
                    codes[t, g * size : g * size + len(part)] = q
                    steps[t, g], zeros[t, g] = a, z
    return codes, steps, zeros


@pytest.mark.parametrize("include_zero", [True, False])
@pytest.mark.parametrize("scale_search", [False, True])
@pytest.mark.parametrize("size", [16, 24])
def test_grids_group_by_group(include_zero: bool, scale_search: bool, size: int) -> None:
    x = sample_tokens(1, 2, 30, 40, dtype=torch.float32)[0] + 2  # many groups of one sign
    tensors, _ = ops.group_quantize(
        x, "affine_zero", 2, size, include_zero=include_zero, scale_search=scale_search
    )
    groups = -(-40 // size)
    factors = (1.0, 0.9, 0.8, 0.7, 0.6) if scale_search else (1.0,)
    used = set()
    for n in range(2):
        codes, steps, zeros = by_groups(x[n].numpy(), size, include_zero, factors)
        assert np.array_equal(tensors["scale_codes"][n].numpy(), steps)
        found = ops.unpack(tensors["zeros"][n], 2, 30 * groups).view(30, groups)
        assert np.array_equal(found.numpy(), zeros)
        assert np.array_equal(ops.unpack(tensors["codes"][n], 2, 40).numpy(), codes)
        used |= set(zeros.flatten())
    assert used <= {0, 1, 2, 3}


def test_a_range_without_zero_cuts_groups_of_one_sign() -> None:
    """Why the range reaches to zero by default: the zero point cannot leave the codes."""
    x = sample_tokens().float() + 20
    fields = {"centroids": 1, "iterations": 0}
    zero = torch.zeros(1, 2, 1, 1, 64)
    good, bad = (
        encode(x, CodecConfig("qvg4", include_zero=flag, **fields), initial_centroids=zero)
        for flag in (True, False)
    )
    reach = float((x.amax(-1) - x.amin(-1)).max())
    assert bad.decode().max() <= 1.01 * reach < 0.9 * x.max()
    assert good.decode().max() >= 0.99 * x.max()
    assert sqnr(x, good.decode()) > sqnr(x, bad.decode()) + 1.5
    assert good.nbytes == bad.nbytes


def test_a_searched_scale_lowers_the_error_of_every_group() -> None:
    x = sample_tokens(1, 2, 100, 64).float()
    errors = []
    for search in (False, True):
        tensors, _ = ops.group_quantize(x[0], "affine_zero", 2, 16, scale_search=search)
        value = ops.group_dequantize(tensors, "affine_zero", 2, 16, 64, 0, 100)
        errors.append((value - x[0]).square().unflatten(-1, (4, 16)).sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert 0.5 < errors[1].sum() / errors[0].sum() < 0.9
    plain, searched = (
        encode(x, CodecConfig("qvg4", centroids=16, scale_search=search))
        for search in (False, True)
    )
    assert plain.nbytes == searched.nbytes
    assert sqnr(x, plain.decode()) + 0.3 < sqnr(x, searched.decode()) < sqnr(x, plain.decode()) + 3


@pytest.mark.parametrize("candidates", [1, 4])
def test_without_a_metric_only_the_choice_of_centroids_forgets_the_queries(candidates: int) -> None:
    """Ids are those of a cold start, and the correction is measured and stored as ever."""
    x = sample_tokens(1, 2, 200, 64)
    stats = sample_moment(x)
    config = CodecConfig("quantwm", centroids=16, metric="none", candidates=candidates)
    payload, cold = encode(x, config, stats=stats), encode(x, config)
    weighted = encode(x, CodecConfig("quantwm", centroids=16, candidates=candidates), stats=stats)
    assert torch.equal(payload.tensors["ids"], cold.tensors["ids"])
    assert torch.equal(payload.centroids, cold.centroids)  # type: ignore[arg-type]
    assert not torch.equal(payload.tensors["ids"], weighted.tensors["ids"])
    assert payload.flags["weight_active"].tolist() == [[0, 0]]
    assert weighted.flags["weight_active"].tolist() == [[1, 1]]
    assert payload.flags["psac_active"].tolist() == [[1, 1]]
    assert torch.equal(payload.tensors["basis"], weighted.tensors["basis"])
    assert payload.tensors["coef_codes"].any()
    assert torch.equal(payload.tensors["codes"], cold.tensors["codes"])
    plain = ops.select_centroids(
        x[0].float(), payload.tensors["centroids"][0, :, 0], None, candidates, 64
    )
    assert torch.equal(payload.tensors["ids"][0, :, 0].long(), plain)


# --- all together ---------------------------------------------------------------------------------


OPTIONS = [
    {"method": "qvg", "warm_start": "ids", "reseed_empty": True, "refit": True},
    {"method": "qvg4", "include_zero": False, "scale_search": True, "refit": True},
    {"method": "quantwm", "metric": "full", "include_zero": False, "reseed_empty": True},
    {"method": "quantwm", "metric": "full", "refit": True, "reseed_empty": True},
    {"method": "quantwm", "warm_start": "ids", "include_zero": False, "bits": 4, "rank": 0},
    {"method": "quantwm", "metric": "none", "bits": 3, "centroid_format": "fp8"},
    {"method": "qvg", "stages": 3, "refit": True, "reseed_empty": True, "packing": "trits"},
    {"method": "qvg", "stages": 2, "warm_start": "ids", "centroid_format": "fp8",
     "reseed_empty": True, "metadata": "int8"},
    {"method": "qvg4", "stages": 2, "warm_start": "ids", "scale_search": True, "bits": 3},
    {"method": "quantwm", "metric": "full", "metadata": "fp8", "centroid_format": "fp8",
     "warm_start": "ids"},
]  # fmt: skip


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_options_keep_what_holds_for_every_codec(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, passes, blocks, threads and dirty memory change no byte; absurd numbers stay
    finite, and zeros zero."""
    config = CodecConfig(centroids=16, **fields)
    x, former = sample_tokens(2, 3, 101, 80), sample_tokens(2, 3, 101, 80, seed=4)
    stats = sample_moment(x)
    warm = encode(former, config)
    both = encode(x, config, stats=stats, warm=warm)
    assert both.nbytes == config.payload_nbytes(2, 3, 101, 80)
    assert CodecConfig.from_dict(config.to_dict()) == config
    for row in range(2):
        alone = encode(
            x[row, None],
            config,
            stats=QueryMoment(stats.moment[row, None].clone(), stats.count[row, None].clone()),
            warm=WarmStart(warm.centroids[row, None], warm.tensors["ids"][row, None]),  # type: ignore[index]
        )
        for name, tensor in alone.tensors.items():
            assert torch.equal(both.tensors[name][row, None].view(torch.uint8),
                               tensor.view(torch.uint8)), name  # fmt: skip
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert encode(x, config, stats=stats, warm=warm) == both
    finally:
        torch.set_num_threads(threads)
    with poisoned_allocations() as poison:
        assert encode(x, config, stats=stats, warm=warm) == both
    assert poison.filled
    monkeypatch.setattr("steadykv.codecs.encoder.WORKSPACE_BYTES", 4 * 101 * 80)
    monkeypatch.setattr("steadykv.reference.blocks.CPU_BLOCK_BYTES", 4 * 17 * 80)
    assert encode(x, config, stats=stats, warm=warm) == both
    for size in (1e5, 1e36, 1e-7, 1e-38):
        payload = encode((x.float() / 64 * size).bfloat16(), config, stats=stats)
        decoded = payload.decode(torch.float32)
        assert decoded.isfinite().all()
    nothing = encode(
        torch.zeros(1, 1, 9, 80), config, stats=sample_moment(torch.zeros(1, 1, 9, 80))
    )
    assert not nothing.decode(torch.float32).any()
