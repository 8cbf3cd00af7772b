"""What a comparison runs, and over which frames it is judged: pure decisions, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from steadykv.cache.policy import Piece, SpanPolicy
from steadykv.config import CacheConfig, CachePolicy, parse_method
from steadykv.errors import ConfigError
from steadykv.evaluation.calibrated import check_need

FLOOR = "floor"
"""Name of the noise floor: BF16 again, attention computed by another implementation."""

FLOOR_FP32 = "floor_fp32"
"""The other noise floor: network and cache in FP32, the same attention as BF16."""

FLOORS = (FLOOR, FLOOR_FP32)

PSNR_CEILING_DB = 100.0
"""Identical videos count as this in averages. One grey level in one value of three frames of
128 x 96 pixels is 98.6 dB, so nothing that differs visibly is cut off."""

TOP_K = 5
"""Size of the set behind ``top5_shift``."""

WINDOW_ENDS = (24, 48)
"""Frames at which a cumulative window ends, beside the first two chunks and the whole video."""


FEW_EPISODES = 6
"""With fewer, bootstrap intervals are too narrow (see `bootstrap_interval`) and mere hints."""


@dataclass(frozen=True)
class FrameWindow:
    """Frames ``start`` .. ``end`` - 1; frame 0 is the first context frame."""

    start: int
    end: int

    @property
    def label(self) -> str:
        """Inclusive, as tables print it: "6-8"."""
        return f"{self.start}-{self.end - 1}"


def first_packed_frame(policy: CachePolicy, chunk_frames: int) -> int:
    """First frame whose generation reads packed data, with chunk 0 holding the context frames.

    Asks the cache's own span policy, chunk by chunk. With spans of two chunks of three frames, the
    context and the first generated chunk are packed when the latter is committed, so the answer is
    frame 6. Raises ConfigError when nothing would be packed within 10,000 chunks.
    """
    spans = SpanPolicy(policy, frame_tokens=1)
    last = None
    waiting: list[Piece] = []
    for chunk in range(10_000):
        end = (chunk + 1) * chunk_frames
        pieces = spans.place(end - chunk_frames, end, chunk, last)
        last = pieces[-1]
        waiting.extend(piece for piece in pieces if not piece.kept_dense)
        if spans.ready(waiting, chunk):
            return end
    names = ("span_chunks", "sink_keep", "recent_keep")
    given = ", ".join(f"{name} {getattr(policy, name)}" for name in names)
    raise ConfigError(
        f"{given}: nothing is packed within 10,000 chunks; expected a smaller number of one of them"
    )


def frame_windows(
    first: int, total: int, chunk_frames: int, ends: Sequence[int] = WINDOW_ENDS
) -> tuple[FrameWindow, ...]:
    """Growing windows from ``first`` on: one chunk, two chunks, up to each of ``ends``, everything.

    ``total`` counts all frames, context included; ends outside (first, total) are left out. The
    last window is the longest: headline numbers refer to it. Raises ConfigError when the video
    ends before ``first``.
    """
    if first >= total:
        raise ConfigError(
            f"the video has {total} frames, but the first that reads packed data is frame {first}; "
            f"expected more frames: at least {first + chunk_frames - total} more"
        )
    stops = {first + chunk_frames, first + 2 * chunk_frames, *ends, total}
    return tuple(FrameWindow(first, stop) for stop in sorted(stops) if first < stop <= total)


@dataclass(frozen=True)
class ShiftOptions:
    """How the token shift is sampled; all of it is printed with the results.

    query_stride: every so many query tokens. 13 shares no factor with the 16 x 12 patches of a
        frame, so that every row and column of patches is visited.
    chunk_stride: every so many generated chunks that see packed keys; 1 measures all of them.
    frames: generated frames of the measured rollout; None takes the comparison's own number.
    moving, steady: methods whose difference makes a query worth showing; None takes "qvg" and
        "quantwm", or else the first and the last method with packed keys.
    """

    query_stride: int = 13
    chunk_stride: int = 1
    frames: int | None = None
    moving: str | None = None
    steady: str | None = None

    def __post_init__(self) -> None:
        for name in ("query_stride", "chunk_stride"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"ShiftOptions.{name} is {getattr(self, name)}; expected 1 or more"
                )
        if self.frames is not None and self.frames < 1:
            raise ConfigError(
                f"ShiftOptions.frames is {self.frames}; expected 1 or more, or None for all"
            )


@dataclass(frozen=True)
class Protocol:
    """One comparison: methods x episodes x seeds on a model of given geometry.

    methods: as :func:`steadykv.config.parse_method` reads them; floors are added by their flags.
    seeds: noise seeds; every episode is rolled out once with each, the same for all methods.
    frames: generated frames, after the context frames.
    policy: span and window of every method; a preset's own kept tokens (``kivi_recent``) are added.
    centroids: of every clustering codec that does not name its own ("qvg@centroids=64"); None
        leaves each preset's own.
    max_batch: rollouts that share one batch. Bytes and seconds are reported per rollout.
    paired_against: method whose difference from each other method is reported with an interval.
    calibrated: methods with fixed levels are allowed, as a `Calibration` is at hand.
    keep_videos: the first so many rollouts' videos are returned; the shown query is one of theirs.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    frames: int = 48
    policy: CachePolicy = field(default_factory=lambda: CachePolicy(span_chunks=2))
    centroids: int | None = 32
    floor: bool = True
    floor_fp32: bool = False
    max_batch: int = 8
    shift: ShiftOptions | None = field(default_factory=ShiftOptions)
    paired_against: str | None = None
    calibrated: bool = False
    keep_videos: int = 1
    key_rope: Literal["post", "pre"] = "post"
    confidence: float = 0.95
    resamples: int = 2000

    def __post_init__(self) -> None:
        for name in ("methods", "seeds"):
            entries = getattr(self, name)
            if len(entries) == 0 or len(set(entries)) != len(entries):
                raise ConfigError(f"{name} is {entries!r}; expected at least one, and none twice")
        for name, flag in zip(FLOORS, ("floor", "floor_fp32"), strict=True):
            if name in self.methods:
                raise ConfigError(f'methods name "{name}"; expected {flag}=True for a noise floor')
        for name in ("frames", "max_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        configs = self.configurations()  # an unknown method is refused before anything is loaded
        check_need(configs, self.calibrated, "compare --calibration FILE")
        known = self.methods
        against = {"paired_against": self.paired_against}
        if self.shift is not None:
            against |= {"shift.moving": self.shift.moving, "shift.steady": self.shift.steady}
        for name, method in against.items():
            if method is not None and method not in known:
                raise ConfigError(
                    f"{name} is {method!r}; expected one of the methods: {', '.join(known)}"
                )

    @property
    def floors(self) -> tuple[str, ...]:
        """The noise floors that are rolled out, in this order after the methods."""
        wanted = (self.floor, self.floor_fp32)
        return tuple(name for name, is_wanted in zip(FLOORS, wanted, strict=True) if is_wanted)

    def configurations(self) -> dict[str, CacheConfig]:
        """Method name -> its cache configuration under this protocol. Raises ConfigError."""
        return {method: self._configuration(method) for method in self.methods}

    def _configuration(self, method: str) -> CacheConfig:
        defaults = {} if self.centroids is None else {"centroids": self.centroids}
        config = parse_method(method, **defaults)
        own = config.policy
        return config.replace(
            name=method,
            window_frames=self.policy.window_frames,
            sink_frames=self.policy.sink_frames,
            sink_keep=max(self.policy.sink_keep, own.sink_keep),
            recent_keep=max(self.policy.recent_keep, own.recent_keep),
            span_chunks=self.policy.span_chunks,
        )
