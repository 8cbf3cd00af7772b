"""The attention kernels against their reference: interpreted on a CPU, really on a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.kernels import attention
from steadykv.kernels.attention import attend_planned, merge_attention
from steadykv.kernels.passes import ROUND_TOKENS, Plan, plan, plan_for
from steadykv.kernels.vendor import vendor_for
from steadykv.ops.attention import BUDGETS, Heads, Tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Interpreted BF16 stores truncate, so that FP16 stands for it where there is no GPU.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
WIDE = HALF if DEVICE == "cuda" else torch.float32
# Of max|v|, as the contract says.
BOUND = {torch.float32: 1e-5, torch.float16: 4 * 2**-11, torch.bfloat16: 4 * 2**-8}


def sample(
    batch: int = 1,
    heads: int = 2,
    group: int = 1,
    rows: int = 37,
    tokens: int = 300,
    width: int = 64,
    dtype: torch.dtype = WIDE,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, n·H, S, D], k and v [B, H, T, D]."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, heads * group, rows, width)] + 2 * [(batch, heads, tokens, width)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)
    return 2 * q, k, v + 1


def tokens_of(k: Tensor, v: Tensor, **options: Any) -> Tokens:
    """Keys and values that are copied when they are loaded, as decoding does."""

    def load(part: Heads, start: int, end: int, k_room: Tensor, v_room: Tensor):
        k_room.copy_(part.of(k)[:, :, start:end])
        v_room.copy_(part.of(v)[:, :, start:end])
        return k_room, v_room

    return Tokens(load, k.shape[2], k.shape[1], k.dtype, **options)


def attended(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = torch.empty_like(q)
    scale = options.pop("scale", q.shape[-1] ** -0.5)
    ops.attend(q, tokens_of(k, v), out, scale=scale, backend=backend, **options)
    return out


def check(q: Tensor, k: Tensor, v: Tensor, slack: float = 1.0, **options: Any) -> None:
    want = attended("reference", q.float(), k.float(), v.float(), **options)
    got = attended("triton", q, k, v, **options)
    assert got.dtype == q.dtype
    assert float((got - want).abs().max() / v.abs().max()) <= slack * BOUND[k.dtype]


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_one_pass_equals_the_reference(width, poisoned_memory):
    check(*sample(width=width, batch=2))


@pytest.mark.parametrize("dtype", [HALF, WIDE])
@pytest.mark.parametrize(("batch", "group", "width"), [(2, 1, 80), (1, 3, 64)])
def test_pieces_equal_the_reference(batch, group, width, dtype, poisoned_memory):
    """A budget for so little that every head is cut into pieces."""
    q, k, v = sample(batch, 2, group, tokens=1100, width=width, dtype=dtype)
    chosen = plan(tuple(q.shape), tokens_of(k, v), q.device, 1 << 17)
    assert chosen.tokens < 1100 / 2
    check(q, k, v, budget=1 << 17)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_any_plan_equals_the_reference(heads, lanes, poisoned_memory):
    """Heads of one row, of both, and a last group that is smaller; three pieces and a short one."""
    lanes = lanes if DEVICE == "cuda" else 1
    q, k, v = sample(2, 3, 2, rows=33, tokens=410, width=64)
    want = attended("reference", q.float(), k.float(), v.float())
    out = torch.empty_like(q)
    vendor = vendor_for(q.device, 64, k.dtype, False)
    scale = q.shape[-1] ** -0.5
    attend_planned(q, tokens_of(k, v), out, scale, None, Plan(heads, 128, lanes, 0), vendor)
    assert float((out - want).abs().max() / v.abs().max()) <= BOUND[k.dtype]


def test_a_bias_and_removed_keys(poisoned_memory):
    """The first piece has no key left, then one in the middle."""
    q, k, v = sample(2, 2, 2, tokens=700)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(2, 2, 700, generator=generator).to(DEVICE)
    bias[..., :384], bias[0, ..., 390:395] = -torch.inf, -torch.inf
    largest = 1 + float(bias[bias.isfinite()].abs().max())
    check(q, k, v, largest, bias=bias, budget=1 << 17)
    check(q, k, v, largest, bias=bias)


def test_strided_queries_and_results():
    """Both layouts of a host, and heads that are cut out of more."""
    q, k, v = sample(2, 2, 2, tokens=500)
    want = attended("triton", q, k, v, budget=1 << 17)
    views = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.empty(2, 37, 4, 64, dtype=q.dtype, device=DEVICE).transpose(1, 2)
    ops.attend(views, tokens_of(k, v), out, scale=0.125, budget=1 << 17, backend="triton")
    assert torch.equal(out, want)


def test_whatever_has_no_vendor_kernel_is_the_reference():
    """Queries finer than the cache; on a GPU also FP32 caches and odd head dims."""
    q, k, v = sample(dtype=HALF)
    assert torch.equal(attended("triton", q.float(), k, v), attended("reference", q.float(), k, v))
    if DEVICE == "cuda":
        q, k, v = sample(width=36)
        assert torch.equal(attended("triton", q, k, v), attended("reference", q, k, v))


# --- merging --------------------------------------------------------------------------------------


def merged(dtype: torch.dtype, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    out = torch.empty_like(parts[0][0], dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    out.copy_(parts[0][0])
    lse, low = parts[0][1].clone(), torch.empty(out.shape, dtype=dtype, device=DEVICE)
    for number, (part, part_lse) in enumerate(parts[1:], 1):
        is_last = number == len(parts) - 1
        merge_attention(out, low, lse, part.to(dtype), part_lse, number == 1, is_last)
    return out


@pytest.mark.parametrize("shape", [(2, 3, 37, 80), (1, 2, 1, 64), (1, 1, 65, 256)])
def test_merging_is_the_weighted_mean(shape, poisoned_memory):
    """Twelve parts with weights from e^-40 to e^40: rounded once, not twelve times."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        (
            torch.randn(shape, generator=generator).to(HALF).to(DEVICE),
            (20 * torch.randn(shape[:3], generator=generator)).clamp(-40, 40).to(DEVICE),
        )
        for _ in range(12)
    ]
    weights = torch.stack([lse for _, lse in parts]).double().softmax(0)
    want = sum(w[..., None] * part.double() for w, (part, _) in zip(weights, parts, strict=True))
    exact = merged(torch.float32, parts)
    assert float((exact - want).abs().max()) < 1e-5
    rounded = merged(HALF, parts)
    step = torch.finfo(HALF).eps
    # Half a step of the result, and what the low halves lose.
    assert bool(((rounded - want).abs() <= 0.51 * step * want.abs() + 1e-3 * step).all())


