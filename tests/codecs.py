"""THE list of codec cases. Every property test walks it: one row tests a new method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from steadykv.codecs import CODECS, Calibration, Payload, QueryMoment, SpanKey, encode
from steadykv.config import CacheConfig, CodecConfig, preset

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@dataclass(frozen=True)
class CodecCase:
    """One configuration, and how well it has to do on `sample_tokens`.

    sqnr: decibels, both ends: below, information is lost; above, nothing was quantized.
    is_warmed: encode with query statistics (a codec that needs none ignores them).
    constant_range: what constants come back as, where the stored numbers saturate.
    constant_error: relative and absolute error that rounding the stored numbers makes in others.
    constant_peak: from here on what an FP8 centroid leaves of a constant saturates FP8 scales.
    """

    name: str
    config: CodecConfig
    sqnr: tuple[float, float]
    is_warmed: bool = True
    constant_range: tuple[float, float] = (-math.inf, math.inf)
    constant_error: tuple[float, float] = (2**-8, 1e-8)
    constant_peak: float = math.inf

    def __str__(self) -> str:
        return self.name

    @property
    def is_compensated(self) -> bool:
        """Whether the payload holds a basis and coefficients."""
        return self.is_warmed and self.config.needs_queries and self.config.rank > 0

    @property
    def pools_heads(self) -> bool:
        """Whether heads share statistics by definition."""
        return CODECS[self.config.method].pools_heads

    def stats(self, x: Tensor, seed: int = 1) -> QueryMoment | None:
        """Query statistics for x [B, H, S, D], as the case wants them."""
        return sample_moment(x, seed) if self.is_warmed else None

    def encode(self, x: Tensor, stats: QueryMoment | None = None, **options: object) -> Payload:
        """Packs x with `stats`, or with the case's own."""
        stats = self.stats(x) if stats is None else stats
        if self.config.needs_calibration:
            options["calibration"] = sample_calibration(self.config, x.shape[1], x.shape[3])
        return encode(x, self.config, stats=stats, **options)  # type: ignore[arg-type]


