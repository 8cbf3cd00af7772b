"""The stated bounds of what encoding and decoding allocate, from both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steadykv.cache.segments import Segment
from steadykv.cache.workspace import decode_workspace_nbytes, encode_workspace_nbytes
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
# Forms that take more or other memory than the plain method.
FORMS: list[dict[str, Any]] = [
    {"method": "rtn", "bits": 3},
    {"method": "rtn", "grid": "symmetric", "packing": "trits"},
    {"method": "kivi", "bits": 3, "axis": "tokens"},
    {"method": "qvg", "bits": 3},
    {"method": "qvg", "stages": 2},
    {"method": "qvg", "stages": 4, "group_size": 16, "centroid_format": "fp8"},
    {"method": "qvg4", "stages": 2, "metadata": "fp8", "centroids": 32},
    {"method": "quantwm", "metadata": "fp8", "centroid_format": "fp8", "centroids": 32},
    {"method": "qvg", "stages": 2, "refit": True, "reseed_empty": True, "centroids": 32},
    {"method": "qvg4", "scale_search": True, "refit": True, "centroids": 32},
    {"method": "quantwm", "metric": "full", "centroid_format": "fp8", "centroids": 32},
]
WORKSPACE_CASES += [CodecConfig(**fields) for fields in FORMS]


@pytest.mark.parametrize(
    "codec",
    WORKSPACE_CASES,
    ids=lambda codec: f"{codec.method}-{codec.axis}-{codec.bits}-{codec.stages}-{codec.centroids}",
)
@pytest.mark.parametrize("shape", [(1, 3, 1152, 128), (2, 2, 333, 64), (1, 2, 4000, 64)], ids=str)
def test_the_stated_workspace_is_enough(codec, shape):
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
    out = torch.empty_like(x)
    with Allocations() as allocations:
        payload.decode(out=out)
    stated = decode_workspace_nbytes([Segment(0, shape[2], payload)])
    assert allocations.peak <= stated <= 2 * allocations.peak


def test_the_stated_workspace_covers_spans_of_several_passes():
    """A head larger than half the workspace: the parts are joined at the end."""
    shape, codec = (1, 3, 140_000, 64), CodecConfig("kivi", group_size=32)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    with Allocations() as allocations:
        payload = encode(x, codec)
    stated = encode_workspace_nbytes(codec, shape, False, x.device)
    assert stated / 2 <= allocations.peak - payload.nbytes <= stated
