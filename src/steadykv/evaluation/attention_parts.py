"""Attention errors of captured spans told apart: by layer, query head, step and span."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steadykv.capture import SpanTensors
from steadykv.evaluation.metrics.tensors import AttentionErrors, AttentionSums

QUERY_MEASURES = (
    "logit_rmse",
    "top1_shift",
    "top5_shift",
    "softmax_kl",
    "output_error_keys",
    "output_error_values",
    "output_error",
)
"""Need later queries; null without."""

PART_LISTS = ("by_head", "by_step")
"""Lists of parts in every cell."""

Part = dict[str, Any]
Step = tuple[int, bool]
"""Number of a query's pass within its chunk, and whether that pass committed the chunk."""


def query_groups(span: SpanTensors) -> tuple[list[Step], torch.Tensor | None]:
    """The steps of a span's queries, in order, and the place of each query's step among them [Q].

    None for tensors without steps, which are nobody's passes: no step is told apart then.
    """
    if span.query_step is None or span.query_clean is None:
        return [], None
    keys = 2 * span.query_step.to(torch.int64) + span.query_clean.to(torch.int64)
    found, groups = torch.unique(keys, sorted=True, return_inverse=True)
    return [(key // 2, key % 2 == 1) for key in found.tolist()], groups


def attention_parts(sums: AttentionSums | None, steps: Sequence[Step]) -> dict[str, list[Part]]:
    """`by_head` and `by_step` of one cell: an object of measures each; empty without queries.

    `steps` names the groups of `sums`, as query_groups gives them.
    """
    if sums is None:
        return {"by_head": [], "by_step": []}
    return {
        "by_head": [
            {"head": head} | _numbers(sums.errors(head=head)) for head in range(len(sums.sums))
        ],
        "by_step": [
            {"step": step, "is_clean": is_clean} | _numbers(sums.errors(group=group))
            for group, (step, is_clean) in enumerate(steps)
        ],
    }


def mean_parts(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Part]]:
    """`by_layer`, `by_span`, `by_head` and `by_step` of one method: means over its cells.

    As in a method's row, every cell counts once, however many queries it has; selections add up.
    """
    with_queries = [cell for cell in cells if cell["selections"]]
    return {
        "by_layer": _grouped(with_queries, ("layer",)),
        "by_span": _grouped(with_queries, ("span",)),
        "by_head": _grouped([p for c in with_queries for p in c["by_head"]], ("head",)),
        "by_step": _grouped([p for c in with_queries for p in c["by_step"]], ("step", "is_clean")),
    }


def part_rows(cells: Sequence[Mapping[str, Any]]) -> list[Part]:
    """One flat row a method, layer, span and head, and one a method, layer, span and step.

    For a table: `head` is empty (None) in rows of a step, `step` and `is_clean` in rows of a head.
    """
    rows = []
    for cell in cells:
        place = {name: cell[name] for name in ("method", "layer", "span")}
        unknown = {"head": None, "step": None, "is_clean": None}
        rows += [place | unknown | part for part in (*cell["by_head"], *cell["by_step"])]
    return rows


def _grouped(parts: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> list[Part]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for part in parts:
        groups.setdefault(tuple(part[name] for name in names), []).append(part)
    return [
        dict(zip(names, key, strict=True))
        | {measure: _mean([part[measure] for part in own]) for measure in QUERY_MEASURES}
        | {"selections": sum(part["selections"] for part in own)}
        for key, own in sorted(groups.items())
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _numbers(errors: AttentionErrors) -> Part:
    """JSON has no infinity: what is infinite is null."""
    numbers = {name: getattr(errors, name) for name in QUERY_MEASURES}
    finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
    return finite | {"selections": errors.selections}
