"""`python -m benchmarks.memory` on made-up walks and a tiny world."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import memory, memory_table
from benchmarks.memory_table import by_walk, summary
from benchmarks.memory_walks import Track, in_turns, load_moments, moments_of, read_tracks
from benchmarks.memory_windows import When, largest_window, planned_bytes
from steadykv.cache import KVCache
from steadykv.config import CacheConfig, parse_method, preset
from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.aggregate import capped_psnr
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.evaluation.results import write_csv
from steadykv.evaluation.rollouts import run_batch
from tests.recorded_walks import POSES, TINY, walks_of_a_tiny_world, write_walks
from tests.worlds import tiny_episodes, tiny_world


def track(poses: np.ndarray, name: str = "houses-000-00", path: Path = Path("none")) -> Track:
    return Track(name, path, 0, len(poses), np.zeros(len(poses), np.uint8), poses)


# --- walks and moments ----------------------------------------------------------------------------


def test_walks_lie_one_behind_the_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no heldout-\*.npz; .*training/data.py"):
        read_tracks(tmp_path)
    write_walks(tmp_path)
    tracks = read_tracks(tmp_path)
    names = [f"houses-{file:03d}-{number:02d}" for file in range(2) for number in range(2)]
    assert [one.name for one in tracks] == names
    assert [(one.first, one.length) for one in tracks] == 2 * [(0, 90), (90, 90)]
    assert tracks[1].actions[:3].tolist() == [10, 11, 12]
    assert (tracks[1].poses == POSES).all()
    np.savez(tmp_path / "heldout-mazes-000.npz", frames=[0], actions=[0], lengths=[1])
    with pytest.raises(PayloadError, match="no walks with poses"):
        read_tracks(tmp_path)
    two = {"frames": [0, 0], "actions": [0, 0], "lengths": [2]}
    for poses in (np.zeros((3, 3)), np.full((2, 3), np.nan)):
        np.savez(tmp_path / "heldout-mazes-000.npz", poses=poses, **two)
        with pytest.raises(PayloadError, match="lengths do not fit"):
            read_tracks(tmp_path)
    (tmp_path / "heldout-mazes-000.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(PayloadError, match="no walks with poses"):
        read_tracks(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [["--batch", "-1"], ["--threads", "0"], ["--moments", "0"], ["--longest", "0"], ["--csv", "."],
     ["--videos", __file__]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_runs(
    tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        memory.main(["--walks", str(tmp_path), *wrong])
    assert f"{wrong[0]} is " in capsys.readouterr().err


def test_a_moment_returns_to_what_the_true_frames_saw_and_the_last_did_not() -> None:
    (best,) = moments_of(track(POSES), prime=66, generated=6)
    # All six returning frames are generated, and none of them is a true frame.
    assert (best.start, best.frames, best.seen) == (70, tuple(range(70, 76)), (5,) * 6)
    # With 59 true frames, none of them is frame 5 once one of six generated ones is frame 70.
    assert not moments_of(track(POSES), prime=59, generated=6)
    (early,) = moments_of(track(POSES), prime=60, generated=6)
    assert (early.start, early.frames, early.seen) == (65, (70,), (5,))
    # Three frames are generated and three fit.
    (three,) = moments_of(track(POSES), prime=66, generated=3)
    assert (three.start, three.frames) == (70, (70, 71, 72))


def test_the_short_memory_must_lack_the_view() -> None:
    """The walker turns to it, 7 degrees a frame, over the last frames of the absence."""
    poses = POSES.copy()
    poses[60:70] = [(0, 0, 90 + 7 * left) for left in range(10, 0, -1)]

    def starts(absent: tuple[float, float]) -> dict[int, tuple[int, ...]]:
        found = moments_of(track(poses), prime=62, generated=6, absent=absent, apart=1)
        return {one.start: one.frames for one in found}

    # Frame t is 7 (70 - t) degrees from the view; 2 frames belong to it, 5 are within 30 degrees.
    assert starts((64.0, 30.0)) == {63: (68,), 64: (68, 69), 65: (69, 70), 66: (70, 71)}
    assert starts((48.0, 15.0)) == {
        63: (68,),
        64: (68, 69),
        65: (68, 69, 70),
        66: (68, 69, 70, 71),
        67: (69, 70, 71, 72),
    }
    assert not starts((1000.0, 90.0))


def test_moments_are_apart_and_walks_take_turns() -> None:
    poses = np.concatenate([POSES[:76], POSES[6:76], POSES[6:]])
    one, other = track(poses, "a"), track(POSES, "b")
    walks = [moments_of(each, prime=66, generated=6) for each in (one, other)]
    assert [m.start for m in walks[0]] == [70, 140, 210]
    turns = in_turns([*walks, []], None)
    assert [(m.track.name, m.start) for m in turns] == [
        ("a", 70), ("b", 70), ("a", 140), ("a", 210)
    ]  # fmt: skip
    assert in_turns(walks, 2) == turns[:2]
    assert turns[0].name == "a@70"


def test_frames_buttons_and_poses_of_a_moment_are_those_of_the_walk(tmp_path: Path) -> None:
    write_walks(tmp_path)
    by_walk_moments = [moments_of(t, prime=66, generated=6) for t in read_tracks(tmp_path)]
    moments = in_turns(by_walk_moments, None)[::-1]  # files in another order than moments
    episodes, true = load_moments(moments, 6)
    assert episodes.names == tuple(one.name for one in moments)
    assert (episodes.frames.shape[1], true.shape[1], episodes.actions.shape[1]) == (66, 72, 72)
    for row, one in enumerate(moments):
        expected = one.track.first + one.start - 66 + np.arange(72)
        assert true[row, :, 0, 0, 0].tolist() == expected.tolist()
        assert episodes.actions[row].tolist() == (expected % 16).tolist()
        assert episodes.poses is not None
        assert (episodes.poses[row].numpy() == POSES[4:76]).all()
    assert len({frames.numpy().tobytes() for frames in true}) == 4
    assert torch.equal(episodes.frames, true[:, :66])


# --- equal bytes ----------------------------------------------------------------------------------


def real_bytes(config: CacheConfig, frames: int) -> tuple[int, int]:
    """Of a cache of the tiny world that was filled with noise: at the end, and the most of the
    last span's chunks."""
    sizes = (TINY.num_layers, TINY.num_heads, TINY.head_dim, TINY.frame_tokens)
    cache = KVCache(*sizes, config)
    tokens, found = 3 * TINY.frame_tokens, []
    for chunk in range(frames // 3):
        k, v, q = torch.randn(3, 1, tokens, TINY.num_heads, TINY.head_dim).bfloat16()
        for layer in cache:
            layer.write(k, v, chunk * tokens)
            layer.observe_queries(q)
        found.append(cache.ledger().resident_bytes)
        cache.commit()
        found.append(cache.ledger().resident_bytes)
    return found[-1], max(found[-2 * config.policy.span_chunks :])


@pytest.mark.parametrize("frames", [24, 27])
@pytest.mark.parametrize("method", ["kivi", "qvg@iterations=0+metadata=int8+refinement=2"])
def test_the_window_of_equal_bytes_is_that_of_brute_force(method: str, frames: int) -> None:
    config = parse_method(method).replace(span_chunks=2)
    if "qvg" in method:  # what is refined fades
        config = config.replace(centroids=2)
    real = {w: real_bytes(config.replace(window_frames=w), frames) for w in range(6, 25, 6)}
    for window, expected in real.items():
        planned = planned_bytes(config.replace(window_frames=window), TINY, frames)
        assert (planned.end, planned.always) == expected
    assert all(end < most for end, most in real.values())
    whens: tuple[When, When] = ("end", "always")
    for index, when in enumerate(whens):
        for window, numbers in real.items():
            # As much as a window costs is enough for it, and a byte less is not.
            for budget in (numbers[index], numbers[index] - 1):
                fits = [w for w, others in real.items() if others[index] <= budget]
                if fits:
                    assert largest_window(config, TINY, frames, budget, when) == max(fits)
                    assert (max(fits) >= window) == (budget == numbers[index])
                    for longest in (6, 13):
                        found = largest_window(config, TINY, frames, budget, when, longest)
                        assert found == max(w for w in fits if w <= longest)
    with pytest.raises(ConfigError, match="no window of at most 1,000 bytes"):
        largest_window(config, TINY, frames, 1000)


def test_bytes_of_bf16_are_its_window() -> None:
    bf16 = preset("bf16").replace(window_frames=12, span_chunks=2)
    planned = planned_bytes(bf16, TINY, 24)
    assert (planned.end, planned.always) == real_bytes(bf16, 24)
    # BF16 keys and values, and a counter in each layer.
    frame = 2 * 2 * TINY.num_heads * TINY.head_dim * TINY.frame_tokens
    assert planned.end == TINY.num_layers * (12 * frame + 8)


# --- rollouts and rows ----------------------------------------------------------------------------


def test_bytes_over_time_count_the_true_frames() -> None:
    """Two generated chunks behind six true frames end at frames 9 and 12."""
    world, plain = tiny_world(TINY), preset("bf16")
    three = tiny_episodes(4)
    rows = three.select([0, 1])
    rows = type(rows)(torch.cat((rows.frames, three.frames[2:]), 1), rows.actions, rows.names)
    sums, at_end = [], []
    for first in (9, 12):
        _, cost = run_batch(world, rows, [0, 0], plain, frames=6, first_packed_frame=first)
        sums.append(cost.resident_bytes_over_time)
        at_end.append(cost.resident_bytes)
    assert at_end == [sums[1]] * 2
    counters = TINY.num_layers * 8
    assert sums[0] - sums[1] == (sums[1] - counters) / 12 * 9 + counters


@pytest.fixture
def walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return walks_of_a_tiny_world(tmp_path, monkeypatch)


def run(walks: Path, *more: str) -> list[dict[str, str]]:
    path = walks / "rows.csv"
    threads = str(torch.get_num_threads())
    shared = ["--prime", "66", "--frames", "6", "--csv", str(path), "--threads", threads]
    memory.main(["--walks", str(walks), *shared, *more])
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_of_moments_methods_and_windows(
    walks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = walks / "raw"
    given = ["--methods", "floor", "kivi", "--windows", "24", "72", "--videos", str(raw)]
    rows = run(walks, *given, "--moments", "3", "--batch", "2")
    said = capsys.readouterr().out
    assert "3 of 4 moments, in 3 of 4 walks" in said
    assert "as planned" in said
    assert "NOT AS PLANNED" not in said
    assert "kivi with 72 frames: more than the 15 of the model's configuration" in said
    assert "3 walks, 3 moments, 1 seeds; differences are from bf16 with 24 frames" in said
    settings = [(row["method"], row["window"]) for row in rows]
    expected = [("true:seen", "0"), ("true:last", "0")]
    expected += [(m, w) for w in ("24", "72") for m in ("bf16", "floor", "kivi")]
    assert settings == [setting for setting in expected for _ in range(3)]
    moments = in_turns([moments_of(t, prime=66, generated=6) for t in read_tracks(walks)], 3)
    _, true = load_moments(moments, 6)
    for row, one, clip in zip(rows[:6], moments * 2, [*true, *true], strict=True):
        # What copying gets: the true frame 5 of the walk, or the one before the rollout.
        source = clip[5 - 4] if row["method"] == "true:seen" else clip[65]
        error = (clip[66:].double() - source.double()).square().mean()
        assert float(row["psnr"]) == pytest.approx(float(capped_psnr(error.numpy())))
        assert (row["walk"], row["start"]) == (one.track.name, "70")
        ways = [
            math.dist(one.track.poses[frame, :2].tolist(), one.track.poses[place, :2].tolist())
            for frame, place in zip(one.frames, one.seen, strict=True)
        ]
        assert float(row["away"]) == pytest.approx(sum(ways) / len(ways), abs=1e-3)
    for row, number in zip(rows[6:], list(range(3)) * 6, strict=True):
        name = f"{row['walk']}@{row['start']}-{row['method']}-{row['window']}-{row['seed']}.npy"
        video = torch.from_numpy(np.load(raw / name))
        assert torch.equal(video[:66], true[number, :66])
        error = (video[66:].double() - true[number, 66:].double()).square().mean()
        assert float(row["psnr"]) == pytest.approx(float(capped_psnr(error.numpy())))
        distance = lpips_by_frame(true[number, 66:], video[66:]).mean()
        assert float(row["lpips"]) == pytest.approx(float(distance))
        assert row["resident_bytes"] == row["planned_bytes"]
        assert (row["frames"], float(row["gap"])) == ("70 71 72 73 74 75", 67.5)
        # Frame 5 is seen again in chunks that end at 73 and 76: with 72 frames from 1 and 4 on.
        assert float(row["seen_in_window"]) == (row["window"] == "72")


def test_a_moment_is_measured_where_it_returns(walks: Path) -> None:
    """With nine generated frames, three of them are elsewhere and do not count."""
    rows = run(walks, "--methods", "bf16", "--windows", "69", "--frames", "9", "--moments", "1",
               "--videos", str(walks))  # fmt: skip
    row = rows[-1]
    start = int(row["start"])
    frames = [int(frame) for frame in row["frames"].split()]
    assert frames == list(range(70, 76)) != list(range(start, start + 9))
    # The view was seen in frame 5: the chunk that ends at 73 attends to it, that at 76 does not.
    assert (start, float(row["seen_in_window"])) == (67, 0.5)
    (moment,) = in_turns([moments_of(t, prime=66, generated=9) for t in read_tracks(walks)], 1)
    _, true = load_moments([moment], 9)
    video = np.load(walks / f"{row['walk']}@{start}-bf16-69-0.npy")
    chosen = np.array(frames) - start + 66
    error = np.square(video[chosen].astype(float) - true[0, chosen].numpy()).mean()
    assert float(row["psnr"]) == pytest.approx(float(capped_psnr(np.array(error))))


def test_equal_bytes_are_those_of_the_ledger(
    walks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--methods", "kivi", "bf16:kivi", "--windows", "6", "12", "--equal-bytes"]
    rows = run(walks, *given, "--moments", "1", "--seeds", "3", "4")
    said = capsys.readouterr().out
    assert "NOT AS PLANNED" not in said
    bytes_of = {(row["method"], row["budget_window"]): int(row["resident_bytes"]) for row in rows}
    windows = {(row["method"], row["budget_window"]): int(row["window"]) for row in rows}
    assert len(rows) == 2 * (2 + 6)
    assert [row["seed"] for row in rows] == 8 * ["3", "4"]
    assert len({row["psnr"] for row in rows[4:6]}) == 2
    for budget in ("6", "12"):
        assert windows["bf16", budget] == int(budget)
        for method in ("kivi", "bf16:kivi"):
            assert 0 < bytes_of[method, budget] <= bytes_of["bf16", budget]
        # Half of it is packed, or all.
        assert int(budget) <= windows["bf16:kivi", budget] < windows["kivi", budget] < 72
    assert f"kivi with {windows['kivi', '6']}: " in said
    rows = run(walks, *given, "--moments", "1", "--longest", "30")
    assert {row["window"] for row in rows if row["method"] == "kivi"} == {"30"}
    assert "all there may be" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--windows", "25"], "--windows: got 25"),
        (["--prime", "65"], "--prime: got 65, expected a multiple of 3"),
        (["--windows", "75"], "up to the 72 frames"),
        (["--against", "qvg", "24"], "--against: got qvg 24"),
        (["--absent", "1000", "180"], "got no moment"),
    ],
)
def test_what_cannot_run_is_refused(walks: Path, more: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        run(walks, "--methods", "bf16", "--windows", "24", *more)


# --- the table ------------------------------------------------------------------------------------


def row(method: str, walk: str, start: int, psnr: float, seed: int = 0) -> dict[str, Any]:
    return {"method": method, "window": 24, "walk": walk, "start": start, "seed": seed,
            "psnr": psnr, "lpips": psnr / 100, "resident_bytes": 2**20}  # fmt: skip


def test_every_walk_counts_once_and_differences_are_paired() -> None:
    rows = [row("bf16", "a", 1, 20.0), row("bf16", "a", 2, 30.0), row("bf16", "b", 1, 10.0)]
    rows += [row("qvg", r["walk"], r["start"], r["psnr"] + 2) for r in reversed(rows)]
    means = by_walk(rows, "psnr")
    assert means["bf16", 24] == {"a": 25.0, "b": 10.0}
    text = summary(rows, ("bf16", 24))
    assert "| bf16 | 24 | 1.00 | 17.50 (" in text
    assert "| +2.00 (+2.00 to +2.00) | +0.0200 (+0.0200 to +0.0200) |" in text
    assert "2 walks, 3 moments, 1 seeds" in text
    with pytest.raises(ConfigError, match="got 2 rollouts, expected the same moments"):
        summary(rows[:-1], ("bf16", 24))
    with pytest.raises(ConfigError, match="expected one of: bf16 24, qvg 24"):
        summary(rows, ("bf16", 21))


def test_a_table_of_what_comes_back_near_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    rows = [row("bf16", "a", 1, 20.0), row("bf16", "a", 2, 30.0), row("bf16", "b", 1, 10.0)]
    for one, away in zip(rows, (3.0, 12.0, 40.0), strict=True):
        one["away"] = away
    write_csv(path, rows)
    memory_table.main([str(path), "--away", "0", "12"])
    assert "| bf16 | 24 | 1.00 | 20.00 | 0.2000 |" in capsys.readouterr().out
    memory_table.main([str(path), "--away", "12", "41"])
    assert "2 walks, 2 moments" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--away: got 41 50"):
        memory_table.main([str(path), "--away", "41", "50"])
    write_csv(path, [{"method": "bf16", "psnr": 1}])
    with pytest.raises(ConfigError, match="got no lpips, resident_bytes, seed, start, walk, win"):
        memory_table.main([str(path)])
