"""The store: appended to by real processes at once, cut off, on a full disk, foreign."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steadykv.cli.main import main
from steadykv.errors import ConfigError, PayloadError, SteadyKVError
from steadykv.evaluation.store import (
    STORE_VARIABLE,
    append,
    chosen_store,
    entries,
    read_store,
    record_run,
)

PLACE = {"steadykv": "0", "commit": None, "device": "cpu"}


def lines(count: int, run: str = "r", size: int = 10) -> list[dict[str, Any]]:
    rows = [{"method": f"m{index}", "text": "x" * size} for index in range(count)]
    return entries("compare", rows, command="steadykv compare", environment=PLACE, run=run)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    own = {"method": "qvg", "psnr": 1.5, "configuration": {"frames": 6}, "environment": PLACE}
    record_run("compare", [own], command="steadykv compare --frames 6", store=path, run="one")
    append(path, lines(2, "two"))
    first, *others = read_store(path)
    assert first["row"] == {"method": "qvg", "psnr": 1.5}
    assert (first["configuration"], first["environment"]) == ({"frames": 6}, PLACE)
    assert (first["version"], first["kind"], first["run"]) == (1, "compare", "one")
    assert first["command"] == "steadykv compare --frames 6"
    assert first["time"].endswith("Z")
    assert [entry["run"] for entry in others] == ["two", "two"]


def test_a_run_is_stored_once_in_each_place(tmp_path: Path) -> None:
    store = tmp_path / "shared.jsonl"
    for _ in range(2):
        record_run("demo", [{"a": 1}], command="c", folder=tmp_path, store=store,
                   environment=PLACE, run="same")  # fmt: skip
    record_run("demo", [{"a": 1}], command="c", store=store, environment=PLACE, run="other")
    assert [entry["run"] for entry in read_store(store)] == ["same", "other"]
    assert len(read_store(tmp_path / "runs.jsonl")) == 1


def test_runs_without_a_name_get_different_ones() -> None:
    first, second = (entries("x", [{}], command="c", environment=PLACE)[0] for _ in range(2))
    assert first["run"] != second["run"]


PROGRAM = """
import sys
from tests.test_store import lines
from steadykv.evaluation.store import append
path, run = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    append(path, lines(5, run, size=20_000))
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Lines of 20 kB, larger than any buffer that might be written piece by piece."""
    path = tmp_path / "runs.jsonl"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in ("one", "two")
    ]  # fmt: skip
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:  # both begin together
        process.communicate("go\n", timeout=120)
        assert process.returncode == 0
    found = read_store(path)
    for name in ("one", "two"):
        own = [entry["row"] for entry in found if entry["run"] == name]
        assert [row["method"] for row in own] == [f"m{index}" for index in range(5)] * 40
        assert {len(row["text"]) for row in own} == {20_000}
    assert len(found) == 400


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_truncated_last_line_loses_nothing_else(tmp_path: Path, cut: int) -> None:
    path = append(tmp_path / "runs.jsonl", lines(3))
    os.truncate(path, path.stat().st_size - cut)
    if cut == 1:  # only the end of the line is missing: the row is whole
        assert len(read_store(path)) == 3
    else:
        with pytest.warns(UserWarning, match=r"line 3: damaged"):
            assert len(read_store(path)) == 2
    before = path.read_bytes()
    append(path, lines(2, "later"))
    assert path.read_bytes().startswith(before), "an earlier byte was changed"
    if cut == 1:
        assert len(read_store(path)) == 5
    else:
        with pytest.warns(UserWarning, match=r"line 3: damaged"):
            found = read_store(path)
        assert [entry["run"] for entry in found] == ["r", "r", "later", "later"]


def test_only_strict_json_and_nothing_of_a_bad_run(tmp_path: Path) -> None:
    path = append(tmp_path / "runs.jsonl", lines(1))
    before = path.read_bytes()
    bad = lines(2)
    bad[1]["row"]["psnr"] = float("nan")
    with pytest.raises(ConfigError, match="cannot be stored"):
        append(path, bad)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="no environment"):
        entries("x", [{"a": 1}], command="c")


def test_a_full_disk_keeps_what_stood_there(tmp_path: Path) -> None:
    path = append(tmp_path / "runs.jsonl", lines(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
        with pytest.raises(SteadyKVError, match=r"could not append .*free space"):
            append(path, lines(1, "full"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append(path, lines(1, "later"))
    with pytest.warns(UserWarning, match="line 2: damaged"):
        assert [entry["run"] for entry in read_store(path)] == ["r", "later"]


@pytest.mark.parametrize("line", [{"version": 2}, {"version": 2, "row": {}, "kind": "compare"}])
def test_another_version_is_refused(tmp_path: Path, line: dict[str, Any]) -> None:
    path = append(tmp_path / "runs.jsonl", [lines(1)[0], line])
    with pytest.raises(PayloadError, match="line 2 has version 2; expected 1"):
        read_store(path)
    with pytest.raises(PayloadError, match="could not read"):
        read_store(tmp_path / "absent")


def edited(**changes: Any) -> bytes:
    return json.dumps(lines(1)[0] | changes).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (edited(row=float("nan")), "no whole JSON"),
        (edited(row={"psnr": float("inf")}), "no whole JSON"),
        (b"[" * 100_000, "no whole JSON"),
        (b"[1]", "no whole JSON"),
        (edited(time=5), "time is of type int, expected str"),
        (edited(kind=3), "kind is of type int, expected str"),
        (edited(version=True), "no whole JSON"),
        (b'{"version": 1, "run": "r"}', "it lacks kind"),
    ],
)
def test_a_damaged_line_loses_no_other(tmp_path: Path, line: bytes, reason: str) -> None:
    path = append(tmp_path / "runs.jsonl", lines(1, "before"))
    path.write_bytes(path.read_bytes() + line + b"\n")
    append(path, lines(1, "after"))
    with pytest.warns(UserWarning, match=rf"line 2: damaged \({reason}"):
        assert [entry["run"] for entry in read_store(path)] == ["before", "after"]
    assert chosen_store(path) == path
    record_run("demo", [{"a": 1}], command="c", store=path, environment=PLACE, run="after")
    assert path.read_bytes().count(b"\n") == 3, "the run is there already"


def test_what_is_no_regular_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Reading these never ends, or fails once everything has been measured."""
    pipe, loop, lost = (tmp_path / name for name in ("pipe", "loop", "lost"))
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    lost.symlink_to(tmp_path / "nowhere" / "runs.jsonl")
    for path, message in (
        (pipe, "no regular file"),
        (Path("/dev/full"), "no regular file"),
        (loop, "Too many levels of symbolic links"),
        (lost, "a link to nothing"),
    ):
        with pytest.raises(ConfigError, match=rf"--store: got {path}.*{message}"):
            chosen_store(path)
    with pytest.raises(PayloadError, match="no regular file"):
        read_store(pipe)
    link = tmp_path / "link"
    link.symlink_to(append(tmp_path / "runs.jsonl", lines(1)))
    assert chosen_store(link) == link