def sample_tokens(
    batch: int = 1,
    heads: int = 2,
    tokens: int = 192,
    head_dim: int = 64,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Tensor:
    """[B, H, S, D] like a video's keys: a few patch types, a slow drift, some loud channels."""
    generator = torch.Generator().manual_seed(seed)
    types = torch.randn(batch, heads, 6, head_dim, generator=generator) * 2
    which = torch.randint(0, 6, (tokens,), generator=generator)
    noise = torch.randn(batch, heads, tokens, head_dim, generator=generator)
    drift = torch.linspace(0, 1, tokens)[:, None] * torch.randn(head_dim, generator=generator)
    loud = 1 + 3 * (torch.rand(heads, 1, head_dim, generator=generator) > 0.95)
    return ((types[:, :, which] + noise + drift) * loud).to(dtype).to(device)


def sample_queries(x: Tensor, seed: int = 1, group: int = 1, count: int = 64) -> Tensor:
    """[B, H·group, count, D] queries with most energy in few directions, as real ones have."""
    batch, heads, _, width = x.shape
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(heads * group, 4, width, generator=generator)
    strength = torch.randn(batch, heads * group, count, 4, generator=generator) * 3
    noise = torch.randn(batch, heads * group, count, width, generator=generator)
    return (strength @ directions + noise).to(x.device)


def sample_moment(x: Tensor, seed: int = 1) -> QueryMoment:
    """Statistics of `sample_queries`."""
    batch, heads, _, width = x.shape
    moment = QueryMoment.empty(batch, heads, width, x.device)
    moment.update(sample_queries(x, seed))
    return moment


@lru_cache(maxsize=64)
def sample_calibration(config: CodecConfig, heads: int, head_dim: int) -> Calibration:
    """Fitted on `sample_tokens`, for the spans of layers 0 and 3 that the tests encode."""
    tokens = sample_tokens(heads=heads, head_dim=head_dim)
    layers = {(layer, "key"): tokens for layer in (0, KEY.layer)}
    return Calibration.fit(layers, CacheConfig(config, config))


def sqnr(x: Tensor, decoded: Tensor) -> float:
    """Signal over quantization noise in dB."""
    signal, noise = x.double().square().sum(), (x.double() - decoded.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


FP16: Any = {"constant_range": (-65504.0, 65504.0)}  # a group's minimum is FP16
FP8_CENTROID = (2**-8, 448 * 2**-25)  # the scale of a tiny centroid is a subnormal FP16

CASES = [
    CodecCase("bf16", CodecConfig("bf16"), (float("inf"), float("inf"))),
    CodecCase("kivi_keys", CodecConfig("kivi", group_size=32, axis="tokens"), (9, 11), **FP16),
    CodecCase("kivi_values", CodecConfig("kivi", group_size=32), (5, 7.5), **FP16),
    CodecCase("kivi_4bit", CodecConfig("kivi", bits=4, group_size=32), (19, 21.5), **FP16),
    CodecCase("kivi_3bit", CodecConfig("kivi", bits=3, group_size=32), (12.5, 14.5), **FP16),
    CodecCase("rtn", CodecConfig("rtn"), (2.5, 4.5), **FP16),
    CodecCase(
        "rtn_symmetric",
        CodecConfig("rtn", group_size=16, grid="symmetric", packing="trits"),
        (4.7, 6),
        constant_range=(-448, 448),
        constant_error=(2**-4, 2**-10),
    ),
    CodecCase(
        "quarot",
        CodecConfig("quarot"),
        (6.5, 7.7),
        # Blocks of 16 channels: a constant c becomes 4·c and fifteen zeros.
        constant_range=(-65504 / 4, 65504 * 3 / 4),
        constant_error=(0.01 + 2**-10, 2**-24),
    ),
    CodecCase("qvg", CodecConfig("qvg", centroids=16), (9, 12)),
    CodecCase("qvg_4bit", CodecConfig("qvg", bits=4, centroids=16), (21.5, 25)),
    CodecCase(
        "qvg_3bit_int8", CodecConfig("qvg", bits=3, centroids=16, metadata="int8"), (16, 17.7)
    ),
    CodecCase("qvg_trits", CodecConfig("qvg", centroids=16, packing="trits"), (9, 12)),
    CodecCase("qvg_pro", CodecConfig("qvg", group_size=16, centroids=16, stages=4), (14, 18)),
    CodecCase(
        "qvg_fp8",
        CodecConfig("qvg", centroids=16, stages=2, centroid_format="fp8"),
        (10.5, 13.7),
        constant_error=FP8_CENTROID,
    ),
    CodecCase("qvg4", CodecConfig("qvg4", centroids=16), (12, 14.5)),
    CodecCase("qvg4_3bit", CodecConfig("qvg4", bits=3, centroids=16), (19, 21)),
    CodecCase("qvg4_fp8", CodecConfig("qvg4", centroids=16, metadata="fp8"), (11.7, 13.7)),
    CodecCase("qvg4_group_24", CodecConfig("qvg4", centroids=16, group_size=24), (14.5, 17)),
    CodecCase("qvg4_4bit", CodecConfig("qvg4", bits=4, centroids=16), (25, 27.5)),
    CodecCase("qvg4_refined", CodecConfig("qvg4", centroids=16, refinement=2), (23, 26)),
    CodecCase(
        "qvg_trits_refined",
        CodecConfig(
            "qvg",
            centroids=16,
            packing="trits",
            metadata="int8",
            centroid_format="fp8",
            refinement=3,
        ),
        (22, 26),
        constant_error=FP8_CENTROID,
    ),
    CodecCase("qvg4_refined_1", CodecConfig("qvg4", centroids=16, refinement=1), (17, 20)),
    CodecCase(
        "quantwm_refined_4",
        CodecConfig("quantwm", centroids=16, rank=0, centroid_format="fp8", refinement=4),
        (35, 38),
        constant_error=FP8_CENTROID,
    ),
    CodecCase("quantwm", CodecConfig("quantwm", centroids=16), (12.3, 15)),
    CodecCase("quantwm_cold", CodecConfig("quantwm", centroids=16), (12, 14.5), is_warmed=False),
    CodecCase("quantwm_4bit", CodecConfig("quantwm", bits=4, centroids=16), (25.2, 28.2)),
    CodecCase("quantwm_rank_3", CodecConfig("quantwm", centroids=16, rank=3), (12.1, 14.7)),
    CodecCase("quantwm_rank_0", CodecConfig("quantwm", centroids=16, rank=0), (12, 14.5)),
    CodecCase("quantwm_auto", CodecConfig("quantwm", centroids=16, coef_layout="auto"), (12.3, 15)),
    CodecCase("quantwm_always", CodecConfig("quantwm", centroids=16, retain="always"), (12.3, 15)),
    CodecCase("kvquant_keys", CodecConfig("kvquant", axis="tokens"), (11.2, 12.2), **FP16),
    CodecCase("kvquant_values", CodecConfig("kvquant"), (8.1, 10.5), **FP16),
    CodecCase("kvquant_4bit", CodecConfig("kvquant", bits=4, axis="tokens"), (23, 24), **FP16),
    CodecCase(
        "kvquant_plain",
        CodecConfig("kvquant", axis="tokens", outlier_fraction=0.0),
        (10.6, 11.6),
        **FP16,
    ),
    CodecCase(
        "kvquant_first", CodecConfig("kvquant", axis="tokens", first_tokens=5), (11.2, 12.4), **FP16
    ),
    CodecCase(
        "kvquant_weighted",
        CodecConfig("kvquant", axis="tokens", level_weight="queries"),
        (11.2, 12.3),
        **FP16,
    ),
    CodecCase(
        "kvquant_keys_calibrated",
        CodecConfig("kvquant", axis="tokens", levels="calibrated"),
        (11.2, 12.5),
        **FP16,
    ),
    CodecCase(
        "kvquant_values_calibrated",
        CodecConfig("kvquant", levels="calibrated"),
        (8.1, 10.5),
        **FP16,
    ),
    CodecCase(
        "quantwm_fp8",
        CodecConfig("quantwm", bits=3, centroids=16, metadata="fp8", centroid_format="fp8"),
        (19.3, 21.7),
        constant_error=FP8_CENTROID,
        constant_peak=448 * 2**5,
    ),
]
KEY = SpanKey(layer=3, tensor="key", span=2)

# The same methods for whole caches, "keys:values". Values have no queries, so a method that needs
# them gets the values of the presets.
CODEC_METHODS = list(dict.fromkeys(case.config.method for case in CASES))
CACHE_METHODS = [
    f"{name}:{preset(name).values.method}" if CODECS[name].needs_queries else name
    for name in CODEC_METHODS
]
DENSE_METHODS = [name for name in CODEC_METHODS if CODECS[name].is_dense]
PACKED_METHODS = [name for name in CACHE_METHODS if name not in DENSE_METHODS]
# Cases whose levels and thresholds follow the span: fixed ones know nothing of numbers elsewhere.
ADAPTIVE_CASES = [case for case in CASES if not case.config.needs_calibration]
PLAIN_METHODS = [name for name in CODEC_METHODS if not CODECS[name].needs_queries]
KEYS_ONLY_METHODS = [f"{name}:bf16" for name in CODEC_METHODS if CODECS[name].needs_queries]
