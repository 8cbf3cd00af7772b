"""What holds for every codec and any input: heads and rows stand alone, odd numbers stay finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steadykv.codecs import Payload, QueryMoment, encode
from steadykv.config import preset

from .codecs import ADAPTIVE_CASES, CASES, DEVICES, KEY, CodecCase, sample_tokens
from .grid_bounds import token_bound

every_codec = pytest.mark.parametrize("case", CASES, ids=str)
every_device = pytest.mark.parametrize("device", DEVICES)
any_shape = given(
    seed=st.integers(0, 1 << 16),
    batch=st.integers(2, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 50),
    head_dim=st.sampled_from([5, 24, 40]),
)
few = settings(max_examples=4)  # there is one such test for every case


def moment_of(stats: QueryMoment | None, rows: Tensor, heads: Tensor) -> QueryMoment | None:
    if stats is None:
        return None
    return QueryMoment(stats.moment[rows][:, heads], stats.count[rows][:, heads])


def bits_of(payload: Payload, case: CodecCase) -> dict[str, Tensor]:
    """Every tensor and flag as bytes [B, n], or [B, H, n] of what each head has for itself."""
    if case.config.coef_layout == "auto":  # rows of all heads in one list
        return {}
    lead = 1 if case.pools_heads else 2
    state = payload.state_dict().items()
    return {k: t[..., None].flatten(lead).contiguous().view(torch.uint8) for k, t in state}


@every_device
@every_codec
@few
@any_shape
def test_any_part_of_a_batch_is_encoded_as_if_alone(
    case: CodecCase, device: str, seed: int, batch: int, heads: int, tokens: int, head_dim: int
) -> None:
    x = sample_tokens(batch, heads, tokens, head_dim, seed=seed, device=device)
    stats, everyone = case.stats(x, seed), torch.arange(heads)
    whole = case.encode(x, stats, span_key=KEY)
    bits, decoded = bits_of(whole, case), whole.decode()
    cut = 1 + seed % (batch - 1)
    for part in (torch.arange(cut), torch.arange(cut, batch)):
        alone = case.encode(x[part], moment_of(stats, part, everyone), span_key=KEY)
        assert torch.equal(decoded[part], alone.decode())
        for name, mine in bits_of(alone, case).items():
            assert torch.equal(bits[name][part], mine), name


@every_device
@every_codec
@few
@any_shape
def test_permuted_heads_and_rows_permute_the_payload(
    case: CodecCase, device: str, seed: int, batch: int, heads: int, tokens: int, head_dim: int
) -> None:
    x = sample_tokens(batch, heads, tokens, head_dim, seed=seed, device=device)
    generator = torch.Generator().manual_seed(seed)
    row, head = (torch.randperm(n, generator=generator) for n in (batch, heads))
    if case.pools_heads:
        head = torch.arange(heads)
    stats = case.stats(x, seed)
    straight = case.encode(x, stats)
    turned = case.encode(x[row][:, head], moment_of(stats, row, head))
    assert torch.equal(straight.decode()[row][:, head], turned.decode())
    others = bits_of(turned, case)
    for name, mine in bits_of(straight, case).items():
        moved = mine[row] if case.pools_heads else mine[row][:, head]
        assert torch.equal(moved, others[name]), name


def one_hot(seed: int) -> Tensor:
    x = torch.zeros(1, 2, 40, 48)
    x[0, seed % 2, seed % 40, seed % 48] = 1 + seed % 7
    return x


def normal(seed: int, scale: float, tokens: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, tokens, 48, generator=generator) * scale


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "all-zero": lambda seed: torch.zeros(1, 2, 40, 48),
    "constant": lambda seed: torch.full((1, 2, 40, 48), (seed - 500) / 7),
    "single-token": lambda seed: normal(seed, 1.0, tokens=1),
    "one-hot": one_hot,
    "huge": lambda seed: normal(seed, 1e4),
    "tiny": lambda seed: normal(seed, 1e-8),
    "half overflow": lambda seed: normal(seed, 1e5).bfloat16(),  # above 65,504
    "infinite half": lambda seed: normal(seed, 3e4).half(),  # rounded to Inf by the host
    "FP32 overflow": lambda seed: normal(seed, 1e38).clamp(-3e38, 3e38),
}
ADAPTED = ("all-zero", "constant", "single-token", "one-hot", "tiny")


@every_device
@every_codec
@pytest.mark.parametrize("kind", INPUTS)
@settings(max_examples=2)
@given(seed=st.integers(0, 1000))
def test_odd_numbers_stay_finite_and_near(
    case: CodecCase, kind: str, device: str, seed: int
) -> None:
    """Decoded tokens are as near as the docstring of the codec says, where nothing saturated."""
    given_x = INPUTS[kind](seed).to(device)
    payload = case.encode(given_x)
    decoded = payload.decode(torch.float32)
    assert decoded.isfinite().all()
    for name, tensor in payload.tensors.items():
        assert not tensor.is_floating_point() or tensor.float().isfinite().all(), name
    assert payload.decode(torch.float16).isfinite().all()
    if case not in ADAPTIVE_CASES:  # fixed levels know nothing of numbers elsewhere
        return
    x = given_x.float().nan_to_num(0.0, 0.0, 0.0)
    error = (decoded.double() - x.double()).norm(dim=-1)
    none = torch.zeros(1, 2, device=device)  # bf16 has nothing that could saturate
    saturated = payload.flags.get("saturated", none) > 0
    if kind in ADAPTED:
        assert not saturated.any()
    assert ((error <= token_bound(x, payload)) | saturated[..., None]).all()


@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e19, 1e29, 1e31, 3e37, 1e38]),
    stages=st.integers(2, 4),
    form=st.sampled_from(["bf16", "fp8"]),
)
def test_stages_of_huge_numbers_stay_finite(
    seed: int, scale: float, stages: int, form: str
) -> None:
    """What every stage may double would leave FP32; beyond 1e30 it saturates, and is counted."""
    x = normal(seed, 1.0).clamp(-3, 3) * scale
    codec = preset("qvg_pro", centroids=8, stages=stages, centroid_format=form).keys
    payload = encode(x, codec)
    assert payload.decode(torch.float32).isfinite().all()
    beyond = (x.abs() > 1e30).sum((-2, -1))
    assert (payload.flags["saturated"] >= beyond).all()
    assert bool(beyond.any()) == (scale > 1e30)
