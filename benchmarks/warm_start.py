"""Does k-means that starts from the span before save iterations? Error by iteration, cold and warm.

    steadykv capture --frames 24 --out walk.safetensors
    python -m benchmarks.warm_start walk.safetensors --csv rows.csv

Every span after the first of a captured walk is packed with `qvg4` from a cold start, from the
centroids of the span before (`warm_start=True`) and from its ids (`"ids"`), the span before having
been packed in the same way. The error is |x - decoded| / |x|, the mean over layers and spans;
seconds are those that one thread takes to pack such a span, the median.
Streaming centroid caching: arXiv 2602.02958, section 4.3.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from steadykv.capture import CaptureFile, open_capture
from steadykv.codecs import Payload, SpanKey, encode
from steadykv.config import CodecConfig, preset
from steadykv.evaluation.metrics.tensors import relative_error
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv

STARTS: dict[str, bool | str] = {"cold": False, "centroids": True, "ids": "ids"}
ITERATIONS = (0, 1, 2, 4, 8, 16)


def packed(file: CaptureFile, side: str, codec: CodecConfig) -> Iterator[tuple[float, float]]:
    """Error and seconds of every span that another one precedes; `side` is "k" or "v"."""
    for layer in file.layers:
        before: Payload | None = None
        for span in file.spans:
            x = getattr(file.load((layer, span)), side)
            name = {"k": "key", "v": "value"}[side]
            began = time.thread_time()  # the encoder's alone, however busy the machine is
            payload = encode(x, codec, warm=before, span_key=SpanKey(layer, name, span))
            seconds = time.thread_time() - began
            if before is not None and before.shape == payload.shape:
                yield relative_error(x, payload.decode(torch.float32)), seconds
            before = payload


def measure(file: CaptureFile, centroids: int) -> list[dict[str, Any]]:
    """A row for each tensor, start and number of iterations."""
    rows = []
    for side in ("k", "v"):
        for start, warm in STARTS.items():
            for iterations in ITERATIONS:
                base = preset("qvg4", centroids=centroids).keys
                codec = replace(base, iterations=iterations, warm_start=warm)
                found = list(packed(file, side, codec))
                if not found:
                    raise SystemExit("the file holds no two spans in a row: capture more frames")
                rows.append(
                    {
                        "tensor": side,
                        "start": start,
                        "iterations": iterations,
                        "error": sum(error for error, _ in found) / len(found),
                        "seconds": median(seconds for _, seconds in found),
                        "spans": len(found),
                        "centroids": centroids,
                        **environment("cpu"),
                    }
                )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Errors, then milliseconds: a line for each tensor and start, a column for each number of
    iterations."""
    lines = []
    for title, name, factor, digits in (("error", "error", 1, 4), ("ms", "seconds", 1000, 1)):
        lines.append(f"{title + ', iterations':<18}" + "".join(f"{n:>8}" for n in ITERATIONS))
        for side in ("k", "v"):
            for start in STARTS:
                line = [row for row in rows if (row["tensor"], row["start"]) == (side, start)]
                values = "".join(f"{factor * row[name]:>8.{digits}f}" for row in line)
                lines.append(f"{side} {start:<16}{values}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--centroids", type=int, default=32)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # what is timed is one core
    rows = measure(open_capture(options.file), options.centroids)
    print(table(rows))
    if options.csv is not None:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
