"""The numbers in the tables of docs/ are those of the committed rows."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
NAMES = [path.stem.removeprefix("ablate-") for path in sorted(RESULTS.glob("ablate-*.csv"))]
# What a column shows, by the beginning of its heading; "from" follows what it is a difference of.
NUMBERS = ("bits", "smaller, mean", "PSNR", "flicker", "from PSNR", "from flicker", "top-1")


def table(name: str) -> tuple[list[str], list[list[str]]]:
    """The headings and the cells of the only table of a section."""
    lines = [line for line in SECTIONS[name].splitlines() if line.startswith("| ")]
    heads, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    for at, head in enumerate(heads):
        if head.startswith("from "):
            heads[at] = f"from {heads[at - 1]}"
    return heads, rows


def result_rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"ablate-{name}.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["method"] not in ("bf16", "floor")]


def expected(head: str, row: dict[str, str], window: str) -> set[str]:
    """How the page may write a number of a row."""

    def number(key: str, form: str, factor: float = 1) -> str:
        return format(factor * float(row[key]), form).replace("-", "−")

    def between(key: str, factor: float = 1) -> str:
        return " to ".join(number(f"{key}.{end}", ".2f", factor) for end in ("low", "high"))

    psnr, flicker = f"psnr_windows.{window}", "flicker_error"
    if head.startswith("from "):
        key, factor = (psnr, 1) if head.startswith("from PSNR") else (flicker, 1000)
        if not row[f"paired.{key}.mean"]:
            return {""}
        mean = number(f"paired.{key}.mean", "+.2f", factor)
        return {f"{mean} ({between(f'paired.{key}.interval', factor)})"}
    if head.startswith("PSNR"):
        mean = number(psnr, ".2f")
        return {mean, f"{mean} ({between(f'intervals.{psnr}')})"}
    if head.startswith("flicker"):
        return {number(flicker, ".2f", 1000)}
    if head == "bits":
        return {number("bits_per_element", ".3f")}
    if head == "smaller, mean":
        return {number("compression_mean", ".2f") + "×"}
    return {number("top1_shift", ".1f", 100) + " %"}


def test_every_question_with_rows_has_a_table() -> None:
    assert NAMES
    assert {name for name in SECTIONS if "| top-1 shift |" in SECTIONS[name]} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_that_of_its_row(name: str) -> None:
    heads, lines = table(name)
    rows = result_rows(name)
    shown = [at for at, head in enumerate(heads) if head.startswith(NUMBERS)]
    assert len(shown) >= 6
    assert len(lines) == len(rows)
    for cells, row in zip(lines, rows, strict=True):
        cell = dict(zip(heads, cells, strict=True))
        for part in re.findall(r"`[^`]+`|\d+", cell.get("method", cells[0])):
            assert re.search(rf"(^|\W){re.escape(part.strip('`'))}($|\W)", row["method"])
        if "method" in cell and "group" in cell:
            assert cell["group"] == row["group"]
        frames = cell.get("frames", "6–26")
        for at in shown:
            found = expected(heads[at], row, frames.replace("–", "-"))
            assert cells[at] in found, f"{name}, {row['method']}, {heads[at]}"


def test_the_page_counts_its_differences() -> None:
    differences = sum(bool(row["paired.psnr.mean"]) for name in NAMES for row in result_rows(name))
    assert f"Of the {differences} differences in these tables" in PAGE


# --- errors of tensors ----------------------------------------------------------------------------

METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
TENSOR_HEAD = (
    "| preset | bits | key error | value error | logit RMSE | top-1 shift | softmax KL | "
    "output error |\n"
)
COLUMNS = {
    "bits_per_element": ".3f",
    "key_error": ".3f",
    "value_error": ".3f",
    "logit_rmse": ".3f",
    "top1_shift": ".1%",
    "softmax_kl": ".4f",
    "output_error": ".3f",
}


def tensor_means(has_first: bool) -> dict[str, list[str]]:
    """The numbers of each method, as pages write them, with or without the first spans."""
    cells: dict[str, list[dict[str, str]]] = {}
    with (RESULTS / "tensors-walk.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if has_first or row["span"] != "0":
                cells.setdefault(row["method"], []).append(row)
    return {
        method: [
            format(sum(float(row[name]) for row in rows) / len(rows), form).replace("%", " %")
            for name, form in COLUMNS.items()
        ]
        for method, rows in cells.items()
    }


def test_the_errors_of_tensors_are_means_over_the_committed_cells() -> None:
    checked = []
    for page in METHOD_PAGES:
        for part in page.read_text(encoding="utf-8").split(TENSOR_HEAD)[1:]:
            # quantwm.md has a table without first spans, which are packed without statistics.
            means = [tensor_means(has_first) for has_first in (True, False)]
            for line in part.split("\n\n")[0].splitlines()[1:]:
                method, *found = (cell.strip(" `") for cell in line[1:-1].split("|"))
                assert found in [mean[method] for mean in means], f"{page.name}: {method}"
                checked.append(method)
    assert set(checked) == set(tensor_means(True))
