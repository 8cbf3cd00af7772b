"""The recorded walks in device memory, filled by a thread while training already runs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steadykv.evaluation.revisits import returning
from steadykv.world.config import WorldConfig
from steadykv.world.pose import walk_poses

CANDIDATES = 8
ASIDE = 8.0
"""Map units: a view that comes back nearer than this to where it was seen needs no parallax."""


def comes_back(poses: NDArray[np.float32]) -> NDArray[np.int64]:
    """`returning` of a walk's poses [T,3], of views that are seen again from aside alone."""
    seen = returning(poses)
    apart = np.hypot(*(poses[:, :2] - poses[seen, :2]).T)
    return np.where(apart > ASIDE, seen, -1)


class Sequences(NamedTuple):
    """Frames uint8 [B,F,H,W,3], actions int64 [B,F], and the poses FP32 [B,F,3] to tell of them."""

    frames: torch.Tensor
    actions: torch.Tensor
    poses: torch.Tensor


class Walks:
    """All training walks as uint8 on `device`; `sample` draws from those loaded so far.

    Holds at most `capacity` frames; files beyond that are left out. Frames larger than the model's
    (a tiny model's on a CPU) are cropped. Of `camera_share` of the sequences the simulator's poses
    are told, of the others what is reckoned from their buttons. `returns_share` of all sequences
    are the best of `CANDIDATES` drawn: those in which most views come back from aside
    (`comes_back`).
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        capacity: int,
        config: WorldConfig,
        camera_share: float = 0.0,
        returns_share: float = 0.0,
    ):
        size = (config.image_height, config.image_width)
        self.frames = torch.empty(capacity, *size, 3, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.poses = torch.zeros(capacity, 3, device=device)
        self.camera_share, self.returns_share = camera_share, returns_share
        # of every frame that shows a view again: the frame that saw it last; else -1
        self.seen = np.full(capacity if returns_share else 0, -1)
        self.spans: list[tuple[int, int]] = []  # (first frame, count) of each loaded walk
        self.used, self.folder, self.lock = 0, folder, threading.Lock()
        self.error: Exception | None = None
        self.complete = False
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, enough: int) -> None:
        """Until `enough` walks are loaded, or all there are; what stopped the loader is raised."""
        while len(self.spans) < enough and not self.complete and self.error is None:
            time.sleep(0.5)
        if self.error is not None:
            raise RuntimeError(f"walks: {self.folder} could not be loaded") from self.error
        if not self.spans:
            raise SystemExit(f"walks: got none in {self.folder}, expected some: run data.py")

    def _run(self) -> None:
        try:
            self._fill()
        except Exception as error:  # raised by wait: a thread's own traceback would be overlooked
            self.error = error

    def _fill(self) -> None:
        seen: set[str] = set()
        with ThreadPoolExecutor(4) as pool:
            while True:
                last = (self.folder / "DONE").exists()
                fresh = [p for p in sorted(self.folder.glob("train-*.npz")) if p.name not in seen]
                seen |= {p.name for p in fresh}
                list(pool.map(self._load, fresh))
                if last:
                    self.complete = True
                    return
                time.sleep(1)

    def _load(self, path: Path) -> None:
        with np.load(path) as walk:
            frames, actions = torch.from_numpy(walk["frames"]), torch.from_numpy(walk["actions"])
            lengths = walk["lengths"].tolist()
            needed = self.camera_share or self.returns_share
            poses = torch.from_numpy(walk["poses"]) if needed else None
        with self.lock:
            first, self.used = self.used, self.used + len(frames)
            if self.used > len(self.frames):
                return
        height, width = self.frames.shape[1:3]
        self.frames[first : first + len(frames)].copy_(frames[:, :height, :width])
        self.actions[first : first + len(frames)].copy_(actions)
        if poses is not None:
            self.poses[first : first + len(frames)].copy_(poses)
        if poses is not None and self.returns_share:
            at = first
            for part in np.split(poses.numpy(), np.cumsum(lengths)[:-1]):
                seen = comes_back(part)
                self.seen[at : at + len(part)] = np.where(seen < 0, -1, seen + at)
                at += len(part)
        with self.lock:
            for length in lengths:
                self.spans.append((first, length))
                first += length

    def sample(self, batch: int, length: int, rng: np.random.Generator) -> Sequences:
        """Sequences of `length` frames from `batch` places drawn evenly."""
        with self.lock:
            spans = [span for span in self.spans if span[1] >= length]
        rows = []
        for _ in range(batch):
            starts = [self._start(spans, length, rng)]
            if self.returns_share and rng.random() < self.returns_share:
                starts += [self._start(spans, length, rng) for _ in range(CANDIDATES - 1)]
            start = max(starts, key=lambda at: (self.seen[at : at + length] >= at).sum())
            rows.append(np.arange(start, start + length))
        device = self.frames.device
        index = torch.from_numpy(np.stack(rows)).to(device, non_blocking=True)
        actions = self.actions[index]
        poses = walk_poses(actions)
        if self.camera_share:
            told = torch.from_numpy(rng.random(batch) < self.camera_share).to(device)
            poses = torch.where(told[:, None, None], self.poses[index], poses)
        return Sequences(self.frames[index], actions, poses)

    @staticmethod
    def _start(spans: list[tuple[int, int]], length: int, rng: np.random.Generator) -> int:
        """The first frame of a sequence drawn evenly over walks, then over places."""
        first, count = spans[int(rng.integers(len(spans)))]
        return first + int(rng.integers(count - length + 1))