def test_the_shared_store_is_checked_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    assert chosen_store(None) is None
    mine = append(tmp_path / "mine.jsonl", lines(1))
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "named.jsonl"))
    assert chosen_store(None) == tmp_path / "named.jsonl"
    assert chosen_store(mine) == mine, "an option comes before the environment"
    assert not (tmp_path / "named.jsonl").exists()
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear reader,\n")
    for path, message in (
        (tmp_path, "a file in a folder that exists"),
        (tmp_path / "no" / "x.jsonl", "a file in a folder that exists"),
        (letter, "no result store"),
    ):
        with pytest.raises(ConfigError, match=message):
            chosen_store(path)
    assert letter.read_text() == "Dear reader,\n"


def test_bench_appends_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "all.jsonl"
    monkeypatch.setenv(STORE_VARIABLE, str(store))
    arguments = ["bench", "--device", "cpu", "--works", "decode", "--methods", "qvg",
                 "--seconds", "0", "--json"]  # fmt: skip
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = read_store(store)
    assert [entry["row"] for entry in found] == rows
    assert {entry["kind"] for entry in found} == {"bench"}
    assert found[0]["command"] == "steadykv " + " ".join(arguments)
    assert found[0]["configuration"]["size"]["tokens"] == 192
    assert found[0]["environment"]["device"] == "cpu"
