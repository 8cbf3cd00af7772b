"""Back in a room after 60 to 110 frames: how close is the generated view to the true one?

    python -m benchmarks.memory --walks /tmp/walks --methods bf16 --windows 24 120 --csv rows.csv
    python -m benchmarks.memory --walks /tmp/walks --windows 24 48 --equal-bytes --device cuda \\
        --prime 300 --csv rows.csv
    python -m benchmarks.memory --walks /tmp/walks --moments 2 --methods bf16 qvg --windows 24

`--walks` are the held-out walks of a world with poses, recorded again with all their frames:
`python training/data.py --recipe training/rooms.json --walks 0 --out /tmp/walks`. At each moment
(memory_walks.py) the cache is given `--prime` true frames, and `--frames` more are generated with
the walk's own buttons; those that return to a view are held against the true ones: PSNR over them
in common, LPIPS as their mean. A row is a moment, a seed, a method and a window; rows of
"true:seen" (the true frame that saw the view last) and "true:last" (the last true frame) say how
far copying gets. Differences are paired, over walks, from `--against`.

`--camera poses`: the world is told where the simulator stood, as by a given camera path, instead
of reckoning it from the buttons, which knows of no walls.

`--equal-bytes`: `--windows` are BF16's, and every other method gets the largest window of whole
spans that holds no more bytes than BF16 does (memory_windows.py), by the ledger at the end of the
rollout or, with `--when always`, at any moment of its last span. A window above the model's own is
possible (`--longest` says how far): its rotary positions then go beyond what the model was trained
with.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import in_one_line
from benchmarks.memory_bench import LAST, SEEN, Bench, Rollouts, Setting
from benchmarks.memory_table import Row, summary
from benchmarks.memory_walks import Moment, in_turns, moments_of, read_tracks
from benchmarks.memory_windows import largest_window, planned_bytes
from steadykv.cli.common import checked_device
from steadykv.cli.session import network_dtype
from steadykv.config import CacheConfig, CachePolicy
from steadykv.errors import ConfigError
from steadykv.evaluation.protocol import FLOOR, Protocol
from steadykv.evaluation.results import write_csv
from steadykv.evaluation.revisits import UNSEEN
from steadykv.world import WorldConfig, WorldModel, load_world

REFERENCE = "bf16"
METHODS = [REFERENCE, "qvg", "quantwm", "steady"]


def configuration(
    method: str, window: int, shape: WorldConfig, given: argparse.Namespace
) -> CacheConfig:
    """As `steadykv compare` makes it, with this window."""
    policy = CachePolicy(
        span_chunks=given.span_chunks, window_frames=window, sink_frames=shape.sink_frames
    )
    name = REFERENCE if method == FLOOR else method
    protocol = Protocol((name,), policy=policy, centroids=given.centroids, shift=None)
    return protocol.configurations()[name]


def settings(shape: WorldConfig, given: argparse.Namespace) -> list[Setting]:
    """Every method with every window, or with that of equal bytes; says what it found."""
    total, found = given.prime + given.frames, list[Setting]()
    for name in ("prime", "frames"):
        if getattr(given, name) < 1 or getattr(given, name) % shape.chunk_frames:
            raise ConfigError(
                f"--{name}: got {getattr(given, name)}, expected a multiple of {shape.chunk_frames}"
            )
    for window in given.windows:
        if window % shape.chunk_frames or not 0 < window <= total:
            raise ConfigError(
                f"--windows: got {window}, expected multiples of {shape.chunk_frames} up to the "
                f"{total} frames of --prime and --frames"
            )
        plain = configuration(REFERENCE, window, shape, given)
        budget = planned_bytes(plain, shape, total).at(given.when)
        for method in given.methods:
            is_packed = method not in (REFERENCE, FLOOR)
            own = window
            if given.equal_bytes and is_packed:
                tried = configuration(method, total, shape, given)
                own = largest_window(tried, shape, total, budget, given.when, given.longest)
            config = configuration(method, own, shape, given)
            if given.equal_bytes:
                cost = planned_bytes(config, shape, total).at(given.when)
                step = shape.chunk_frames * given.span_chunks
                most = total if given.longest is None else min(total, given.longest)
                capped = is_packed and own + step > most
                print(
                    f"{REFERENCE} with {window} frames: {budget:,} bytes ({given.when}); {method} "
                    f"with {own}: {cost:,}"
                    + (", all there may be: see --prime and --longest" * capped)
                )
            if all((method, own) != (other.method, other.window) for other in found):
                budget_window = window if given.equal_bytes else None
                found.append(Setting(method, own, config, budget_window))
    for one in found:
        if one.window > shape.window_frames:
            print(
                f"{one.method} with {one.window} frames: more than the {shape.window_frames} of "
                "the model's configuration; farther positions may be new to it"
            )
    return found


def chosen_moments(given: argparse.Namespace) -> list[Moment]:
    """Those of `--moments`, taken from the walks in turns."""
    by_walk = [
        moments_of(
            track,
            prime=given.prime,
            generated=given.frames,
            short=given.short,
            absent=(given.absent[0], given.absent[1]),
            apart=given.apart,
        )
        for track in read_tracks(given.walks)
    ]
    moments = in_turns(by_walk, given.moments)
    if not moments:
        raise ConfigError(
            f"{given.walks}: got no moment; expected some: generate more --frames (a walker needs "
            "some to turn to a view), or lower --absent"
        )
    there = sum(map(len, by_walk))
    walks = len({one.track.name for one in moments})
    print(f"{len(moments)} of {there} moments, in {walks} of {len(by_walk)} walks", flush=True)
    return moments


def run(
    given: argparse.Namespace,
    prepare: Callable[[WorldModel], tuple[Rollouts, list[dict[str, Any]]]],
    report: Callable[[Sequence[Row], tuple[str, int]], str],
) -> None:
    """Every setting's rows, after those that `prepare` has without one; prints the report."""
    torch.set_num_threads(given.threads)
    device = checked_device(given.device)
    world = load_world(given.world, device=device, dtype=network_dtype(device))
    chosen = settings(world.config, given)
    against = against_of(given, chosen)
    rollouts, rows = prepare(world)
    for setting in chosen:
        rows += rollouts.rows(setting)
        if given.csv is not None:  # after every setting, so that an interruption loses one
            given.csv.parent.mkdir(parents=True, exist_ok=True)
            write_csv(given.csv, rows)
    print(report(rows, against))


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(arguments)

    def prepare(world: WorldModel) -> tuple[Rollouts, list[dict[str, Any]]]:
        bench = Bench(world, chosen_moments(given), given)
        return bench, [row for method in (SEEN, LAST) for row in bench.copied(method)]

    run(given, prepare, summary)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_settings(parser)
    add = parser.add_argument
    add("--prime", type=int, default=120, help="true frames before the generated ones")
    add("--frames", type=int, default=18, help="generated frames")
    add("--moments", type=int, help="at most so many, from the walks in turns; default: all")
    add("--short", type=int, default=24, help="true frames that must lack the view")
    add("--absent", type=float, nargs=2, default=list(UNSEEN), metavar=("UNITS", "DEGREES"),
        help="they lack it beyond either")  # fmt: skip
    add("--apart", type=int, default=24, help="frames between the moments of a walk")
    return with_reference(parser, parser.parse_args(arguments))


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options about walks, caches and where they run, for `settings` and `against_of`."""
    add = parser.add_argument
    add("--walks", type=Path, required=True, help="folder of heldout-*.npz with poses")
    add("--world", default="rooms", help="a shipped world's name, or a file of weights")
    add("--methods", nargs="+", default=METHODS, help="floor, presets, keys:values")
    add("--windows", type=int, nargs="+", default=[24, 120], help="frames, open chunk included")
    add("--equal-bytes", action="store_true", help="--windows are bf16's; see benchmarks.memory")
    add("--longest", type=int, help="most frames of a window of equal bytes; default: all")
    add("--when", choices=("end", "always"), default="end", help="bytes are equal at the end")
    add("--camera", choices=("buttons", "poses"), default="buttons",
        help="what the world is told: reckoned from the buttons, or the simulator's")  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[0])
    add("--span-chunks", type=int, default=2)
    add("--centroids", type=int, default=32)
    add("--against", nargs=2, metavar=("METHOD", "WINDOW"), help="default: bf16, shortest window")
    add("--batch", type=int, default=32, help="rollouts at a time")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--threads", type=int, default=1)
    add("--videos", type=Path, help="folder for raw frames: WALK[@START]-METHOD-WINDOW-SEED.npy")
    add("--csv", type=Path, help="where the rows go")


def with_reference(
    parser: argparse.ArgumentParser, given: argparse.Namespace
) -> argparse.Namespace:
    """BF16 always runs, and with its shortest window is what others are compared with.

    Ends the program where a number must be above 0 and is not.
    """
    for name in ("batch", "threads", "moments", "count", "apart", "longest"):
        if getattr(given, name, None) is not None and getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}: expected 1 or more")
    if given.csv is not None and given.csv.is_dir():
        parser.error(f"--csv is the folder {given.csv}: expected a file")
    if given.videos is not None and given.videos.exists() and not given.videos.is_dir():
        parser.error(f"--videos is the file {given.videos}: expected a folder")
    if given.against is None:
        given.against = [REFERENCE, str(min(given.windows))]
    if REFERENCE not in given.methods:
        given.methods = [REFERENCE, *given.methods]
    return given


def against_of(given: argparse.Namespace, chosen: Sequence[Setting]) -> tuple[str, int]:
    """Method and window of `--against`; ConfigError if it is not among those that run."""
    against = (given.against[0], int(given.against[1]))
    if against not in [(one.method, one.window) for one in chosen]:
        raise ConfigError(
            f"--against: got {against[0]} {against[1]}, expected a method and window that run: "
            + ", ".join(f"{one.method} {one.window}" for one in chosen)
        )
    return against


if __name__ == "__main__":
    in_one_line(main)
