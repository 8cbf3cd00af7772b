"""How far `qvg` agrees with the public quant-videogen 0.1.0, both with our centroids and ids.

    pip install --no-deps quant-videogen==0.1.0 einops termcolor loguru
    python -m benchmarks.oracle --csv rows.csv                      # synthetic tokens
    python -m benchmarks.oracle walk.safetensors --centroids 32     # of `steadykv capture`

Needs CUDA. Shares are those of elements, the mean over the tensors of a row: equal codes, equal
scales, both; groups to which the release gives a scale of zero are left out and have a column of
their own. With the switch on, our encoder has the release's BF16 residuals and its way with ties
(`tests/oracle.py`). Errors are |x - decoded| / |x| of BF16 numbers, the release's by its decoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadykv.capture import open_capture
from steadykv.codecs import SpanKey, encode
from steadykv.config import CodecConfig, preset
from steadykv.evaluation.metrics.tensors import relative_error
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv
from tests.codecs import sample_tokens
from tests.oracle import INSTALL, Release, agreement, encode_like_release

METHODS = ("qvg", "qvg_pro")
SYNTHETIC = (1, 12, 4680, 128)
DEVICE = torch.device("cuda")

Named = tuple[SpanKey, Tensor]


def connect() -> Release:
    """The release on this machine, or the end with one line."""
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA device: quant-videogen runs on CUDA only")
    try:
        return Release()
    except ImportError as error:
        raise SystemExit(f"quant-videogen cannot be imported ({error}): {INSTALL}") from error


def tensors(path: Path | None, side: str) -> Iterator[Named]:
    """Keys ("k") or values ("v") of a capture, or synthetic ones: BF16 [B, H, S, D]."""
    name = {"k": "key", "v": "value"}[side]
    if path is None:
        yield SpanKey(0, name), sample_tokens(*SYNTHETIC, seed="kv".index(side), device=str(DEVICE))
        return
    file = open_capture(path)
    for layer, span in file.cells:
        x = getattr(file.load((layer, span), DEVICE), side).bfloat16()
        width = x.shape[3]
        if width & (width - 1) or width < 64:
            raise SystemExit(
                f"{path}: head dim is {width}, expected a power of two from 64, all that the "
                "release takes"
            )
        yield SpanKey(layer, name, span), x


def compare(
    release: Release, ties_go_out: Tensor, codec: CodecConfig, x: Tensor, key: SpanKey
) -> dict[str, dict[str, float]]:
    """The columns of one tensor for the switch "off" and "on"."""
    plain = encode(x, codec, span_key=key)
    theirs = release.encode(x, plain)
    read = release.decode(theirs, torch.bfloat16)
    found = {}
    for switch, ours in (("off", plain), ("on", encode_like_release(x, plain, ties_go_out))):
        shares, decoded = agreement(ours, theirs), ours.decode(torch.bfloat16)
        found[switch] = {
            "codes_equal": shares.codes,
            "scales_equal": shares.scales,
            "both_equal": shares.both,
            "zero_groups": shares.zero_groups,
            "error_ours": relative_error(x, decoded),
            "error_release": relative_error(x, read),
            "error_between": relative_error(read, decoded),
        }
    return found


def measure(release: Release, path: Path | None, centroids: int) -> list[dict[str, Any]]:
    """A row for each method, tensor and position of the switch."""
    ties_go_out = release.ties_go_out(DEVICE)
    versions = {
        "quant_videogen": version("quant-videogen"),
        "triton": import_module("triton").__version__,
    }
    rows = []
    for method in METHODS:
        codec = preset(method, centroids=centroids).keys
        for side in ("k", "v"):
            shapes, found = set(), []
            for key, x in tensors(path, side):
                shapes.add("x".join(map(str, x.shape)))
                found.append(compare(release, ties_go_out, codec, x, key))
            for switch in ("off", "on"):
                columns = [item[switch] for item in found]
                means = {name: sum(c[name] for c in columns) / len(found) for name in columns[0]}
                rows.append(
                    {
                        "method": method,
                        "tensor": side,
                        "switch": switch,
                        "source": "synthetic" if path is None else "capture",
                        **means,
                        "tensors": len(found),
                        "shape": " ".join(sorted(shapes)),
                        "centroids": centroids,
                        **versions,
                        **environment(DEVICE),
                    }
                )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row."""
    lines = [
        f"{'method':<9}{'tensor':<8}{'switch':<8}{'codes':>10}{'scales':>10}{'both':>10}"
        f"{'zero':>8}{'ours':>9}{'release':>9}{'between':>9}"
    ]
    for row in rows:
        shares = (f"{row[name]:>10.4%}" for name in ("codes_equal", "scales_equal", "both_equal"))
        errors = (f"{row[f'error_{name}']:>9.5f}" for name in ("ours", "release", "between"))
        lines.append(
            f"{row['method']:<9}{row['tensor']:<8}{row['switch']:<8}{''.join(shares)}"
            f"{row['zero_groups']:>8.2%}{''.join(errors)}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--centroids", type=int, default=256)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    if not 1 <= options.centroids <= 256:
        parser.error(f"--centroids is {options.centroids}: expected 1 to 256, as ids are bytes")
    rows = measure(connect(), options.file, options.centroids)
    print(table(rows))
    if options.csv is not None:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
