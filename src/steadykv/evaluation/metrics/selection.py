"""Which cached token a query selects, and how often two versions of the keys disagree about it."""

from __future__ import annotations

import torch

from steadykv.errors import NonFiniteError, ShapeError


def check_finite(name: str, x: torch.Tensor) -> None:
    """Raises NonFiniteError where ``x`` holds NaN or inf: comparisons with NaN would hide it.

    Allocates a byte an element of one head at a time; a synchronisation on CUDA.
    """
    for part in x.flatten(0, -3) if x.dim() > 2 else (x,):
        if not bool(torch.isfinite(part).all()):
            raise NonFiniteError(
                f"{name} hold NaN or inf (dtype {x.dtype}, shape {tuple(x.shape)}); expected "
                "finite numbers: repair the values first"
            )


def key_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q . k in FP32, unscaled: [B, Hq, Q, D] with [B, H, N, D] gives [B, Hq, Q, N].

    Query head i reads key head floor(i * H / Hq). Both are cast to FP32 first, since products of
    BF16 keys summed in BF16 would tie by the dozen. Allocates the result and FP32 copies of both.
    Raises ShapeError when the shapes do not fit or Hq is no multiple of H.
    """
    batch, query_heads, count, dim = queries.shape
    if keys.dim() != 4 or (keys.shape[0], keys.shape[3]) != (batch, dim):
        raise ShapeError(
            f"keys have shape {tuple(keys.shape)}; expected [{batch}, heads, tokens, {dim}] for "
            f"queries of shape {tuple(queries.shape)}"
        )
    heads, tokens = keys.shape[1:3]
    if query_heads % heads:
        raise ShapeError(f"{query_heads} query heads on {heads} key heads; expected a multiple")
    grouped = queries.float().reshape(batch, heads, query_heads // heads * count, dim)
    return (grouped @ keys.float().mT).view(batch, query_heads, count, tokens)


def top_keys(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest logits, best first: [..., N] -> INT64 [..., min(count, N)].

    The lowest index wins a tie, at every place, which torch.topk does not promise. ``logits`` is
    overwritten (selected entries become -inf), so that no copy is allocated.
    """
    places = min(count, logits.shape[-1])
    selected = []
    for place in range(places):
        best = logits.argmax(dim=-1, keepdim=True)
        selected.append(best)
        if place + 1 < places:
            logits.scatter_(-1, best, -torch.inf)
    return torch.cat(selected, dim=-1)


def shared_keys(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How many indices two selections share: INT64 [..., k] twice -> INT64 [...]."""
    return (first[..., :, None] == second[..., None, :]).any(dim=-1).sum(dim=-1)


def token_shift(
    queries: torch.Tensor, reference: torch.Tensor, keys: torch.Tensor, top_k: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of queries whose best key changes, and 1 - overlap of the ``top_k`` best.

    ``queries`` [B, Hq, Q, D]; ``reference`` and ``keys`` [B, H, N, D] hold the same tokens, the
    latter as a codec gives them back. Both are read as BF16. Results are FP64 scalars, averaged
    over batch, heads and queries. Raises ShapeError or NonFiniteError.
    """
    if reference.shape != keys.shape:
        raise ShapeError(
            f"keys have shape {tuple(keys.shape)}, reference keys {tuple(reference.shape)}; "
            "expected the same tokens in both"
        )
    if keys.shape[2] == 0 or queries.shape[2] == 0:
        raise ShapeError("no queries or no keys; expected at least one of each")
    for name, x in (("queries", queries), ("reference keys", reference), ("keys", keys)):
        check_finite(name, x)
    before = top_keys(key_logits(queries, reference.bfloat16()), top_k)
    after = top_keys(key_logits(queries, keys.bfloat16()), top_k)
    moved = (before[..., 0] != after[..., 0]).double().mean()
    lost = 1.0 - shared_keys(before, after).double().mean() / before.shape[-1]
    return moved, lost
