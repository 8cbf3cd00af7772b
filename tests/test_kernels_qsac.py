"""The QSAC kernels against their reference: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.kernels.launch import smaller_device

from .codecs import sample_moment, sample_tokens
from .gpu_checks import check_capture, check_compilations, check_repeatable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_memory")
DISTANCE = 2.0**-16  # of |k|_w^2 + |mu|_w^2: closer distances may change places
SCORE = 2.0**-20  # of the scores


def given(
    tokens: int,
    width: int,
    clusters: int,
    *,
    heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    is_weighted: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, centroids and channel weights."""
    x = sample_tokens(1, heads, tokens + clusters, width, seed=tokens)
    stats = sample_moment(x)
    weight, _ = ops.channel_weight(stats.moment[0], stats.count[0], backend="reference")
    x = x[0].to(DEVICE)
    centroids = x[:, tokens:].contiguous()
    return (
        x[:, :tokens].to(dtype).contiguous(),
        centroids,
        weight.to(DEVICE) if is_weighted else None,
    )


def distances(x: Tensor, mu: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """d_Q in FP64 [S, C], and how far apart two of a token must be to keep their order [S]."""
    d = ((x[:, None] - mu).square() * w).sum(-1)
    return d, DISTANCE * ((x.square() * w).sum(-1) + (mu.square() * w).sum(-1).max())


def scores(x: Tensor, mu: Tensor, w: Tensor, size: int, include_zero: bool) -> Tensor:
    total = torch.zeros(x.shape[0], mu.shape[0], dtype=torch.float64, device=x.device)
    rest = x[:, None] - mu
    for part, weights in zip(rest.split(size, -1), w.split(size), strict=True):
        low, high = part.amin(-1), part.amax(-1)
        if include_zero:
            low, high = low.clamp(max=0), high.clamp(min=0)
        total += weights.sum() * (high - low).square()
    return total


def check(
    x: Tensor,
    centroids: Tensor,
    weight: Tensor | None,
    candidates: int = 4,
    size: int = 64,
    include_zero: bool = True,
) -> Tensor:
    """Ids are the reference's, or what it could have taken instead within the stated bounds."""
    found, expected = (
        ops.select_centroids(
            x if name == "triton" else x.float(),
            centroids,
            weight,
            candidates,
            size,
            include_zero=include_zero,
            backend=name,
        )
        for name in ("triton", "reference")
    )
    assert found.dtype == torch.int64
    differing = found != expected
    assert differing.sum() <= 0.01 * differing.numel()
    for n in range(x.shape[0]):
        tokens = differing[n].nonzero()[:, 0]
        if not len(tokens):
            continue
        k, mu = x[n, tokens].double(), centroids[n].double()
        w = torch.ones_like(mu[0]) if weight is None else weight[n].double()
        d, bound = distances(k, mu, w)
        edge = d.sort(1).values[:, min(candidates, len(mu)) - 1]
        one, other = (i[n, tokens, None] for i in (found, expected))
        assert (d.gather(1, one)[:, 0] <= edge + bound).all()  # it is a candidate
        total = scores(k, mu, w, size, include_zero)
        least = total.masked_fill(d > (edge - bound)[:, None], torch.inf).amin(1)
        # No sure candidate is better than what was taken.
        assert (total.gather(1, one)[:, 0] <= least * (1 + SCORE)).all() or candidates == 1
        near_tie = (total.gather(1, one) / total.gather(1, other) - 1)[:, 0].abs() <= SCORE
        on_edge = ((d - edge[:, None]).abs() <= bound[:, None]).sum(1) > 1
        assert (near_tie | on_edge).all()
    return found


@pytest.mark.parametrize(
    ("width", "size", "clusters"),
    [(64, 64, 32), (128, 64, 40), (80, 64, 7), (96, 16, 20), (64, 24, 17), (50, 14, 5)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ids_are_those_of_the_reference(
    width: int, size: int, clusters: int, dtype: torch.dtype
) -> None:
    check(*given(70, width, clusters, dtype=dtype), size=size)


@pytest.mark.parametrize("tokens", [1, 31, 128, 131])
def test_any_number_of_tokens(tokens: int) -> None:
    check(*given(tokens, 64, 16))


@pytest.mark.parametrize("candidates", [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize("clusters", [1, 6, 24])
def test_any_number_of_candidates(candidates: int, clusters: int) -> None:
    check(*given(40, 32, clusters), candidates)


@pytest.mark.parametrize("clusters", [130, 256, 300, 520])
def test_centroids_in_chunks(clusters: int) -> None:
    case = given(30, 32, clusters, heads=1)
    ids = check(*case)
    with smaller_device(99_000):
        again = check(*case)
    assert (ids != again).sum() <= 1
    check(*given(30, 32, clusters, heads=1, dtype=torch.float32))


def test_options() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(*given(70, 64, 20, dtype=dtype), include_zero=False)
        x, centroids, weight = given(70, 64, 20, dtype=dtype, is_weighted=False)
        check(x, centroids, weight)
        check(x, centroids.float() * 1.001, weight)
    check(*given(40, 256, 20, heads=1), size=128)
    check(*given(40, 256, 20, heads=1), size=256)


def test_the_full_metric_is_the_reference() -> None:
    x, centroids, weight = given(40, 32, 10)
    metric = torch.eye(32, device=DEVICE).expand(2, 32, 32) * torch.linspace(1, 2, 32).to(DEVICE)
    found, expected = (
        ops.select_centroids(x.float(), centroids, weight, 4, 16, metric=metric, backend=name)
        for name in ("triton", "reference")
    )
    assert torch.equal(found, expected)


def test_equal_centroids_give_the_lowest_index() -> None:
    x, centroids, weight = given(40, 32, 12)
    for clusters in (centroids[:, :1].expand(2, 12, 32), centroids.repeat(1, 25, 1)):
        ids = check(x, clusters.contiguous(), weight)
        assert (ids < 12).all()
    assert not check(x, centroids[:, :1].repeat(1, 12, 1), weight).any()


def test_heads_do_not_depend_on_their_neighbours() -> None:
    x, centroids, weight = given(70, 32, 12, heads=3)
    assert weight is not None
    together = check(x, centroids, weight)
    for n in range(3):
        assert torch.equal(
            check(x[n : n + 1], centroids[n : n + 1], weight[n : n + 1])[0], together[n]
        )


@pytest.mark.cuda
def test_on_a_gpu_bytes_repeat_and_graphs_capture() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = given(3001, 128, 256, dtype=dtype)
        check(*case)

        def call(case: tuple = case) -> tuple[Tensor]:
            return (ops.select_centroids(*case, 4, 64, backend="triton"),)

        check_repeatable(call)
        check_capture(call)


@pytest.mark.cuda
def test_on_a_gpu_a_new_length_compiles_nothing() -> None:
    cases = {tokens: given(tokens, 64, 64) for tokens in range(90, 1300, 61)}
    check_compilations(lambda n: ops.select_centroids(*cases[n], 4, 64, backend="triton"), cases)
