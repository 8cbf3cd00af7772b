"""One batch of rollouts with one cache: its video, what the cache cost, how far it is from BF16."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

import torch

from steadykv.cache import KVCache
from steadykv.codecs import Calibration
from steadykv.config import CacheConfig
from steadykv.errors import NonFiniteError
from steadykv.evaluation.aggregate import MethodCost, RolloutRecord
from steadykv.evaluation.metrics import flicker_by_step, frame_mse, ssim_by_frame
from steadykv.evaluation.token_shift import MethodShift
from steadykv.world import Episodes, WorldModel, rollout
from steadykv.world.sampler import AttentionBackend, KeyRope

OnChunk = Callable[[int, int], None]


class CountsNonFinite(Protocol):
    """A cache that counts NaN and Inf on its device."""

    @property
    def nonfinite_count(self) -> torch.Tensor: ...


def refuse_nonfinite(
    cache: CountsNonFinite, method: str, on_chunk: OnChunk | None = None
) -> OnChunk:
    """A chunk callback that raises NonFiniteError once ``cache`` has met NaN or Inf.

    Reads one number from the device a chunk, then calls ``on_chunk``.
    """

    def check(done: int, total: int) -> None:
        count = int(cache.nonfinite_count)
        if count:
            raise NonFiniteError(
                f"got {count:,} non-finite keys/values or queries by the end of chunk {done} with "
                f"{method}, expected finite numbers: check the weights, or compute in float32"
            )
        if on_chunk is not None:
            on_chunk(done, total)

    return check


@dataclass(frozen=True)
class BatchCost:
    """One batch: rollouts in it, the final ledger, sums over chunk ends, wall-clock seconds.

    resident_parts: the final ledger's bytes by part; empty in batches of older runs.
    bits_per_element_mean: over what the chunks that read packed data have read; None in batches of
    older runs.
    """

    rollouts: int
    bits_per_element: float
    bf16_bytes: float
    resident_bytes: int
    peak_bytes: int
    bf16_bytes_over_time: float
    resident_bytes_over_time: int
    seconds: float
    dropped_dense_tokens: int
    resident_parts: dict[str, int] = field(default_factory=dict)
    bits_per_element_mean: float | None = None


def join_costs(config: CacheConfig, batches: Sequence[BatchCost]) -> MethodCost:
    """Cost of a method per rollout, from its batches."""
    rollouts = sum(batch.rollouts for batch in batches)
    resident = sum(batch.resident_bytes for batch in batches)
    means = [(b.bits_per_element_mean, b.rollouts) for b in batches]
    known = [mean * count for mean, count in means if mean is not None]
    return MethodCost(
        keys=config.keys.method,
        values=config.values.method,
        bits_per_element=sum(b.bits_per_element * b.rollouts for b in batches) / rollouts,
        bits_per_element_mean=sum(known) / rollouts if len(known) == len(batches) else None,
        compression=sum(batch.bf16_bytes for batch in batches) / resident,
        compression_mean=sum(batch.bf16_bytes_over_time for batch in batches)
        / sum(batch.resident_bytes_over_time for batch in batches),
        resident_bytes=round(resident / rollouts),
        resident_parts=_parts_per_rollout(batches, rollouts),
        peak_bytes=max(round(batch.peak_bytes / batch.rollouts) for batch in batches),
        seconds=sum(batch.seconds for batch in batches) / rollouts,
        batch_rollouts=max(batch.rollouts for batch in batches),
    )


def _parts_per_rollout(batches: Sequence[BatchCost], rollouts: int) -> dict[str, int] | None:
    """Whole bytes by part that add up to the rounded `resident_bytes`; None if a batch has none."""
    if not all(batch.resident_parts for batch in batches):
        return None
    parts, total, before = {}, 0, 0
    for name in dict.fromkeys(name for batch in batches for name in batch.resident_parts):
        total += sum(batch.resident_parts.get(name, 0) for batch in batches)
        # Rounding the running total keeps every part within a byte and the sum exact.
        parts[name], before = round(total / rollouts) - before, round(total / rollouts)
    return parts


def new_cache(
    world: WorldModel,
    config: CacheConfig,
    calibration: Calibration | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> KVCache:
    """An empty cache of the world's geometry on its device, dense tokens in ``dtype``.

    calibration: used where a codec asks for one.
    """
    shape = world.config
    return KVCache(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        frame_tokens=shape.frame_tokens,
        config=config,
        layout="BSHD",
        dtype=dtype,
        device=next(world.parameters()).device,
        calibration=calibration if config.needs_calibration else None,
    )


def run_batch(
    world: WorldModel,
    rows: Episodes,
    seeds: Sequence[int],
    config: CacheConfig,
    *,
    frames: int,
    first_packed_frame: int,
    method: str | None = None,
    attention: AttentionBackend = "sdpa",
    key_rope: KeyRope = "post",
    calibration: Calibration | None = None,
    cache_dtype: torch.dtype = torch.bfloat16,
    on_chunk: OnChunk | None = None,
) -> tuple[torch.Tensor, BatchCost]:
    """Roll out one batch with a fresh cache: its video uint8 [B, T, H, W, 3] (CPU) and its cost.

    Bytes over time are summed at the ends of the generated chunks from ``first_packed_frame`` on.
    Raises NonFiniteError, with ``method`` (default: the name of ``config``) in it, after the first
    generated chunk by whose end there was NaN or Inf.
    """
    cache = new_cache(world, config, calibration, cache_dtype)
    true_frames, chunk_frames = rows.frames.shape[1], world.config.chunk_frames
    over_time = [0.0, 0]
    bits_read: list[float] = []

    def sample(done: int, total: int) -> None:
        if true_frames + done * chunk_frames >= first_packed_frame:
            ledger = cache.ledger()
            over_time[0] += ledger.compression * ledger.resident_bytes
            over_time[1] += ledger.resident_bytes
            if done < total:  # what the last chunk leaves is read by none
                bits_read.append(ledger.bits_per_element)
        if on_chunk is not None:
            on_chunk(done, total)

    checked = refuse_nonfinite(cache, method or config.name, sample)
    started = time.perf_counter()
    video = rollout(
        world,
        rows,
        cache,
        frames,
        list(seeds),
        checked,
        attention=attention,
        key_rope=key_rope,
        cache_dtype=cache_dtype,
    )
    # The video arrives on the CPU, so the device has finished by now.
    seconds = time.perf_counter() - started
    ledger = cache.ledger()
    cost = BatchCost(
        rollouts=len(rows),
        bits_per_element=ledger.bits_per_element,
        bf16_bytes=ledger.compression * ledger.resident_bytes,
        resident_bytes=ledger.resident_bytes,
        peak_bytes=ledger.peak_bytes,
        bf16_bytes_over_time=over_time[0],
        resident_bytes_over_time=int(over_time[1]),
        seconds=seconds,
        dropped_dense_tokens=max(layer.dropped_dense_tokens for layer in cache),
        resident_parts=ledger.parts,
        bits_per_element_mean=fmean(bits_read) if bits_read else ledger.bits_per_element,
    )
    return video, cost


def warm_up(
    world: WorldModel,
    rows: Episodes,
    config: CacheConfig,
    *,
    frames: int,
    attention: AttentionBackend = "sdpa",
    key_rope: KeyRope = "post",
    calibration: Calibration | None = None,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """A throwaway rollout of the first row: what only the first pass pays is paid before timing."""
    rollout(
        world,
        rows.select([0]),
        new_cache(world, config, calibration, cache_dtype),
        frames,
        attention=attention,
        key_rope=key_rope,
        cache_dtype=cache_dtype,
    )


def compare_batch(
    method: str,
    reference: torch.Tensor,
    video: torch.Tensor,
    rows: Episodes,
    seeds: Sequence[int],
    shift: MethodShift | None,
) -> list[RolloutRecord]:
    """Metrics of every rollout of a batch against its BF16 reference, both [B, T, H, W, 3]."""
    mse = frame_mse(reference, video).tolist()
    ssim = ssim_by_frame(reference, video).tolist()
    flicker = flicker_by_step(reference, video).tolist()
    measured = shift if shift is not None and shift.is_measured else None
    return [
        RolloutRecord(
            method=method,
            episode=name,
            seed=seed,
            mse_by_frame=tuple(mse[index]),
            ssim_by_frame=tuple(ssim[index]),
            flicker_by_step=tuple(flicker[index]),
            top1_shift=None if measured is None else measured.top1[index],
            top5_shift=None if measured is None else measured.top5[index],
        )
        for index, (name, seed) in enumerate(zip(rows.names, seeds, strict=True))
    ]
