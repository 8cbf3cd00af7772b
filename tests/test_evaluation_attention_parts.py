"""Attention errors of captured spans by layer, span, head and step; tensors without steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from steadykv.capture import Selection, open_capture
from steadykv.config import preset
from steadykv.evaluation.attention_parts import part_rows
from steadykv.evaluation.metrics.tensors import attention_errors
from steadykv.evaluation.tensor_comparison import automatic_centroids, compare_tensors
from steadykv.evaluation.tensor_packing import SpanPacker
from steadykv.evaluation.world_capture import capture_world
from tests.worlds import TINY, tiny_episodes, tiny_world


def test_attention_errors_are_told_apart(tmp_path: Path) -> None:
    """By head and step as if the other heads' or steps' queries were not in the file."""
    path = tmp_path / "c.safetensors"
    capture_world(tiny_world(), tiny_episodes(2), path, Selection(queries=50), frames=15)
    file = open_capture(path)
    result = compare_tensors(file, ["quantwm"])
    packer = SpanPacker(preset("quantwm").with_span(1, centroids=automatic_centroids(144)))
    cell = result.cells[3]
    span = file.load((1, 0))
    assert span.q is not None
    assert span.query_step is not None
    packed = packer.pack(span)
    k, v = packed["keys"].decoded, packed["values"].decoded
    assert [part["head"] for part in cell["by_head"]] == [0, 1]
    for part in cell["by_head"]:
        own = slice(part["head"], part["head"] + 1)
        alone = attention_errors(*(x[:, own] for x in (span.q, span.k, span.v, k, v)))
        assert part["logit_rmse"] == pytest.approx(alone.logit_rmse)
        assert part["output_error"] == pytest.approx(alone.output_error)
        assert part["selections"] == alone.selections == 2 * 50
    steps = [(part["step"], part["is_clean"]) for part in cell["by_step"]]
    last = len(TINY.noise_levels)
    assert steps == [(step, step == last) for step in range(last + 1)]
    for part in cell["by_step"]:
        chosen = span.query_step == part["step"]
        alone = attention_errors(span.q[:, :, chosen], span.k, span.v, k, v)
        assert part["top1_shift"] == alone.top1_shift
        assert part["softmax_kl"] == pytest.approx(alone.softmax_kl)
        assert part["selections"] == alone.selections
    row = result.rows[0]
    own = [c for c in result.cells if c["selections"]]
    assert [part["layer"] for part in row["by_layer"]] == [0, 1]
    layer = [c["softmax_kl"] for c in own if c["layer"] == 1]
    assert row["by_layer"][1]["softmax_kl"] == pytest.approx(sum(layer) / len(layer))
    assert [part["span"] for part in row["by_span"]] == [0, 1]
    head = [c["by_head"][1]["output_error"] for c in own]
    assert row["by_head"][1]["output_error"] == pytest.approx(sum(head) / len(head))
    assert [part["selections"] for part in row["by_step"]] == [
        sum(c["by_step"][i]["selections"] for c in own) for i in range(last + 1)
    ]
    assert len(part_rows(own)) == len(own) * (2 + last + 1)


def test_tensors_of_ones_own_have_heads_but_no_steps(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 2, 40, 32, generator=generator) for name in ("k", "v")}
    for queries in (None, torch.randn(1, 4, 9, 32, generator=generator)):
        if queries is not None:
            tensors["q"] = queries
        path = tmp_path / f"{len(tensors)}.safetensors"
        save_file(tensors, str(path))
        result = compare_tensors(open_capture(path), ["rtn"])
        cell, row = result.cells[0], result.rows[0]
        assert cell["by_step"] == row["by_step"] == []
        heads = [] if queries is None else [0, 1, 2, 3]
        assert [part["head"] for part in cell["by_head"]] == heads
        assert [part["head"] for part in row["by_head"]] == heads
