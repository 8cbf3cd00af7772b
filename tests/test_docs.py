"""The documents are true: runnable snippets run, named targets, files and links exist."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from steadykv.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("training/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)(?P<target>[^)\s#]+)")
HTML_SOURCE = re.compile(r"<(?:img|source|video)[^>]*\ssrc=\"(?!https?:)(?P<target>[^\"]+)\"")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
# A code span that names a file or folder of the checkout, such as `src/steadykv/codecs/qvg.py`.
TRACKED_PATH = re.compile(r"^(?:src|tests|training|benchmarks|docs|examples|constraints)/[\w./-]*$")


@dataclass(frozen=True)
class Snippet:
    path: Path
    line: int  # of the first line of code, from 1
    language: str
    words: tuple[str, ...]
    code: str


def snippets(path: Path) -> list[Snippet]:
    """The fenced blocks of one document, in order."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        line = text.count("\n", 0, match.start("body")) + 1
        found.append(Snippet(path, line, language, tuple(words), match["body"]))
    return found


def run_in_order(blocks: list[Snippet]) -> dict[str, object]:
    """Execute the blocks of one document in one namespace, as a reader would type them."""
    namespace: dict[str, object] = {"__name__": "__snippet__"}
    for block in blocks:
        # Blank lines in front, so that a traceback shows the document's own line numbers.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(block.path), "exec"), namespace)
    return namespace


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


RUNNABLE = {
    path: blocks
    for path in DOCUMENTS
    if (blocks := [s for s in snippets(path) if s.language == "python" and "runnable" in s.words])
}


@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_runnable_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that open with ```python runnable; the working directory is an empty folder."""
    monkeypatch.chdir(tmp_path)
    run_in_order(RUNNABLE[path])


def test_readme_shows_code_that_runs() -> None:
    assert ROOT / "README.md" in RUNNABLE


def test_a_broken_snippet_is_found(tmp_path: Path) -> None:
    """The collector sees a marked block, and only it, at its own line."""
    document = tmp_path / "broken.md"
    document.write_text(
        "# text\n\n```python\nnot python\n```\n\n```python runnable\nx = 1\nx + '1'\n```\n"
    )
    plain, marked = snippets(document)
    assert (plain.words, marked.words) == ((), ("runnable",))
    with pytest.raises(TypeError) as failure:
        run_in_order([marked])
    assert failure.traceback[-1].lineno + 1 == 9


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [m["target"] for pattern in (LINK, HTML_SOURCE) for m in pattern.finditer(text)]
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing, f"{name(path)} links to files that do not exist: {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_named_files_exist(path: Path) -> None:
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    spans = {span for span in CODE_SPAN.findall(prose) if TRACKED_PATH.match(span)}
    missing = sorted(span for span in spans if not (ROOT / span).exists())
    assert not missing, f"{name(path)} names files that do not exist: {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_make_targets_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^|\$ )make ([a-z][\w-]*)", text, re.MULTILINE))
    assert named <= targets, f"{name(path)} names make targets that do not exist: {named - targets}"


def steadykv_lines(path: Path) -> list[list[str]]:
    """The words of every `steadykv ...` line in a document's shell blocks and code spans."""
    text = path.read_text(encoding="utf-8")
    shell = "".join(s.code for s in snippets(path) if s.language in {"bash", "sh", "console"})
    lines = [line.strip().removeprefix("$ ") for line in shell.replace("\\\n", " ").splitlines()]
    lines += CODE_SPAN.findall(FENCE.sub("", text))
    return [shlex.split(line, comments=True) for line in lines if line.startswith("steadykv ")]


def test_command_lines_are_found(tmp_path: Path) -> None:
    document = tmp_path / "commands.md"
    document.write_text(
        "Run `steadykv env`.\n\n```bash\n$ steadykv demo \\\n  --frames 3  # why\nls\n```\n"
    )
    assert steadykv_lines(document) == [
        ["steadykv", "demo", "--frames", "3"],
        ["steadykv", "env"],
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_and_options_exist(path: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for _, *words in steadykv_lines(path):
        command = next((word for word in words if not word.startswith("-")), None)
        assert command is None or command in commands, f"{name(path)}: steadykv {command}"
        if command:
            known = {option for param in commands[command].params for option in param.opts}
            used = {word.split("=")[0] for word in words if word.startswith("--")}
            unknown = used - known - {"--help"}
            assert not unknown, f"{name(path)}: steadykv {command} has no {sorted(unknown)}"
