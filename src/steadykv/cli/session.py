"""One comparison on the command line: run, keep every result as it comes, write the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadykv.cli.common import Advance, claimed, command_text
from steadykv.cli.interrupts import raise_on_interrupt
from steadykv.cli.resuming import locked, read_frames, write_frames
from steadykv.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from steadykv.codecs import Calibration
    from steadykv.evaluation.collector import ComparisonResult
    from steadykv.report.video import Frames

# ViZDoom runs 35 tics a second and a frame is 2 of them: 17.5. Slower shows more.
FRAMES_PER_SECOND = 12
SINGLE_SCALE, SIDE_SCALE = 4, 3
REPORT_FILE, SIDE_FILE = "report.html", "side_by_side.mp4"


@dataclass
class Session:
    """Everything one command needs; ``run`` does it, ``show`` prints what came out.

    ``resume``: the folder is that of an interrupted run, which goes on.
    """

    kind: str
    folder: Path
    methods: Sequence[str]
    episodes: int | Sequence[int]
    seeds: Sequence[int]
    frames: int
    device: torch.device
    dtype: torch.dtype
    policy: dict[str, int]
    options: dict[str, Any]  # further fields of Protocol
    arguments: Sequence[str]
    as_json: bool
    store: Path | None = None
    resume: bool = False
    world: str | None = None  # a shipped world's name or a file; None: the default one
    walks: Path | None = None  # None: those of the shipped world
    calibration: Calibration | None = None
    remark: str = ""  # about the one walk, if there is one
    videos: dict[str, Frames] = field(default_factory=dict, init=False)
    mp4: dict[str, bytes] = field(default_factory=dict, init=False)
    shown: str = field(default="", init=False)

    def run(self, advance: Advance) -> ComparisonResult:
        """Run everything and write the report. Raises Interrupted, or what the library raises."""
        from steadykv.evaluation.store import record_run

        with claimed(self.folder, exists=self.resume), locked(self.folder):
            result = self._compare(advance)
            self._restore_videos(result)
            self._report(result, advance)
            record_run(
                self.kind,
                result.rows,
                command=self.command,
                folder=self.folder,
                store=self.store,
                run=result.run,
            )
        return result

    @property
    def command(self) -> str:
        """As it can be typed again."""
        return command_text(self.arguments)

    def _compare(self, advance: Advance) -> ComparisonResult:
        from steadykv.config import CachePolicy
        from steadykv.evaluation.comparison import run_comparison
        from steadykv.world import load_episodes, load_world
        from steadykv.world.shipped import walks_of

        episodes = load_episodes(self.episodes, walks_of(self.world, self.walks))
        world = load_world(self.world, device=self.device, dtype=self.dtype)
        check_frames(self.frames, world.config.chunk_frames, episodes.actions.shape[1])
        raise_on_interrupt()
        policy = CachePolicy(
            window_frames=world.config.window_frames,
            sink_frames=world.config.sink_frames,
            **self.policy,
        )
        return run_comparison(
            world,
            episodes,
            self.methods,
            self.seeds,
            self.frames,
            policy=policy,
            calibration=self.calibration,
            out_dir=self.folder,
            resume=self.resume,
            arguments=self.arguments,
            on_progress=lambda done, total, label: advance(done, total, _step(label)),
            on_video=self._keep_video,
            **self.options,
        )

    def _keep_video(self, method: str, episode: str, seed: int, video: torch.Tensor) -> None:
        """Write a method's MP4, and its raw frames, as soon as its walk is done."""
        from steadykv.evaluation.results import write_bytes_atomically
        from steadykv.report.video import encode_mp4, enlarge

        frames = video.numpy()
        write_frames(self.folder / frames_file(method), frames)
        data = encode_mp4(enlarge(frames, SINGLE_SCALE), FRAMES_PER_SECOND)
        write_bytes_atomically(self.folder / video_file(method), data)
        self.videos[method], self.mp4[method] = frames, data
        self.shown = _shown(episode, seed)

    def _restore_videos(self, result: ComparisonResult) -> None:
        """Those of methods that an interrupted run had finished. Raises PayloadError."""
        from steadykv.evaluation.protocol import FLOORS
        from steadykv.report.video import encode_mp4, enlarge

        shared = result.rows[0]["configuration"]
        for row in result.rows:
            method = row["method"]
            # A dense method that is not "bf16" has no rollouts of its own, and no video.
            is_original = method != "bf16" and row["keys"] == row["values"] == "bf16"
            if method not in self.videos and (method in FLOORS or not is_original):
                frames = read_frames(self.folder / frames_file(method))
                file = self.folder / video_file(method)
                self.videos[method] = frames
                self.mp4[method] = (
                    file.read_bytes()
                    if file.is_file()
                    else encode_mp4(enlarge(frames, SINGLE_SCALE), FRAMES_PER_SECOND)
                )
                self.shown = _shown(shared["episodes"][0], shared["seeds"][0])

    def _report(self, result: ComparisonResult, advance: Advance) -> None:
        from steadykv.evaluation.results import write_bytes_atomically
        from steadykv.report.pages import Report, report_page, side_captions
        from steadykv.report.video import encode_mp4, side_by_side

        advance(0, 2, "writing the side-by-side video")
        several = len(result.records) > len(result.rows)
        report = Report(
            rows=result.rows,
            videos=self.videos,
            mp4=self.mp4,
            shift=result.shift,
            fps=FRAMES_PER_SECOND,
            command=self.command,
            shown=f"{self.shown} The numbers below are means over all walks."
            if several
            else self.remark,
        )
        captions = side_captions(report)
        sheet = side_by_side({name: self.videos[name] for name in captions}, captions, SIDE_SCALE)
        data = encode_mp4(sheet, FRAMES_PER_SECOND)
        write_bytes_atomically(self.folder / SIDE_FILE, data)
        advance(1, 2, "writing the report")
        write_bytes_atomically(self.folder / REPORT_FILE, report_page(report).encode())

    def show(self, result: ComparisonResult) -> None:
        """Print the table and where the report is, or everything as JSON."""
        report = self.folder / REPORT_FILE
        if self.as_json:
            outcome = {
                "folder": str(self.folder),
                "report": str(report),
                "videos": {name: str(self.folder / video_file(name)) for name in self.mp4},
                "side_by_side": str(self.folder / SIDE_FILE),
                "metrics": result.rows,
            }
            print(json.dumps(outcome, allow_nan=False))
            return
        from rich.console import Console

        from steadykv.report.terminal import difference_table, result_table
        from steadykv.report.text import hints, lead

        console = Console()
        console.print(result_table(result.rows, console.width))
        differences = difference_table(result.rows)
        if differences is not None:
            console.print(differences)
        for sentence in lead(result.rows):
            console.print(sentence, highlight=False)
        for hint in hints(result.rows, " of the report"):
            console.print(hint, style="yellow", highlight=False)
        console.print()
        console.print(f"report: {report.resolve()}", highlight=False, soft_wrap=True)


