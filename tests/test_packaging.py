"""pyproject.toml, the changelog and what an install would contain agree with the code."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import steadykv
from tests.test_layout import LIBRARY, MODULES, PACKAGE, ROOT, imported_modules, short

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]
# Packages whose import name is not their own.
IMPORT_NAMES = {"opencv-python-headless": "cv2", "pillow": "PIL", "pytest-xdist": "xdist"}
# Run as programs or as a plugin; never imported.
PROGRAMS = {"ruff", "mypy", "xdist"}


def import_name(requirement: str) -> str:
    """`pytorch-msssim>=1.0` is imported as pytorch_msssim."""
    package = re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]
    return IMPORT_NAMES.get(package, package.replace("-", "_"))


def third_party(paths: list[Path]) -> set[str]:
    """First names of all imports that neither Python nor this checkout provides."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    # Adapters and their fixtures are named like the packages that they are for.
    stems = {path.stem for path in MODULES if path.parent.name != "hosts"}
    own = {"steadykv", *(path.name for path in ROOT.iterdir()), *stems}
    return names - set(sys.stdlib_module_names) - own


def below(folder: str) -> list[Path]:
    return [path for path in MODULES if path.is_relative_to(ROOT / folder)]


def test_runtime_dependencies_are_what_the_package_imports() -> None:
    declared = {import_name(line) for line in PROJECT["dependencies"]}
    # Triton comes with a CUDA build of torch and is used by kernels/ alone.
    assert third_party(LIBRARY) - {"triton"} == declared


def test_extras_are_what_tests_and_training_import() -> None:
    runtime = {import_name(line) for line in PROJECT["dependencies"]}
    extras = {
        extra: {import_name(line) for line in lines}
        for extra, lines in PROJECT["optional-dependencies"].items()
    }
    # Of real packages some tests import parts inside functions, after asking for the whole by name.
    asked = re.compile(r"\brequire\((.*)\)")
    texts = [path.read_text(encoding="utf-8") for path in below("tests")]
    required = {
        name for text in texts for call in asked.findall(text) for name in call.split('"')[1::2]
    }
    for call in re.findall(r'importorskip\("(\w+)"\)', "".join(texts)):
        required |= {call} & extras["dev"]  # others are optional in the tests too
    assert (third_party(below("tests")) | required) - runtime == extras["dev"] - PROGRAMS
    assert third_party(below("training")) - runtime == extras["data"]


def test_every_dependency_says_why_it_is_there() -> None:
    lines = [line.strip() for line in PYPROJECT.splitlines()]
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in (line for group in groups for line in group):
        row = next(i for i, line in enumerate(lines) if line.startswith(f'"{requirement}"'))
        assert lines[row - 1].startswith("# "), f"{requirement}: say why in the line above it"


def test_cpu_constraints_lie_in_the_supported_ranges() -> None:
    lines = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert "torch" in pins
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    supported = {import_name(line): line for group in groups for line in group}
    for package, version in pins.items():
        low, high = re.fullmatch(
            rf"{package}>=([\d.]+)(?:,<([\d.]+))?", supported[package]
        ).groups()
        as_numbers = [tuple(map(int, text.split("."))) for text in (low, version, high or "999")]
        assert as_numbers == sorted(as_numbers)


def test_changelog_describes_this_version() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert steadykv.__version__ in headings


def test_installed_version_is_this_one() -> None:
    assert importlib.metadata.version("steadykv") == steadykv.__version__


def test_nothing_of_the_package_is_ignored_by_git() -> None:
    """The build leaves out what git ignores: an ignored weight file would be missing after it."""
    ignored = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", str(PACKAGE)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if ignored.returncode:
        pytest.skip("not a git checkout")
    lost = [name for name in ignored.stdout.splitlines() if "__pycache__" not in name]
    assert not lost


def test_licences_are_whole() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for needed in (
        "Contributors to the Freedoom project.  All rights reserved.",
        "Neither the name of the Freedoom project nor the names of its",
        "EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.",
        "The code original to ViZDoom is under MIT license.",
        "The above copyright notice and this permission notice shall be included in all copies",
    ):
        assert needed in notice


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_library_never_imports_training_or_tests(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path)}
    assert not roots & {"training", "tests", "benchmarks"}
