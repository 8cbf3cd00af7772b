"""Runs a comparison: one BF16 reference per episode and seed, then every method with its noise.

Results reach the disk whenever a batch of one method is finished, so that an interrupted run keeps
all that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steadykv.codecs import Calibration
from steadykv.config import CacheConfig, CachePolicy, preset
from steadykv.errors import ConfigError
from steadykv.evaluation.collector import (
    ComparisonResult,
    ResultCollector,
    attention_of,
    dtype_of,
    result_folder,
)
from steadykv.evaluation.protocol import (
    FLOOR_FP32,
    FLOORS,
    Protocol,
    first_packed_frame,
    frame_windows,
)
from steadykv.evaluation.provenance import environment, shared_configuration
from steadykv.evaluation.results import as_read
from steadykv.evaluation.resume import Progress
from steadykv.evaluation.rollouts import (
    BatchCost,
    OnChunk,
    compare_batch,
    refuse_nonfinite,
    run_batch,
    warm_up,
)
from steadykv.evaluation.token_shift import ShiftProbe, TokenShift, describe_shift
from steadykv.world import Episodes, WorldModel, rollout
from steadykv.world.rope import rotation_of

REFERENCE = "bf16"

OnProgress = Callable[[int, int, str], None]
"""(chunks done, chunks in all, what is running); chunks of all rollouts of the comparison."""

OnVideo = Callable[[str, str, int, torch.Tensor], None]
"""(method, episode, seed, uint8 [T, H, W, 3] on the CPU), for each kept video as it is made."""


def run_comparison(
    world: WorldModel,
    episodes: Episodes,
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    frames: int = 48,
    *,
    policy: CachePolicy | None = None,
    calibration: Calibration | None = None,
    out_dir: str | Path | None = None,
    resume: bool = False,
    arguments: Sequence[str] = (),
    on_progress: OnProgress | None = None,
    on_video: OnVideo | None = None,
    **options: Any,
) -> ComparisonResult:
    """Roll ``episodes`` out with every method and seed and compare each with BF16.

    ``policy`` defaults to spans of two chunks under the world's own window and sink; ``options``
    are the other fields of :class:`Protocol`; ``calibration`` is for methods with fixed levels, and
    only if there are some. Within a batch, the reference comes first, then the
    token shift, the methods in their order, and the floor. With ``out_dir`` (created if absent) the
    files ``metrics.json``, ``metrics.csv``, ``rollouts.json``, ``token_shift.json`` and
    ``progress.json`` are rewritten, each atomically, whenever a batch of a method is finished;
    ``arguments``, the command line, are kept in the last.

    ``resume`` goes on with the interrupted run that ``out_dir`` holds: what it finished is read,
    not run again, and gives no video; the reference (and the token shift) of a batch that it left
    unfinished is computed again. All but the seconds is as if it had never been interrupted.

    Holds the reference videos of one batch, those of one method, and one cache at a time (during
    the token shift one cache per key codec). Global random generators are left alone.
    Raises ConfigError (protocol, a folder that already holds results, or one to resume that was
    begun with another configuration or elsewhere), PayloadError (one to resume that is damaged)
    and CalibrationError (one
    for other layers, heads, codecs or another frame of keys) before anything runs, and
    SteadyKVError when a result cannot be written; files written before stay.
    """
    if policy is None:
        shape = world.config
        policy = CachePolicy(
            span_chunks=2, window_frames=shape.window_frames, sink_frames=shape.sink_frames
        )
    options["calibrated"] = calibration is not None
    protocol = Protocol(tuple(methods), tuple(seeds), frames, policy, **options)
    comparison = _Comparison(world, episodes, protocol, calibration, on_progress, on_video)
    comparison.open(out_dir, resume, arguments)
    return comparison.run()


@dataclass(frozen=True)
class _Batch:
    """Rollouts that run together; the first ``kept`` of their videos are returned."""

    rows: Episodes
    seeds: list[int]
    kept: int
    label: str


class _Comparison:
    """State of one run."""

    def __init__(
        self,
        world: WorldModel,
        episodes: Episodes,
        protocol: Protocol,
        calibration: Calibration | None,
        on_progress: OnProgress | None,
        on_video: OnVideo | None,
    ) -> None:
        self.world, self.episodes, self.protocol = world, episodes, protocol
        self.on_progress, self.on_video = on_progress, on_video
        self.device = next(world.parameters()).device
        self.configs = protocol.configurations()
        self.calibration = self._checked(calibration)
        # Where all keys stay as they are, no selection can change.
        has_packed_keys = any(not config.keys.is_dense for config in self.configs.values())
        self.shift_options = protocol.shift if has_packed_keys else None
        self.warmed: set[str] = set()
        self.world_fp32: WorldModel | None = None
        self.reference_config = preset(REFERENCE).replace(policy=protocol.policy)
        chunk_frames = world.config.chunk_frames
        self.first_packed = first_packed_frame(protocol.policy, chunk_frames)
        self.windows = frame_windows(
            self.first_packed, chunk_frames + protocol.frames, chunk_frames
        )
        self.plan = [(i, seed) for i in range(len(episodes)) for seed in protocol.seeds]
        if not self.plan or len(set(episodes.names)) != len(episodes):
            raise ConfigError(
                f"episodes are {list(episodes.names)}; expected at least one, and none twice: "
                "repeat a walk with more seeds"
            )
        self.videos: dict[str, list[torch.Tensor]] = {}
        self.shift: dict[str, Any] | None = None
        self.chunks_done, self.chunks_planned = 0, self._planned_chunks()

    def open(self, out_dir: str | Path | None, resume: bool, arguments: Sequence[str]) -> None:
        """Make the result folder, or read what it holds."""
        shared = as_read(
            shared_configuration(
                self.world,
                self.episodes,
                self.protocol,
                windows=self.windows,
                shift=self.shift_options,
                shift_frames=self._shift_frames(),
                calibration=self.calibration,
            )
        )
        place = environment(self.device)
        plan = self._plan(shared)
        if resume:
            if out_dir is None:
                raise ConfigError("resume is True, but out_dir is None: name the folder")
            folder: Path | None = Path(out_dir)
            progress = Progress.read(Path(out_dir))
            progress.check(plan, place, Path(out_dir))
        else:
            progress = Progress(plan, place, list(arguments))
            folder = None if out_dir is None else result_folder(out_dir)
        self.collector = ResultCollector(
            self.protocol,
            self.windows,
            planned=len(self.plan),
            configs=self.configs,
            reference=self.reference_config,
            shared=shared,
            environment=place,
            folder=folder,
            progress=progress,
        )
        if resume and folder is not None:
            names = [(self.episodes.names[index], seed) for index, seed in self.plan]
            self.collector.restore(progress.records(folder, names))
            if self.shift_options is not None:
                self.shift = progress.shift(folder)

    def _plan(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Everything that decides the numbers."""
        return {
            "configuration": shared,
            "methods": list(self.configs),
            "caches": {method: config.to_dict() for method, config in self.configs.items()},
            "floors": list(self.protocol.floors),
            "paired_against": self.protocol.paired_against,
        }

    def run(self) -> ComparisonResult:
        size = self.protocol.max_batch
        for first in range(0, len(self.plan), size):
            self._run_batch(first, self.plan[first : first + size])
        return ComparisonResult(
            rows=self.collector.rows(),
            records=self.collector.all_records(),
            windows=self.windows,
            shift=self.shift,
            videos={method: torch.stack(videos) for method, videos in self.videos.items()},
            protocol=self.protocol,
            run=self.collector.progress.run,
        )

    def _run_batch(self, first: int, plan: Sequence[tuple[int, int]]) -> None:
        batch = _Batch(
            rows=self.episodes.select([episode for episode, _ in plan]),
            seeds=[seed for _, seed in plan],
            kept=max(0, min(self.protocol.keep_videos - first, len(plan))),
            label=f"rollouts {first + 1}-{first + len(plan)} of {len(self.plan)}",
        )
        configs = dict(self.configs)
        configs |= dict.fromkeys(self.protocol.floors, self.reference_config)
        finished = [name for name in configs if self.collector.progress.has(name, first)]
        if len(finished) == len(configs):
            self.chunks_done += self._chunks_of_a_batch()
            return
        reference, reference_cost = self._roll_out(REFERENCE, self.reference_config, batch)
        shift = self._measure_shift(batch, reference)
        reference = reference.to(self.device)  # where metrics are computed
        for method, config in configs.items():
            video, cost = reference, reference_cost
            if method in finished:
                if method in FLOORS or not _is_dense(config):
                    self.chunks_done += self.protocol.frames // self.world.config.chunk_frames
                continue
            # A dense method is the reference itself: rolled out again, it would be the same video.
            if method in FLOORS or not _is_dense(config):
                video, cost = self._roll_out(method, config, batch)
                video = video.to(self.device)
            own_shift = shift.methods.get(method) if shift is not None else None
            records = compare_batch(method, reference, video, batch.rows, batch.seeds, own_shift)
            self.collector.add(method, first, records, cost)

    def _checked(self, calibration: Calibration | None) -> Calibration | None:
        """On the world's device. Raises CalibrationError where it does not fit a method."""
        if calibration is None:
            return None
        shape = self.world.config
        size = range(shape.num_layers), shape.num_heads, shape.head_dim
        for config in self.configs.values():
            calibration.check(config, *size, self.protocol.key_rope)
        return calibration.to(self.device)

    # --- rollouts ---------------------------------------------------------------------------

    def _roll_out(
        self, method: str, config: CacheConfig, batch: _Batch
    ) -> tuple[torch.Tensor, BatchCost]:
        self._warm_up(method, config, batch)
        with self._progress(f"{method}, {batch.label}", self.protocol.frames) as on_chunk:
            video, cost = run_batch(
                self._world_of(method),
                batch.rows,
                batch.seeds,
                config,
                frames=self.protocol.frames,
                first_packed_frame=self.first_packed,
                method=method,
                attention=attention_of(method),
                key_rope=self.protocol.key_rope,
                calibration=self.calibration,
                cache_dtype=dtype_of(method),
                on_chunk=on_chunk,
            )
        for index in range(batch.kept):
            kept = video[index].clone()  # a view would keep the whole batch
            self.videos.setdefault(method, []).append(kept)
            if self.on_video is not None:
                self.on_video(method, batch.rows.names[index], batch.seeds[index], kept)
        return video, cost

    def _warm_up(self, method: str, config: CacheConfig, batch: _Batch) -> None:
        """Before a first timed rollout: one chunk on the CPU, on CUDA every method until it packs.

        Kernels are compiled and allocators filled on first use; `seconds` must not hold that.
        """
        on_cuda = self.device.type == "cuda"
        key = method if on_cuda else ""
        if key in self.warmed:
            return
        self.warmed.add(key)
        chunk = self.world.config.chunk_frames
        warm_up(
            self._world_of(method),
            batch.rows,
            config,
            frames=min(self.first_packed, self.protocol.frames) if on_cuda else chunk,
            attention=attention_of(method),
            key_rope=self.protocol.key_rope,
            calibration=self.calibration,
            cache_dtype=dtype_of(method),
        )

    def _world_of(self, method: str) -> WorldModel:
        """The network of a method's rollouts; a copy in FP32 is made once, where it is not yet."""
        if method != FLOOR_FP32 or next(self.world.parameters()).dtype == torch.float32:
            return self.world
        if self.world_fp32 is None:
            self.world_fp32 = deepcopy(self.world).float()
        return self.world_fp32

    def _measure_shift(self, batch: _Batch, reference: torch.Tensor) -> TokenShift | None:
        """The batch again in BF16, probed; the reference itself runs unprobed, for its seconds."""
        options = self.shift_options
        if options is None:
            return None
        shape, frames = self.world.config, self._shift_frames()
        probe = ShiftProbe(
            self.configs,
            options,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            frame_tokens=shape.frame_tokens,
            patch_columns=shape.columns,
            example_rows=batch.kept,
            reference=self.reference_config,
            device=self.device,
            calibration=self.calibration,
            rotation=None if self.protocol.key_rope == "post" else rotation_of(shape, self.device),
        )
        with self._progress(f"token shift, {batch.label}", frames) as on_chunk:
            video = rollout(
                self.world,
                batch.rows,
                probe,
                frames,
                batch.seeds,
                refuse_nonfinite(probe, "the token shift", on_chunk),
                key_rope=self.protocol.key_rope,
            )
        result = probe.result()
        if self.shift is None:
            is_reference = torch.equal(video, reference[:, : video.shape[1]])
            described = describe_shift(
                result, batch.rows.names, batch.seeds, frames, is_reference=is_reference
            )
            self.shift = as_read(described)
            self.collector.add_shift(self.shift)
        return result

    # --- progress ---------------------------------------------------------------------------

    def _shift_frames(self) -> int:
        shift = self.shift_options
        if shift is None:
            return 0
        return min(shift.frames or self.protocol.frames, self.protocol.frames)

    def _planned_chunks(self) -> int:
        return -(-len(self.plan) // self.protocol.max_batch) * self._chunks_of_a_batch()

    def _chunks_of_a_batch(self) -> int:
        packed = sum(not _is_dense(config) for config in self.configs.values())
        full = (1 + packed + len(self.protocol.floors)) * self.protocol.frames
        return (full + self._shift_frames()) // self.world.config.chunk_frames

    @contextmanager
    def _progress(self, label: str, frames: int) -> Iterator[OnChunk]:
        """A chunk callback that counts on from what ran before."""
        before = self.chunks_done

        def report(done: int, total: int) -> None:
            self.chunks_done = before + done
            if self.on_progress is not None:
                self.on_progress(self.chunks_done, self.chunks_planned, label)

        report(0, 0)
        yield report
        self.chunks_done = before + frames // self.world.config.chunk_frames


def _is_dense(config: CacheConfig) -> bool:
    return config.keys.is_dense and config.values.is_dense
