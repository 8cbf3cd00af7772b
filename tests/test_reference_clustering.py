"""k-means and QSAC, against plain loops; ties, empty clusters, order of summation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.reference.blocks import row_blocks, tree_sum
from steadykv.reference.kmeans import cluster_means

from .codecs import DEVICES, sample_moment, sample_tokens


def start(x: Tensor, clusters: int) -> Tensor:
    return x[:, :clusters].clone()


def by_hand(x: Tensor, centroids: Tensor, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """One head, FP64 distances of BF16 tokens, FP32 sums one token at a time."""
    tokens, means = x.bfloat16().double().numpy(), centroids.float().numpy().copy()
    ids = np.zeros(len(tokens), np.int64)
    for turn in range(iterations + 1):
        mu = torch.from_numpy(means).bfloat16().double().numpy()
        ids = ((tokens[:, None] - mu) ** 2).sum(-1).argmin(-1)
        if turn == iterations:
            means = mu.astype(np.float32)
            break
        for j in range(len(means)):
            members = x.numpy()[ids == j]
            total = np.zeros(x.shape[-1], np.float32)
            for member in members:
                total = total + member
            means[j] = total / np.float32(len(members)) if len(members) else means[j]
    return ids, means


@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_kmeans_by_hand(iterations: int) -> None:
    x = sample_tokens(1, 2, 150, 40, dtype=torch.float32)[0]
    ids, centroids = ops.kmeans(x, start(x, 9), iterations)
    assert ids is not None
    assert centroids.dtype == torch.bfloat16
    for head in range(2):
        expected_ids, expected_means = by_hand(x[head], start(x, 9)[head], iterations)
        assert np.array_equal(ids[head].numpy(), expected_ids)
        assert np.array_equal(centroids[head].float().numpy(), expected_means)
    _, alone = ops.kmeans(x, start(x, 9), iterations, with_ids=False)
    assert torch.equal(alone, centroids)


def test_kmeans_lowers_the_distance() -> None:
    x = sample_tokens(1, 2, 300, 64, dtype=torch.float32)[0]
    errors = []
    for iterations in (0, 1, 2, 6):
        ids, centroids = ops.kmeans(x, start(x, 12), iterations)
        assert ids is not None
        errors.append(float((x - ops.gather_centroids(centroids, ids)).square().mean()))
    assert errors[0] > errors[1] >= errors[2] >= errors[3]
    assert errors[3] < 0.8 * errors[0]


def test_ties_go_to_the_lowest_index_and_empty_clusters_stay() -> None:
    x = torch.zeros(1, 5, 4)
    centroids = torch.tensor([[[1.0] * 4, [-1.0] * 4, [1.0] * 4, [7.0] * 4]])
    ids, final = ops.kmeans(x, centroids, 0)
    assert ids is not None
    assert ids.tolist() == [[0] * 5]
    ids, final = ops.kmeans(x, centroids, 2)
    assert ids is not None
    assert ids.tolist() == [[0] * 5]
    assert final[0, :, 0].tolist() == [0, -1, 1, 7]


@pytest.mark.parametrize("device", DEVICES)
def test_means_add_in_token_order(device: str) -> None:
    """Large numbers of both signs make any other order visible; sorting first changes no bit."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 400, 24, generator=generator) * 10 ** torch.randn(
        2, 400, 24, generator=generator
    )
    ids = torch.randint(0, 7, (2, 400), generator=generator)
    previous = torch.full((2, 8, 24), 5.0)  # cluster 7 is empty
    found = cluster_means(x.to(device), ids.to(device), previous.to(device)).cpu()
    expected = previous.clone()
    for head in range(2):
        for j in range(7):
            total = torch.zeros(24)
            members = x[head][ids[head] == j]
            for member in members:
                total = total + member
            expected[head, j] = total / len(members)
    assert torch.equal(found, expected)
    flat = (ids + 8 * torch.arange(2)[:, None]).view(-1)
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=16)
    sums = torch.segment_reduce(x.view(-1, 24)[order], "sum", lengths=counts, axis=0, unsafe=True)
    sorted_means = (sums / counts.clamp(min=1)[:, None]).view(2, 8, 24)
    assert torch.equal(sorted_means[:, :7], expected[:, :7])


def test_numbers_at_the_end_of_float32_stay_finite() -> None:
    x = torch.full((1, 6, 8), 3e38)
    ids, centroids = ops.kmeans(x, start(x, 2), 2)
    assert ids is not None
    assert centroids.isfinite().all()


def qsac_by_hand(x: Tensor, mu: Tensor, w: Tensor, candidates: int, size: int) -> list[int]:
    """One head: eq. 10 to 14 in FP64."""
    chosen = []
    for token in x.double().numpy():
        residual = token - mu.double().numpy()
        weight = w.double().numpy()
        distance = (weight * residual**2).sum(-1)
        near = np.argsort(distance, kind="stable")[:candidates]
        scores = []
        for j in near:
            score = 0.0
            for at in range(0, len(token), size):
                part, share = residual[j][at : at + size], weight[at : at + size].sum()
                score += share * (max(part.max(), 0) - min(part.min(), 0)) ** 2
            scores.append(score)
        chosen.append(int(near[int(np.argmin(scores))]))
    return chosen


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("candidates", [1, 4, 100])
@pytest.mark.parametrize("size", [16, 24, 64])
def test_qsac_by_hand(candidates: int, size: int, is_weighted: bool) -> None:
    x = sample_tokens(1, 2, 60, 40, dtype=torch.float32)
    moment = sample_moment(x)
    weight, _ = ops.channel_weight(moment.moment[0], moment.count[0])
    _, mu = ops.kmeans(x[0], start(x[0], 11), 2)
    ids = ops.select_centroids(x[0], mu, weight if is_weighted else None, candidates, size)
    assert ids.dtype == torch.int64
    for head in range(2):
        w = weight[head] if is_weighted else torch.ones(40)
        assert ids[head].tolist() == qsac_by_hand(x[0, head], mu[head], w, candidates, size)


def test_one_candidate_is_the_nearest_centroid() -> None:
    x = sample_tokens(1, 2, 200, 64)[0].float()
    ids, mu = ops.kmeans(x, start(x, 16), 2)
    assert torch.equal(ops.select_centroids(x, mu, None, 1, 64), ids)


def test_qsac_prefers_the_smaller_range() -> None:
    """The first centroid is nearer; the second leaves a residual of one sign, a smaller range."""
    token = torch.zeros(1, 1, 4)
    near = torch.tensor([1.0, -1.0, 1.0, -1.0])
    even = torch.full((4,), 1.1)
    mu = torch.stack([near, even])[None].bfloat16()
    assert ops.select_centroids(token, mu, None, 1, 4).item() == 0
    assert ops.select_centroids(token, mu, None, 2, 4).item() == 1
    twice = torch.cat([mu, mu], 1)
    assert ops.select_centroids(token, twice, None, 4, 4).item() == 1


def test_tree_sum_and_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 7, 128, 129):
        x = torch.randn(5, length, generator=generator)
        before = x.clone()
        torch.testing.assert_close(tree_sum(x), x.sum(-1))
        assert torch.equal(x, before)
    assert list(row_blocks(5, 1 << 40, torch.device("cpu"))) == [slice(i, i + 1) for i in range(5)]
    assert list(row_blocks(5, 1, torch.device("cpu"))) == [slice(0, 5)]
    assert list(row_blocks(0, 1, torch.device("cpu"))) == []
