"""The tables, figures and page about captured tensors, and the option values of their commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from steadykv.capture import Selection, open_capture
from steadykv.cli.values import byte_size, number_list
from steadykv.errors import ConfigError
from steadykv.evaluation.tensor_comparison import TensorResult, compare_tensors
from steadykv.evaluation.world_capture import capture_world
from steadykv.report.plots import SERIES_COUNT
from steadykv.report.shift_figures import by_layer_and_head, shift_drawings, shift_table
from steadykv.report.tensor_measures import tensor_measures, tensor_table
from steadykv.report.tensor_page import TensorReport, headline, lead, tensor_page
from steadykv.report.tensor_plots import LIGHT, LIGHT_SERIES, PRINT, drawings
from tests.test_report_pages import Reader
from tests.worlds import tiny_episodes, tiny_world


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TensorResult:
    path = tmp_path_factory.mktemp("capture") / "walk.safetensors"
    capture_world(tiny_world(), tiny_episodes(1), path, Selection(queries=30), frames=12)
    return compare_tensors(open_capture(path))


# --- the table and the page -----------------------------------------------------------------


def test_a_narrow_terminal_gets_fewer_columns(result: TensorResult) -> None:
    columns = tensor_measures(result.rows)
    counts = []
    for width in (60, 80, 100, 160):
        table = tensor_table(result.rows, width)
        counts.append(len(table.columns))
        assert [column.header for column in table.columns][-1] in ("out", "enc ms", "dec ms")
        assert {"bits", "K err", "V err", "top-1 %", "out"} <= {c.header for c in table.columns}
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == len(columns) + 1


def test_the_page_is_whole_and_shows_the_numbers(result: TensorResult) -> None:
    data = json.loads(json.dumps(result.to_dict()))
    command = "steadykv tensors 'a <file>'"
    page = tensor_page(TensorReport(data, drawings(data["rows"], data["cells"]), command))
    reader = Reader(page)
    text = " ".join("".join(reader.text).split())
    assert command in text
    assert "a <file>" not in page
    assert headline(result.rows) in text
    for sentence in lead(result.rows):
        assert sentence in text
    for row in result.rows:
        assert f"{row['key_error']:.4f}" in text
        assert f"{100 * row['top1_shift']:.1f}" in text
    for measure in tensor_measures(result.rows):
        assert measure.meaning in text
    figures = len(drawings(data["rows"], data["cells"]))
    assert figures == 5
    shown = reader.named("svg", **{"class": "plot"})
    assert [svg["aria-label"] for svg in shown[figures:]] == [
        "Token shift by layer and head", "Token shift by step", "Token shift by span",
        "Token shift by layer",
    ]  # fmt: skip
    assert "Where the selected key changes" in text
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    ids = [found["id"] for _, found in reader.tags if found.get("id")]
    assert len(ids) == len(set(ids))


def test_the_map_of_shifts_has_the_cells_numbers(result: TensorResult) -> None:
    shares = by_layer_and_head(result.cells)
    method = result.rows[0]["method"]
    own = [cell for cell in result.cells if cell["method"] == method and cell["layer"] == 1]
    mean = [part["top1_shift"] for cell in own for part in cell["by_head"] if part["head"] == 1]
    assert shares[method, 1, 1] == pytest.approx(sum(mean) / len(mean))
    table = Reader(shift_table("heads", result.rows, result.cells))
    text = "".join(table.text)
    for (_, layer, _), share in shares.items():
        assert f"layer {layer}" in text
        assert f"{100 * share:.1f}" in text
    # Opacity is the share of the largest one.
    (maps, *_) = shift_drawings(result.rows, result.cells)
    drawn = [float(x) for x in re.findall(r"opacity: ([\d.]+)", maps.svg())]
    top = max(shares.values())
    expected = sorted(max(0.04, share / top) for share in shares.values() if share < top)
    assert sorted(x for x in drawn if 0 < x < 1) == pytest.approx(expected, abs=1e-3)


def test_steps_that_commit_are_marked(result: TensorResult) -> None:
    text = "".join(Reader(shift_table("shift-steps", result.rows, result.cells)).text)
    steps = {(p["step"], p["is_clean"]) for row in result.rows for p in row["by_step"]}
    assert any(is_clean for _, is_clean in steps)
    for step, is_clean in steps:
        assert (f"step {step} (commit)" in text) == is_clean
    for part in result.rows[0]["by_step"]:
        assert f"{100 * part['top1_shift']:.1f}" in text


def test_without_queries_there_is_no_shift_to_show(result: TensorResult) -> None:
    names = ("by_head", "by_step", "by_span", "by_layer")
    bare = [row | {name: [] for name in names} for row in result.rows]
    cells = [cell | {name: [] for name in names} for cell in result.cells]
    assert shift_drawings(bare, cells) == []


def test_the_lead_follows_the_numbers() -> None:
    def row(method: str, error: float | None, bits: float) -> dict[str, object]:
        return {"method": method, "output_error": error, "key_error": 0.5, "bits_per_element": bits}

    first, second, _ = lead([row("kivi", 0.2, 3.0), row("qvg", 0.125, 2.5), row("qvg4", 0.15, 2.6)])
    assert first == ("Relative error of the attention output of later queries: 12.5 % with QVG, "
                     "20.0 % with KIVI, and the others in between.")  # fmt: skip
    assert second == "Smallest is QVG with 2.50 bits a number against 16."
    assert lead([row("kivi", None, 3.0)])[0] == "Relative error of the keys: 50.0 % with KIVI."
    assert lead([row("kivi", 0.2, 3.0), row("qvg", 0.1, 2.5)])[0].endswith(
        "10.0 % with QVG and 20.0 % with KIVI."
    )


def test_colours_of_the_files_are_those_of_the_light_page() -> None:
    sheet = (Path(__file__).parent.parent / "src/steadykv/report/page/page.css").read_text()
    light = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", sheet[: sheet.index("@media")]))
    assert {name: light[name] for name in LIGHT} == LIGHT
    assert [light[f"s{index}"] for index in range(SERIES_COUNT)] == list(LIGHT_SERIES)


def test_more_methods_than_colours_still_differ(result: TensorResult) -> None:
    """The figures take a dozen methods; colours repeat, names and marks do not."""
    row = result.rows[0]
    many = [row | {"method": f"method-{index}"} for index in range(12)]
    cells = [cell | {"method": other["method"]} for other in many for cell in result.cells[:4]]
    for drawing in drawings(many, cells):
        svg = drawing.svg()
        assert all(f">{other['method']}<" in svg for other in many)


# --- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("all", None), ("0", (0,)), ("3,1", (1, 3)), ("5-7, 0,6", (0, 5, 6, 7)), ("2-2", (2,))],
)
def test_number_lists(text: str, numbers: tuple[int, ...] | None) -> None:
    assert number_list(text, "--layers") == numbers


@pytest.mark.parametrize("text", ["", ",", "1,", "-1", "1-", "2-1", "0x1", "1.5", "9999999", "1–2"])
def test_what_is_no_number_list(text: str) -> None:
    with pytest.raises(ConfigError, match="--layers: got"):
        number_list(text, "--layers")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("17B", 17),
        ("1k", 1024),
        ("1.5 GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("3g", 3 << 30),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert byte_size(text, "--max-bytes") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "2 GiBs", "1,5GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-bytes: got"):
        byte_size(text, "--max-bytes")


@pytest.mark.parametrize("name", ["parts", "sides"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_legend_lies_on_nothing(result: TensorResult, name: str, count: int) -> None:
    """Of few methods the figure is low: a legend above its axes lay on their title."""
    (drawing,) = [d for d in drawings(result.rows[:count], result.cells) if d.name == name]
    figure = drawing.draw(PRINT)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,), (axes,) = figure.legends, figure.axes
    place, taken = legend.get_window_extent(), axes.get_tightbbox(canvas.get_renderer())
    assert taken is not None
    assert not place.overlaps(taken)
    assert figure.bbox.x0 <= place.x0
    assert place.x1 <= figure.bbox.x1
    assert place.y0 >= figure.bbox.y0
