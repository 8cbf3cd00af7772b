"""Captures a rollout of the world model: plan, size bound, BF16 rollout under a recorder, file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steadykv.capture import (
    CaptureHeader,
    PlannedSpan,
    RecordingCache,
    Selection,
    open_capture,
    plan_spans,
    predicted_nbytes,
    write_capture,
)
from steadykv.config import CachePolicy, preset
from steadykv.errors import ConfigError
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.rollouts import OnChunk, new_cache, refuse_nonfinite
from steadykv.world import Episodes, WorldConfig, WorldModel, rollout
from steadykv.world.rope import rotation_of
from steadykv.world.sampler import KeyRope


@dataclass(frozen=True)
class CapturePlan:
    """What a capture will hold. nbytes: upper bound of the file's size."""

    spans: tuple[PlannedSpan, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    queries: int
    nbytes: int


def capture_world(
    world: WorldModel,
    episodes: Episodes,
    path: Path,
    selection: Selection,
    *,
    frames: int = 24,
    seed: int = 0,
    span_chunks: int = 2,
    key_rope: KeyRope = "post",
    weights: str = "shipped",
    max_nbytes: int | None = None,
    on_plan: Callable[[CapturePlan], None] | None = None,
    on_chunk: OnChunk | None = None,
) -> dict[str, Any]:
    """Roll `episodes` out with a BF16 cache and write what `selection` names to `path`.

    The batch rows of the file are the episodes, all with noise seed `seed`; spans have
    `span_chunks` chunks under the world's own window and sink. `weights` names the model's in the
    header. `on_plan` is called before anything runs. Returns the header as stored, with "nbytes" of
    the file.
    Holds the capture on the CPU until it is written. Raises ConfigError for numbers that there are
    not and for a capture above `max_nbytes`, before anything runs.
    """
    shape, weight = world.config, next(world.parameters())
    policy = CachePolicy(
        span_chunks=span_chunks, window_frames=shape.window_frames, sink_frames=shape.sink_frames
    )
    header = CaptureHeader(
        model={
            "name": "steadykv.world",
            "weights": weights,
            "config": shape.to_dict(),
            "compute_dtype": _name_of(weight.dtype),
            "frames": frames,
        },
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        query_heads=shape.num_heads,
        head_dim=shape.head_dim,
        frame_tokens=shape.frame_tokens,
        rows=tuple({"episode": name, "seed": seed} for name in episodes.names),
        layers=selection.chosen("layers", shape.num_layers),
        heads=selection.chosen("heads", shape.num_heads),
        dtype="bfloat16",
        key_rope=key_rope,
        policy=policy,
        queries=selection.queries,
        query_seed=selection.seed,
        environment=environment(weight.device),
    )
    plan = plan_capture(header, selection, shape, frames, weight.dtype)
    if on_plan is not None:
        on_plan(plan)
    if max_nbytes is not None and plan.nbytes > max_nbytes:
        raise ConfigError(
            f"the capture takes up to {plan.nbytes:,} bytes, expected at most {max_nbytes:,}; keep "
            "fewer layers, heads, spans, queries, episodes or frames, or raise the limit "
            "(--max-bytes)"
        )
    inner = new_cache(world, preset("bf16").replace(policy=policy))
    recorder = RecordingCache(
        inner,
        selection,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        frame_tokens=shape.frame_tokens,
        policy=policy,
        rotation=None if key_rope == "post" else rotation_of(shape, "cpu"),
    )
    checked = refuse_nonfinite(inner, "the capture", on_chunk)
    rollout(world, episodes, recorder, frames, seed, checked, key_rope=key_rope)
    nbytes = write_capture(path, header, recorder.captured(), recorder.rope())
    return _stored(path) | {"nbytes": nbytes}


def plan_capture(
    header: CaptureHeader,
    selection: Selection,
    shape: WorldConfig,
    frames: int,
    compute_dtype: torch.dtype,
) -> CapturePlan:
    """Spans and bytes of a rollout of `frames` frames after the context chunk."""
    size = shape.chunk_frames * shape.frame_tokens
    count = 1 + frames // shape.chunk_frames
    chunks = [(number * size, (number + 1) * size) for number in range(count)]
    passes = [1] + [len(shape.noise_levels) + 1] * (count - 1)
    planned = plan_spans(header.policy, shape.frame_tokens, chunks, passes)
    if not planned:
        raise ConfigError(
            f"frames: got {frames}, which completes no span of {header.policy.span_chunks} chunks; "
            f"expected at least {(header.policy.span_chunks - 1) * shape.chunk_frames}"
        )
    kept = set(selection.chosen("spans", len(planned)))
    spans = tuple(span for span in planned if span.index in kept)
    nbytes = predicted_nbytes(
        spans,
        batch=len(header.rows),
        layers=len(header.layers),
        heads=len(header.heads),
        query_heads=len(header.heads) * header.query_heads // header.num_heads,
        head_dim=header.head_dim,
        queries=selection.queries,
        element_nbytes=torch.bfloat16.itemsize,
        query_nbytes=compute_dtype.itemsize,
        has_rope=header.key_rope == "pre",
        header=header.to_dict(),
    )
    return CapturePlan(spans, header.layers, header.heads, selection.queries, nbytes)


def _stored(path: Path) -> dict[str, Any]:
    """The header as the file gives it back, which checks the file as well."""
    header = open_capture(path).header
    assert header is not None
    return header.to_dict()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