def test_a_part_without_keys_counts_for_nothing():
    shape = (1, 1, 16, 64)
    one, none = torch.ones(shape, device=DEVICE), torch.full(shape, torch.nan, device=DEVICE)
    some, empty = torch.zeros(shape[:3], device=DEVICE), torch.zeros(shape[:3], device=DEVICE)
    empty -= torch.inf
    assert torch.equal(merged(torch.float32, [(one, some), (none, empty)]), one)
    assert torch.equal(merged(torch.float32, [(none, empty), (one, some), (one, some)]), one)
    nothing = merged(torch.float32, [(none, empty), (none, empty)])
    assert not nothing.any()


# --- plans ----------------------------------------------------------------------------------------


LAYERS = {
    "32 heads": ((1, 32, 4680, 128), 34320, 32),
    "12 heads": ((1, 12, 4680, 128), 32760, 12),
    "12 heads, 180 frames": ((1, 12, 4680, 128), 280800, 12),
    "40 heads": ((1, 40, 4680, 128), 53040, 40),
    "two rows, 4 query heads a head": ((2, 16, 1560, 64), 9000, 4),
    "one frame of the embedded model": ((8, 3, 576, 128), 4608, 3),
}


@pytest.mark.parametrize("memory", list(BUDGETS))
@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("lanes", [1, 2])
def test_plans_keep_to_the_budget(layer, memory, lanes):
    shape, tokens, heads = LAYERS[layer]
    budget = BUDGETS[memory]
    chosen = plan_for(shape, tokens, heads, 2, 132, budget, lanes)
    pieces = -(-tokens // chosen.tokens)
    outputs = 2 if pieces > 1 else 1
    group = shape[1] // heads
    needed = chosen.heads * (
        chosen.tokens * shape[3] * 4 + outputs * group * shape[2] * (2 * shape[3] + 4)
    )
    assert chosen.nbytes == chosen.lanes * needed <= budget
    assert chosen.heads <= heads or chosen.heads % heads == 0
    assert pieces * chosen.tokens < tokens + ROUND_TOKENS * (pieces + 1)


def test_a_merged_piece_is_gone_before_the_next_one(monkeypatch):
    """A plan counts two outputs, that of the running piece and one beside it."""
    pieces, alive, vendor_attention = [], [], attention.vendor_attention

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        alive.append(sum(piece() is not None for piece in pieces))
        found = vendor_attention(*arguments)
        pieces.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(attention, "vendor_attention", watched)
    q, k, v = sample(1, 1, tokens=600)
    out, vendor = torch.empty_like(q), vendor_for(q.device, 64, k.dtype, False)
    attend_planned(q, tokens_of(k, v), out, 0.125, None, Plan(1, 128, 1, 0), vendor)
    assert alive == [0, 1, 0, 0, 0]  # beside the second, nothing is kept of the first but `out`


def test_a_budget_that_is_too_small_gives_the_smallest_plan():
    shape = (1, 4, 4680, 128)
    assert plan_for(shape, 9000, 4, 2, 132, 1, 2)[:3] == (1, 256, 1)
    assert plan_for(shape, 9000, 4, 2, 132, 1, 2, can_split=False)[:3] == (4, 256, 1)


def test_many_segments_want_few_passes():
    """Loading them again for each pass would keep the host busier than the device."""
    shape, tokens, heads = LAYERS["12 heads, 180 frames"]
    few, many = (
        plan_for(shape, tokens, heads, 2, 132, BUDGETS["default"], 2, segments=count)
        for count in (4, 400)
    )
    assert many.heads > few.heads


def test_heads_that_belong_together_are_loaded_together(poisoned_memory):
    q, k, v = sample(2, 3, 2, tokens=900)
    parts = []
    tokens = tokens_of(k, v, can_split=False)

    def load(part: Heads, *rest: Any):
        parts.append(part)
        return tokens.load(part, *rest)

    want = attended("reference", q.float(), k.float(), v.float())
    for backend in ("reference", "triton"):
        got = torch.empty_like(q)
        ops.attend(q, tokens._replace(load=load), got, scale=0.125, budget=1 << 19, backend=backend)
        assert set(parts) == {Heads(0, 2, 0, 3)}
        assert float((got - want).abs().max() / v.abs().max()) <= BOUND[k.dtype]
    assert len(parts) > 2


# --- GPU ------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_same_bytes_from_run_to_run():
    q, k, v = sample(1, 8, rows=1000, tokens=5000, width=128)
    runs = [attended("triton", q, k, v, budget=4 << 20) for _ in range(5)]
    assert all(torch.equal(runs[0], run) for run in runs)


@pytest.mark.cuda
def test_a_new_length_compiles_nothing():
    kernel = attention._merge_kernel
    attended("triton", *sample(tokens=900), budget=1 << 17)
    compiled = sum(len(found[0]) for found in kernel.device_caches.values())
    for tokens in range(901, 921):
        attended("triton", *sample(tokens=tokens, rows=tokens - 880), budget=1 << 17)
    assert sum(len(found[0]) for found in kernel.device_caches.values()) == compiled


@pytest.mark.cuda
@pytest.mark.parametrize("budget", [1 << 18, 128 << 20])
def test_graphs_replay_it(budget):
    q, k, v = sample(1, 4, rows=200, tokens=2000, width=128)
    out, tokens = torch.empty_like(q), tokens_of(k, v)

    def step() -> None:
        ops.attend(q, tokens, out, scale=0.1, budget=budget, backend="triton")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    q.copy_(q.flip(2))
    out.zero_()
    graph.replay()
    replayed = out.clone()
    step()
    assert torch.equal(replayed, out)


@pytest.mark.cuda
def test_it_compiles_without_a_break():
    q, k, v = sample(1, 2, rows=200, tokens=700, width=128)

    def attention_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ops.attend(q, tokens_of(k, v), out, scale=0.1, budget=1 << 17, backend="triton")
        return out

    expected = attention_of(q, k, v)  # chooses the backend, which tracing cannot
    compiled = torch.compile(attention_of, fullgraph=True)
    difference = (compiled(q, k, v).float() - expected.float()).abs().max()
    assert float(difference / v.abs().max()) <= BOUND[k.dtype]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_it_runs_where_its_tensors_are():
    q, k, v = (x.to("cuda:1") for x in sample(1, 4, rows=200, tokens=2000, width=128))
    with torch.cuda.device(0):
        check(q, k, v, budget=1 << 18)
