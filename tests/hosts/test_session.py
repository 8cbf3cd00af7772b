"""What an adapter builds caches with."""

from __future__ import annotations

import pytest
import torch

from steadykv.hosts.adapter import Session
from steadykv.hosts.registry import adapters
from tests.hosts.checks import small_config


@pytest.mark.parametrize(
    ("method", "own", "splits"),
    [
        ("bf16", "paper", ()),
        ("qvg", "paper", ()),
        ("quantwm", "own", ()),
        ("quarot", "paper", (16, 16)),
    ],
)
def test_changes_are_set_where_a_codec_reads_them_and_nowhere_else(method, own, splits):
    session = Session(adapters()[0], small_config(method), {})
    cache = session.build(
        "main",
        layers=1,
        heads=2,
        head_dim=32,
        frame_tokens=16,
        dtype=torch.bfloat16,
        device="cpu",
        first_span="own",
        dim_splits=(16, 16),
        span_chunks=1,
    )
    assert cache.config.keys.first_span == own
    assert cache.config.keys.dim_splits == splits
