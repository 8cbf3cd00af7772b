"""The stated bounds of what encoding allocates, from both sides."""

from __future__ import annotations

import pytest
import torch

from steadykv.cache.workspace import encode_workspace_nbytes
from steadykv.codecs import QueryMoment, encode
from steadykv.config import METHODS, CodecConfig, preset
from tests.cache_cases import Allocations
from tests.codecs import CODEC_METHODS, DENSE_METHODS

PACKED_CODECS = [name for name in CODEC_METHODS if name not in DENSE_METHODS]
# The key and value codecs of every packed method; with few and many centroids where it has any.
WORKSPACE_CASES = [
    preset(name).with_span(1, centroids).keys
    for name in PACKED_CODECS
    for centroids in ((32, 256) if "centroids" in METHODS[name] else (None,))
]
WORKSPACE_CASES += [
    preset(name).values for name in PACKED_CODECS if "centroids" not in METHODS[name]
]


@pytest.mark.parametrize(
    "codec",
    WORKSPACE_CASES,
    ids=lambda codec: f"{codec.method}-{codec.axis}-{codec.centroids}",
)
@pytest.mark.parametrize("shape", [(1, 3, 1152, 128), (2, 2, 333, 64), (1, 2, 4000, 64)], ids=str)
def test_the_stated_workspace_of_encoding_is_enough(codec, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).bfloat16()
    stats = None
    if codec.needs_queries:
        stats = QueryMoment.empty(shape[0], shape[1], shape[3])
        stats.update(torch.randn(shape, generator=generator))
    with Allocations() as allocations:
        payload = encode(x, codec, stats=stats)
    stated = encode_workspace_nbytes(codec, shape, stats is not None, x.device)
    used = allocations.peak - payload.nbytes
    assert used <= stated
    assert stated <= 2 * used


def test_the_stated_workspace_covers_spans_of_several_passes():
    """A head larger than half the workspace: the parts are joined at the end."""
    shape, codec = (1, 3, 140_000, 64), CodecConfig("kivi", group_size=32)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    with Allocations() as allocations:
        payload = encode(x, codec)
    stated = encode_workspace_nbytes(codec, shape, False, x.device)
    assert stated / 2 <= allocations.peak - payload.nbytes <= stated
