"""`steadykv report`: one table for runs with the same reference, others apart."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadykv.cli.main import main
from steadykv.evaluation.merge import differing_fields, merge, read_runs
from steadykv.evaluation.results import read_metrics
from steadykv.report.text import method_title
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.worlds import TINY, tiny_episodes, tiny_world


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real folders: "a" and "b" share their reference, "c" has fewer walks."""
    folder = tmp_path_factory.mktemp("runs")
    save_world(folder / "world.safetensors", TINY, tiny_world().state_dict(), {})
    save_episodes(folder / "walks.zip", tiny_episodes(6))
    shared = ["compare", "--world", str(folder / "world.safetensors"), "--walks",
              str(folder / "walks.zip"), "--frames", "6", "--batch", "6", "--centroids", "8",
              "--no-shift"]  # fmt: skip
    for name, more in {
        "a": ["--episodes", "6", "--methods", "kivi"],
        "b": ["--episodes", "6", "--methods", "kivi", "qvg"],
        "c": ["--episodes", "2", "--methods", "qvg", "--no-floor"],
    }.items():
        assert main([*shared, *more, "--out", str(folder / name)]) == 0
    return {name: folder / name for name in "abc"}


def edited(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


def test_one_reference_is_one_page_and_one_table(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    code = main(["report", str(runs["a"]), str(runs["b"]), "--paired", "kivi", "--out", str(out)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert {path.name for path in out.iterdir()} == {"report.html", "merged.json", "merged.csv"}
    merged = json.loads((out / "merged.json").read_text())
    (group,) = merged["groups"]
    assert merged["differing"] == []
    assert [(row["method"], row["run"]) for row in group["rows"]] == [
        ("bf16", "a"), ("kivi", "a"), ("floor", "a"), ("qvg", "b"),
    ]  # fmt: skip
    assert "kivi is in a and b with the same rollouts: shown once." in group["notes"]
    qvg = group["rows"][3]
    own = read_metrics(runs["b"])[2]
    assert (qvg["psnr"], qvg["intervals"]) == (own["psnr"], own["intervals"])
    # Paired over two folders: the number that one run with both would have had.
    kivi = read_metrics(runs["b"])[1]
    assert qvg["paired"]["psnr"]["mean"] == pytest.approx(own["psnr"] - kivi["psnr"])
    assert qvg["paired"]["psnr"]["verdict"] == "worse"
    assert own["paired"] is None
    page = (out / "report.html").read_text()
    assert page.count("data:video/mp4;base64,") == 3  # bf16, kivi, qvg
    assert "Differences to KIVI" in page
    assert "shown once" in page
    assert "minus KIVI" in shown.out
    assert "worse" in shown.out
    with (out / "merged.csv").open() as file:
        assert [line["group"] for line in csv.DictReader(file)] == ["1"] * 4


def test_other_references_stand_apart(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    code = main(["report", *(str(path) for path in runs.values()), "--json", "--out", str(out)])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["differing"] == ["episodes", "walks_sha256"]
    assert [list(group["runs"]) for group in found["groups"]] == [["a", "b"], ["c"]]
    assert [row["method"] for row in found["groups"][1]["rows"]] == ["bf16", "qvg"]
    page = (out / "report.html").read_text()
    assert "Two groups of runs" in page
    assert "Group 1: 6 episodes, 1 seed, 6 frames, episodes walk-0 to walk-5" in page
    assert "Group 2: 2 episodes" in page
    assert "differ in episodes and walks_sha256" in page


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_packed_frame", 7),
        ("seeds", [1]),
        ("world_sha256", "0"),
        ("key_rope", "pre"),
        ("world_dtype", "x"),
    ],
)
def test_every_part_of_the_reference_counts(
    runs: dict[str, Path], tmp_path: Path, field: str, value: Any
) -> None:
    other = tmp_path / "b"
    shutil.copytree(runs["b"], other)

    def change(rows: Any) -> None:
        for row in rows:
            row["configuration"][field] = value

    edited(other, "metrics.json", change)
    groups = merge(read_runs([runs["a"], other]))
    assert len(groups) == 2
    assert differing_fields(groups) == [field]


def test_other_places_and_rollouts_are_said_and_duplicates_named(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "b"
    shutil.copytree(runs["b"], other)

    def elsewhere(rows: Any) -> None:
        for row in rows:
            row["environment"]["device_name"] = "another machine"

    def rounded(records: Any) -> None:
        for record in records:
            if record["method"] == "kivi":
                record["mse_by_frame"][-1] += 1.0

    edited(other, "metrics.json", elsewhere)
    edited(other, "rollouts.json", rounded)
    (group,) = merge(read_runs([runs["a"], other]))
    assert [row["method"] for row in group.rows] == ["bf16", "kivi", "floor", "kivi@run=b", "qvg"]
    assert method_title("kivi@run=b") == "KIVI run=b"
    notes = " ".join(group.notes)
    assert "kivi is in a and b with other rollouts: the latter is kivi@run=b." in notes
    assert "differ in the device (a: " in notes
    assert "b: another machine)" in notes


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_runs_that_differ_in_the_shift_alone_share_their_rows(
    runs: dict[str, Path], tmp_path: Path, order: str
) -> None:
    """As one with the token shift and one made with --no-shift."""
    measured = tmp_path / "b"
    shutil.copytree(runs["b"], measured)
    shares = {"bf16": 0.0, "kivi": 0.25}

    def with_shift(entries: Any) -> None:
        for entry in entries:
            entry["top1_shift"] = entry["top5_shift"] = shares.get(entry["method"])
            if "configuration" in entry:
                entry["configuration"]["shift"] = {"query_stride": 13, "moving": None}

    for name in ("metrics.json", "rollouts.json"):
        edited(measured, name, with_shift)
    folders = {"a": runs["a"], "b": measured}
    (group,) = merge(read_runs([folders[name] for name in order]))
    assert sorted(group.records) == ["bf16", "floor", "kivi", "qvg"]
    found = {row["method"]: (row["run"], row["top1_shift"]) for row in group.rows}
    assert (found["bf16"], found["kivi"]) == (("b", 0.0), ("b", 0.25))
    assert group.origin["kivi"][0].label == "b"
    notes = " ".join(group.notes)
    assert "other rollouts" not in notes
    assert "a: not measured" in notes
    assert "b: query stride 13" in notes
    assert "differ in how the token shift was sampled (" in notes
    assert "{" not in notes


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_difference_has_to_be_beyond_the_floor_of_every_run(
    runs: dict[str, Path], tmp_path: Path, order: str
) -> None:
    """The run with the louder floor (another machine, say) may come first or last."""
    louder = tmp_path / "b"
    shutil.copytree(runs["b"], louder)
    folders = {"a": runs["a"], "b": louder}

    def verdict() -> tuple[str, str]:
        (group,) = merge(read_runs([folders[name] for name in order]), "kivi")
        (qvg,) = [row for row in group.rows if row["method"] == "qvg"]
        assert [row["method"] for row in group.rows].count("floor") == 1
        return qvg["paired"]["psnr"]["verdict"], qvg["paired"]["psnr"]["reason"]

    assert verdict() == ("worse", "")

    def raised(records: Any) -> None:
        for record in records:
            if record["method"] == "floor":
                record["mse_by_frame"] = [60000.0 for _ in record["mse_by_frame"]]

    edited(louder, "rollouts.json", raised)
    assert verdict() == ("not told apart", "both are within the noise floor")


def test_what_is_no_run_is_refused_in_one_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(runs["a"], torn)
    edited(torn, "rollouts.json", lambda records: records.pop())
    for folders, message in (
        ([runs["a"], runs["a"] / "."], "twice"),
        ([tmp_path / "absent"], "could not read"),
        ([torn], "do not belong together"),
        ([runs["a"], "--paired", "qvg"], "--paired: got 'qvg'"),
    ):
        out = tmp_path / "out"
        assert main(["report", *map(str, folders), "--out", str(out)]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("steadykv: ")
        assert message in said
        assert not out.exists()


def of(records: Any) -> Any:
    """The record of QVG."""
    return next(record for record in records if record["method"] == "qvg")


EXAMPLE: dict[str, Any] = {
    "chosen": "the one", "layer": 0, "head": 0, "attention_weight": 0.5,
    "query": {"token": 0, "frame": 999, "patch_row": 0, "patch_column": 0},
    "selected": {"bf16": {"token": 0, "frame": 0, "patch_row": 0, "patch_column": 0}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("metrics.json", lambda rows: of(rows).update(psnr_by_frame=[]),
         r"length of \[\d\] \(qvg\)\.psnr_by_frame is 0; expected 9 numbers"),
        ("metrics.json", lambda rows: of(rows).update(psnr=float("nan")),
         r"\[\d\] \(qvg\)\.psnr is nan; expected a finite number"),
        ("metrics.json", lambda rows: rows[0]["configuration"].pop("cache"), "KeyError: 'cache'"),
        ("metrics.json", lambda rows: rows[0]["environment"].pop("python"), "KeyError: 'python'"),
        ("rollouts.json", lambda found: of(found)["mse_by_frame"].pop(),
         r"length of .*\(qvg, .*, seed 0\)\.ssim_by_frame is 9; expected 8 numbers"),
        ("rollouts.json", lambda found: of(found)["mse_by_frame"].__setitem__(7, None),
         r"mse_by_frame\[7\] is None; expected a number from 0 to 65025"),
        ("rollouts.json", lambda found: of(found)["mse_by_frame"].__setitem__(7, -1.0),
         r"mse_by_frame\[7\] is -1.0"),
        ("rollouts.json", lambda found: of(found).update(ssim_by_frame=None), "ssim_by_frame is"),
        ("rollouts.json", lambda found: of(found).update(top1_shift=2), "top1_shift is 2"),
        ("token_shift.json", lambda found: None, r"example.query.frame is 999; .* from 0 to 8"),
        ("token_shift.json", lambda found: found.update(version=2), "has version 2; expected 1"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_in_one_line_and_leaves_no_folder(
    runs: dict[str, Path],
    tmp_path: Path,
    name: str,
    change: Callable[[Any], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(runs["b"], torn)
    if name == "token_shift.json":
        (torn / name).write_text(json.dumps({"version": 1, "example": EXAMPLE}))
    edited(torn, name, change)
    assert main(["report", str(torn), "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"^steadykv: {re.escape(str(torn))}.*{said}", line), line
    assert name in line or "KeyError" in line
    assert not (tmp_path / "out").exists()