def network_dtype(device: torch.device, precision: str = "auto") -> torch.dtype:
    """What the network computes in; "auto" is BF16 on CUDA and FP32 elsewhere."""
    import torch

    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, precision)
    return dtype


def check_frames(frames: int, chunk: int, held: int) -> None:
    """Refuse a length that the world cannot generate. Raises ConfigError.

    chunk: frames generated together. held: frames whose buttons the walks know.
    """
    most = (held - chunk) // chunk * chunk
    if frames % chunk or frames > most:
        raise ConfigError(
            f"--frames: got {frames}, expected a multiple of {chunk} up to {most}; try "
            f"{min(most, max(chunk, round(frames / chunk) * chunk))}"
        )


def _step(label: str) -> str:
    """What the bar shows of the comparison's own label, "qvg, rollouts 1-4 of 12"."""
    from steadykv.report.text import method_title

    name, _, walks = label.partition(", rollouts ")
    title = method_title(name)
    return title if walks == "1-1 of 1" else f"{title}, walks {walks}"


def _shown(episode: str, seed: int) -> str:
    return f"The videos show episode {episode} with noise seed {seed}."


def frames_file(method: str) -> str:
    """File name of a method's raw frames."""
    return f"{method.replace(':', '-')}.npz"


def video_file(method: str) -> str:
    """File name of a method's video; a colon is no part of file names everywhere."""
    return f"{method.replace(':', '-')}.mp4"
