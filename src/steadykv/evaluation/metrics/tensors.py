"""What packing does to keys and values, and to the attention of later queries over them.

Pure functions of tensors. Memory is bounded: queries are taken in blocks, and nothing of the size
queries x tokens is ever held for more than one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch

from steadykv.errors import ShapeError
from steadykv.evaluation.metrics.selection import check_finite, shared_keys, top_keys
from steadykv.ops.precision import full_precision

BLOCK_BYTES = 16 << 20
"""FP32 logits of one block of queries: 3,640 of them at 1,152 tokens, 141 at 29,640."""


def relative_error(original: torch.Tensor, restored: torch.Tensor) -> float:
    """||original - restored|| / ||original||, Frobenius norms over everything, summed in FP64.

    0 where nothing was lost, inf where an all-zero original was not restored. Allocates FP64 copies
    of one batch row and head. Raises ShapeError when the shapes differ, NonFiniteError for NaN or
    inf in either.
    """
    _check_equal("restored", restored, original)
    energies = _energies(original, restored)
    if not all(map(math.isfinite, energies)):  # FP64 sums: finite numbers do not overflow them
        check_finite("original tensors", original)
        check_finite("restored tensors", restored)
    return _ratio(*energies)


def sqnr_db(original: torch.Tensor, restored: torch.Tensor) -> float:
    """Signal to quantization noise, 10 log10(sum x^2 / sum e^2), over everything.

    inf where nothing was lost, -inf where an all-zero original was not restored. As relative_error.
    """
    error = relative_error(original, restored)
    return math.inf if error == 0 else -math.inf if error == math.inf else -20 * math.log10(error)


@dataclass(frozen=True)
class AttentionErrors:
    """Means over batch rows, query heads and queries.

    logit_rmse: root of the mean squared error of the logits q·k / sqrt(D), over all keys.
    top1_shift: share of queries whose best key is another one. top5_shift: 1 - overlap of the
    `top_k` best. Ties go to the lowest index.
    softmax_kl: KL divergence in nats of the attention weights after packing from those before.
    output_error_keys, output_error_values, output_error: relative error of the attention output
    with only the keys, only the values, or both packed; Frobenius norms over all outputs.
    selections: queries times query heads times batch rows that the means run over.
    """

    logit_rmse: float
    top1_shift: float
    top5_shift: float
    softmax_kl: float
    output_error_keys: float
    output_error_values: float
    output_error: float
    selections: int


def attention_errors(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    *,
    top_k: int = 5,
    block_bytes: int = BLOCK_BYTES,
) -> AttentionErrors:
    """What `queries` [B, Hq, Q, D] see of keys and values [B, H, S, D], before and after packing.

    The mean over everything that `attention_sums` tells apart; allocations and errors are its.
    """
    sums = attention_sums(
        queries, keys, values, packed_keys, packed_values, top_k=top_k, block_bytes=block_bytes
    )
    return sums.errors()


@dataclass(frozen=True)
class AttentionSums:
    """What the means of AttentionErrors are made of, by query head and group of queries.

    sums: FP64 [Hq, G, 8]. selections: queries times batch rows of one head in each group [G].
    tokens: keys that each query sees.
    """

    sums: torch.Tensor
    selections: tuple[int, ...]
    tokens: int

    def errors(self, head: int | None = None, group: int | None = None) -> AttentionErrors:
        """The means of one query head, one group, both, or of all. ShapeError if it is empty."""
        heads = slice(None) if head is None else slice(head, head + 1)
        groups = slice(None) if group is None else slice(group, group + 1)
        chosen = self.sums[heads, groups]
        selections = chosen.shape[0] * sum(self.selections[groups])
        if selections == 0:
            raise ShapeError(
                f"head {head}, group {group} holds no query of {tuple(self.sums.shape[:2])} heads "
                "and groups; expected one that does"
            )
        squares, moved, lost, divergence, *outputs = chosen.sum(dim=(0, 1)).tolist()
        reference, errors = outputs[0], outputs[1:]
        return AttentionErrors(
            logit_rmse=math.sqrt(squares / (selections * self.tokens)),
            top1_shift=moved / selections,
            top5_shift=lost / selections,
            softmax_kl=max(0.0, divergence / selections),  # FP32 rounding may leave -1e-9
            output_error_keys=_ratio(reference, errors[0]),
            output_error_values=_ratio(reference, errors[1]),
            output_error=_ratio(reference, errors[2]),
            selections=selections,
        )


def attention_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    *,
    groups: torch.Tensor | None = None,
    top_k: int = 5,
    block_bytes: int = BLOCK_BYTES,
) -> AttentionSums:
    """Errors of `queries` [B, Hq, Q, D] over keys and values [B, H, S, D], by head and group.

    groups: INT64 [Q], from 0 up: the group of each query, such as its denoising step; None is one
    group. Attention runs over these S tokens alone, with the scale D^-0.5, in FP32; query head i
    reads key head floor(i * H / Hq). Sums over queries are FP64. Allocates FP32 copies of one head
    of the four tensors, and for one block of its queries four times their logits (`block_bytes`
    each) and a few times their outputs. Raises ShapeError when shapes do not fit, or with no
    queries or no tokens, and NonFiniteError for NaN or inf in any of the five.
    """
    for name, x in (("values", values), ("packed_keys", packed_keys),
                    ("packed_values", packed_values)):  # fmt: skip
        _check_equal(name, x, keys)
    if keys.dim() != 4 or keys.shape[2] == 0 or queries.dim() != 4 or queries.shape[2] == 0:
        raise ShapeError(
            f"queries have shape {tuple(queries.shape)}, keys {tuple(keys.shape)}; expected "
            "[B, Hq, Q, D] and [B, H, S, D] with at least one query and one token"
        )
    for name, x in (("queries", queries), ("keys", keys), ("values", values),
                    ("packed_keys", packed_keys), ("packed_values", packed_values)):  # fmt: skip
        check_finite(name, x)
    batch, query_heads, count, head_dim = queries.shape
    heads, tokens = keys.shape[1:3]
    if (batch, head_dim) != (keys.shape[0], keys.shape[3]) or query_heads % heads:
        raise ShapeError(
            f"queries have shape {tuple(queries.shape)}; expected [{keys.shape[0]}, a multiple of "
            f"{heads}, any, {keys.shape[3]}]"
        )
    sizes = _group_sizes(groups, count)
    place = None if groups is None else groups.to(keys.device, torch.int64)
    shared = query_heads // heads
    cells = shared * len(sizes)
    sums = torch.zeros(heads, cells, _SUMS, dtype=torch.float64, device=keys.device)
    step = max(1, block_bytes // (4 * tokens))
    with full_precision(keys.device):
        for row, head in product(range(batch), range(heads)):
            k, v = keys[row, head].float(), values[row, head].float()
            packed_k, packed_v = packed_keys[row, head].float(), packed_values[row, head].float()
            asking = queries[row].unflatten(0, (heads, -1))[head].flatten(0, 1)
            for first in range(0, len(asking), step):
                block = asking[first : first + step].float() * head_dim**-0.5
                terms = _query_terms(block, k, v, packed_k, packed_v, top_k)
                # Queries of the heads that share a key head follow each other: [shared * Q].
                index = torch.arange(first, first + len(block), device=keys.device)
                group = 0 if place is None else place[index % count]
                cell = index // count * len(sizes) + group
                # A matrix product, since index_add_ adds in no fixed order on CUDA.
                member = torch.nn.functional.one_hot(cell, cells).double()
                sums[head] += member.T @ terms
    selections = tuple(batch * size for size in sizes)
    return AttentionSums(sums.view(query_heads, len(sizes), _SUMS), selections, tokens)


def _group_sizes(groups: torch.Tensor | None, count: int) -> list[int]:
    """Queries in each group, of `count` in all."""
    if groups is None:
        return [count]
    if groups.shape != (count,) or groups.is_floating_point() or int(groups.min()) < 0:
        raise ShapeError(
            f"groups have shape {tuple(groups.shape)} and dtype {groups.dtype}; expected a whole "
            f"number from 0 up for each of {count} queries"
        )
    return torch.bincount(groups.to(torch.int64)).tolist()


_SUMS = 8


def _query_terms(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """FP64 [N, 8]: what each of the scaled queries [N, D] adds over one head's [S, D]."""
    before, after = queries @ keys.T, queries @ packed_keys.T
    squares = (after - before).square_().sum(-1, dtype=torch.float64)
    log_p, log_packed = before.log_softmax(-1), after.log_softmax(-1)
    best, packed_best = top_keys(before, top_k), top_keys(after, top_k)  # overwrites both
    del before, after
    moved = (best[..., 0] != packed_best[..., 0]).double()
    lost = 1.0 - shared_keys(best, packed_best).double() / best.shape[-1]
    p = log_p.exp()
    divergence = log_p.sub_(log_packed).mul_(p).sum(-1, dtype=torch.float64)
    packed_p = log_packed.exp_()
    output = p @ values
    others = packed_p @ values, p @ packed_values, packed_p @ packed_values
    errors = [(other - output).square().sum(-1, dtype=torch.float64) for other in others]
    energy = output.square().sum(-1, dtype=torch.float64)
    return torch.stack((squares, moved, lost, divergence, energy, *errors), dim=-1)


def _energies(original: torch.Tensor, restored: torch.Tensor) -> tuple[float, float]:
    """Sums of squares of the original and of the error, in FP64."""
    total = torch.zeros(2, dtype=torch.float64, device=original.device)
    pairs = zip(original.flatten(0, -3), restored.flatten(0, -3), strict=True)
    for rows, others in pairs if original.dim() > 2 else [(original, restored)]:
        x = rows.double()
        total += torch.stack((x.square().sum(), (x - others.double()).square().sum()))
    energy, error = total.tolist()
    return energy, error


def _ratio(energy: float, error: float) -> float:
    """Root of error / energy; 0 where nothing was lost, even of nothing."""
    if error == 0:
        return 0.0
    return math.sqrt(error / energy) if energy else math.inf


def _check_equal(name: str, x: torch.Tensor, original: torch.Tensor) -> None:
    if x.shape != original.shape:
        raise ShapeError(
            f"{name} have shape {tuple(x.shape)}, the original {tuple(original.shape)}; "
            "expected the same tokens in both"
        )
