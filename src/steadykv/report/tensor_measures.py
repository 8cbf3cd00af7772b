"""The columns of the tables about captured tensors, and their table in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from steadykv.report.measures import Measure, is_best
from steadykv.report.text import method_title

Row = Mapping[str, Any]

# What a narrow terminal leaves to the report first.
LEAVE_OUT = (
    "value_sqnr_db",
    "key_sqnr_db",
    "top5_shift",
    "decode_ms",
    "output_error_values",
    "output_error_keys",
    "encode_ms",
    "softmax_kl",
    "logit_rmse",
)


def tensor_measures(rows: Sequence[Row]) -> list[Measure]:
    """The columns for these rows; those that no row has a number for are left out."""
    measures = [
        Measure(
            title="bits",
            unit="per number",
            short="bits",
            path=("bits_per_element",),
            meaning="Stored bits per number, mean of keys and values, with everything that "
            "unpacking needs: codes, scales, centroids, indices, corrections.",
            digits=3,
            better=min,
            is_size=True,
            has_bar=True,
        ),
        _error("key_error", "key error", "K err", "Size of the error of the keys, divided by the "
               "size of the keys: ‖k − k̂‖ / ‖k‖ over a span."),
        _error("value_error", "value error", "V err", "The same of the values."),
        _sqnr("key_sqnr_db", "key SQNR", "K dB", "keys"),
        _sqnr("value_sqnr_db", "value SQNR", "V dB", "values"),
        Measure(
            title="logit error",
            unit="RMSE",
            short="logit",
            path=("logit_rmse",),
            meaning="Root mean squared error of the attention logits q·k / √D of later queries "
            "over all keys of the span.",
            digits=3,
            better=min,
        ),
        _share("top1_shift", "shift", "top-1, %", "top-1 %", "Share of later queries whose best "
               "key of the span is another one after packing."),
        _share("top5_shift", "shift", "top-5, %", "top-5 %", "Share of the five best keys that "
               "are no longer among the five best."),
        Measure(
            title="softmax KL",
            unit="nats",
            short="KL",
            path=("softmax_kl",),
            meaning="Kullback-Leibler divergence of the attention weights over the span after "
            "packing from those before, mean over later queries.",
            digits=4,
            better=min,
        ),
        _error("output_error_keys", "output, K", "out K", "Relative error of the attention output "
               "over the span with only the keys packed."),
        _error("output_error_values", "output, V", "out V", "The same with only the values "
               "packed."),
        _error("output_error", "output", "out", "The same with both packed: what the next layer "
               "gets to see."),
        _time("encode_ms", "encode", "enc ms", "packing"),
        _time("decode_ms", "decode", "dec ms", "unpacking"),
    ]  # fmt: skip
    return [m for m in measures if any(m.value(row) is not None for row in rows)]


def _error(name: str, title: str, short: str, meaning: str) -> Measure:
    return Measure(title, "relative", short, (name,), meaning, digits=4, better=min)


def _sqnr(name: str, title: str, short: str, what: str) -> Measure:
    meaning = f"Signal to quantization noise of the {what}, 10 log10(Σx² / Σe²): more is closer."
    return Measure(title, "dB", short, (name,), meaning, digits=1, better=max)


def _share(name: str, title: str, unit: str, short: str, meaning: str) -> Measure:
    return Measure(title, unit, short, (name,), meaning, digits=1, better=min, scale=100.0)


def _time(name: str, title: str, short: str, what: str) -> Measure:
    meaning = (
        f"Milliseconds of {what} the keys and values of one span of one layer, median over all; "
        "the first call of a method is not timed."
    )
    return Measure(title, "ms a span", short, (name,), meaning, digits=1, is_size=True)


def tensor_table(rows: Sequence[Row], width: int) -> Table:
    """One row a method, as many columns as fit `width` characters."""
    titles = [method_title(row["method"]) for row in rows]
    columns = tensor_measures(rows)
    for name in LEAVE_OUT:
        needed = max(map(len, titles)) + sum(2 + _width(column, rows) for column in columns)
        if needed <= width:
            break
        columns = [column for column in columns if column.path != (name,)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method")
    for column in columns:
        table.add_column(column.short, justify="right", no_wrap=True)
    for row, title in zip(rows, titles, strict=True):
        cells = []
        for column in columns:
            best = is_best(column, row, rows)
            text = show(column, row)
            cells.append(f"[bold green]{text}[/bold green]" if best else text)
        table.add_row(title, *cells)
    return table


def show(measure: Measure, row: Row) -> str:
    """The number as text, a dash where there is none."""
    value = measure.value(row)
    return "–" if value is None else measure.show(value)


def _width(measure: Measure, rows: Sequence[Row]) -> int:
    return max(len(measure.short), *(len(show(measure, row)) for row in rows))
