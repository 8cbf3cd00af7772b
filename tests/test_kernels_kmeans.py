"""Kernels of k-means and of the rows it reads, against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from steadykv import ops
from steadykv.kernels import numbers
from tests.kernels import DEVICE, clustered_tokens, nearest_gap, score_bound, start_centroids

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = [(2, 150, 32, 20), (1, 129, 80, 16), (3, 40, 128, 40), (1, 200, 64, 1), (2, 3, 16, 3)]


def both(function, *arguments, **options):
    """What the kernel gives, and what the reference gives."""
    return [function(*arguments, **options, backend=name) for name in ("triton", "reference")]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_rows_are_clean_and_contiguous(kind: torch.dtype, layout: str) -> None:
    x = clustered_tokens(6, 37, 24).view(2, 3, 37, 24).to(kind)
    if layout == "BSHD":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    x[1, 0, 3, 5], x[1, 0, 36, 23], x[0, 2, 0, 0] = math.nan, math.inf, -math.inf
    before = x.clone()
    (rows, bad), (expected, counted) = both(ops.head_rows, x, 1, 5, wide=False)
    assert rows.is_contiguous()
    assert rows.dtype == (torch.bfloat16 if kind == torch.bfloat16 else torch.float32)
    assert torch.equal(rows.float(), expected)
    assert torch.equal(bad, counted)
    assert bad.tolist() == [0, 1, 2, 0]
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("heads", "tokens", "width", "clusters"), SHAPES)
def test_ids_are_the_nearest(heads: int, tokens: int, width: int, clusters: int) -> None:
    x = clustered_tokens(heads, tokens, width)
    centroids = start_centroids(x, clusters)
    ids, expected = both(ops.assign_centroids, x, centroids)
    assert ids.dtype == torch.int64
    assert int(ids.min()) >= 0
    assert int(ids.max()) < clusters
    gap, bound = nearest_gap(x, centroids, ids), score_bound(x, centroids)
    assert bool((gap <= bound).all())
    clear = nearest_gap(x, centroids, expected) == 0
    assert float((ids == expected)[clear].double().mean()) > 0.999


def test_a_tie_goes_to_the_lowest_index() -> None:
    x = clustered_tokens(1, 50, 32)
    centroids = start_centroids(x, 10)[:, [3, 1, 1, 3, 7, 7]]
    ids = ops.assign_centroids(x, centroids, backend="triton")
    assert set(ids.unique().tolist()) <= {0, 1, 4}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "tokens", "width", "clusters"), SHAPES)
def test_means_are_those_of_the_members(
    kind: torch.dtype, heads: int, tokens: int, width: int, clusters: int
) -> None:
    x = clustered_tokens(heads, tokens, width).to(kind)
    if kind == torch.float32:
        x = x + 1e-4 * torch.arange(tokens, device=DEVICE)[:, None] / 7  # needs all of FP32
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, max(1, clusters - 1), (heads, tokens), generator=generator).to(DEVICE)
    previous = start_centroids(x, clusters).float()
    means = ops.cluster_means(x, ids, previous, backend="triton")
    expected = ops.cluster_means(x.float(), ids, previous, backend="reference")
    wide = x.double()
    counts = torch.nn.functional.one_hot(ids, clusters).sum(1).clamp(min=1)
    size = torch.zeros_like(previous).double()
    size.scatter_add_(1, ids[..., None].expand_as(wide), wide.abs())
    bound = 2 * tokens * 2.0**-24 * size / counts[..., None] + 1e-12
    assert bool(((means.double() - expected.double()).abs() <= bound).all())
    if clusters > 1:
        assert torch.equal(means[:, -1], previous[:, -1])  # nobody's centroid stays


@pytest.mark.parametrize("iterations", [0, 2, 3])
def test_a_whole_run_is_as_good(iterations: int) -> None:
    x = clustered_tokens(2, 300, 64)
    start = start_centroids(x, 24)
    (ids, centroids), (_, expected) = both(ops.kmeans, x.float(), start, iterations)
    assert centroids.dtype == torch.bfloat16
    gap, bound = nearest_gap(x, centroids, ids), score_bound(x, centroids)
    assert bool((gap <= bound).all())
    errors = []
    for table in (centroids, expected):
        near = ops.assign_centroids(x.float(), table, backend="reference")
        left = ops.subtract_centroids(x.float(), table, near, backend="reference")
        errors.append(float(left.double().square().sum()))
    assert errors[0] <= 1.02 * errors[1]
    if iterations == 0:
        assert torch.equal(centroids, expected)


def test_options_of_a_run() -> None:
    x = clustered_tokens(1, 90, 32).float()
    start = start_centroids(x, 8)
    nothing, means = ops.kmeans(x, start, 1, rounded=False, backend="triton")
    assert nothing is None
    assert means.dtype == torch.float32
    none, rounded = ops.kmeans(x, start, 1, with_ids=False, backend="triton")
    assert none is None
    assert torch.equal(rounded, means.bfloat16())
    seeded = both(ops.kmeans, x, start, 2, reseed_empty=True)
    assert all(map(torch.equal, *seeded))


def test_what_a_centroid_leaves_is_exact() -> None:
    x = clustered_tokens(2, 45, 80)
    centroids = start_centroids(x, 12)
    ids = ops.assign_centroids(x.float(), centroids, backend="reference")
    expected = ops.subtract_centroids(x.float(), centroids, ids, backend="reference")
    for kind in (torch.bfloat16, torch.float32):
        left = ops.subtract_centroids(x.to(kind), centroids, ids, backend="triton")
        assert torch.equal(left, expected)


def test_kernels_are_compiled_in_this_file_only_where_there_is_a_gpu() -> None:
    assert numbers.finite is not None
    assert ops.explain("cpu")[0]["backend"] == "reference"  # never interpreted unasked


@pytest.mark.cuda
def test_the_same_bytes_on_every_run() -> None:
    x = clustered_tokens(12, 4680, 128, clusters=200)
    start = start_centroids(x, 256)
    first = ops.kmeans(x, start, 2, backend="triton")
    for _ in range(5):
        again = ops.kmeans(x, start, 2, backend="triton")
        assert all(map(torch.equal, first, again))
    alone = [ops.kmeans(x[n : n + 1], start[n : n + 1], 2, backend="triton") for n in range(12)]
    for part in range(2):
        assert torch.equal(torch.cat([run[part] for run in alone]), first[part])


@pytest.mark.parametrize(("clusters", "width"), [(16, 64), (37, 80), (3, 20)])
def test_eight_bits_of_a_mean_are_the_references(clusters: int, width: int) -> None:
    """Also of zeros of either sign, of means below the least and beyond the largest scale."""
    generator = torch.Generator().manual_seed(width)
    means = torch.randn(2, clusters, width, generator=generator)
    means *= torch.randint(-40, 24, (2, clusters, 1), generator=generator).float().exp2()
    means[0, 0], means[0, 1], means[0, 2] = 0.0, -0.0, 3e38
    means[1, 0, 0], means[1, 1] = torch.inf, torch.linspace(-448, 448, width)
    means[1, 2] = torch.nextafter(torch.tensor(7.0 * 2**-20), torch.tensor(1.0))
    made, values, lost = ops.quantize_centroids(means.to(DEVICE), backend="triton")
    wanted, expected, counted = ops.quantize_centroids(means.to(DEVICE), backend="reference")
    assert made.keys() == wanted.keys()
    for found, right in ((values, expected), *zip(made.values(), wanted.values(), strict=True)):
        assert (found.dtype, found.shape) == (right.dtype, right.shape)
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(lost, counted)
    assert (lost > 0).all()
