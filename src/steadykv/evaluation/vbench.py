"""Dimensions of VBench (Huang et al., CVPR 2024, arXiv 2311.17982), by the `vbench` package itself.

Nothing is computed here: the package, its models and its weights are the user's own. Where they are
missing, that is said; no other number takes their place. Called as the package's documentation and
version 0.1.5 have it: `VBench(device, full_info_dir, output_path).evaluate(videos_path, name,
dimension_list=..., mode="custom_input")`, which writes NAME_eval_results.json.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from steadykv.errors import BackendUnavailable, ConfigError

DIMENSIONS = (
    "subject_consistency",
    "background_consistency",
    "aesthetic_quality",
    "imaging_quality",
)
"""What the papers on quantized caches report; all four take any video, without a prompt."""

SUFFIXES = (".mp4", ".gif")
"""What version 0.1.5 reads as a video; it leaves other files of a folder out without a word."""

INSTALL = (
    "pip install torchvision vbench, in an environment of its own (version 0.1.5 wants numpy<2 and "
    "transformers 4.33); vbench downloads its weights itself"
)

OnDimension = Callable[[int, int, str], None]


def check_videos(paths: Sequence[Path]) -> list[Path]:
    """The videos that the paths are or hold, sorted within a folder. Raises ConfigError."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: got no file or folder of that name, expected a video")
        if path.is_dir():
            own = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
            if not own:
                raise ConfigError(f"{path}: got a folder without {' or '.join(SUFFIXES)} files")
            found += own
        elif path.suffix.lower() in SUFFIXES:
            found.append(path)
        else:
            raise ConfigError(
                f"{path}: got a {path.suffix or 'nameless'} file, but vbench reads "
                f"{' and '.join(SUFFIXES)}; convert it without loss of quality"
            )
    if not found:
        raise ConfigError("got no videos; name at least one file or folder")
    return found


def check_dimensions(names: Sequence[str]) -> list[str]:
    """Known dimensions, each once. Raises ConfigError."""
    wrong = [name for name in names if name not in DIMENSIONS]
    if wrong or not names or len(set(names)) != len(names):
        raise ConfigError(
            f"dimensions: got {', '.join(names) or 'none'}; expected some of "
            f"{', '.join(DIMENSIONS)}, each once"
        )
    return list(names)


def load_package() -> Any:
    """The `vbench` package. Raises BackendUnavailable if it, or what it needs, is not there."""
    try:
        package = importlib.import_module("vbench")
    except ImportError as error:
        missing = error.name or str(error)
        what = "is not installed" if missing == "vbench" else f"needs {missing}, which is missing"
        raise BackendUnavailable(f"the package vbench {what}; {INSTALL}") from error
    except Exception as error:  # another numpy or a broken library: anything may come
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BackendUnavailable(
            f"the package vbench cannot be imported ({reason}); {INSTALL}"
        ) from error
    # A folder of that name, of videos perhaps, is importable too.
    if not callable(getattr(package, "VBench", None)):
        place = package.__file__ or next(iter(package.__path__), "?")
        raise BackendUnavailable(
            f"the package vbench is not whole: {place} has no class VBench; {INSTALL}"
        )
    return package


def run_vbench(
    paths: Sequence[Path],
    dimensions: Sequence[str] = DIMENSIONS,
    *,
    device: str = "cuda",
    on_dimension: OnDimension | None = None,
) -> dict[str, Any]:
    """Scores of the videos: {"dimensions": {name: {"score", "videos": {path: score}}}, "versions"}.

    Scores are the package's own, means over videos: 0 to 1, more is better. It gives each video's
    imaging quality in 0 to 100; that is divided by 100 here, as the package does for the mean.
    The package prints to stdout and downloads its weights on first use; what it prints goes to
    stderr. Raises ConfigError (videos, dimensions) and BackendUnavailable (the package, or
    what it needs or downloads, is not there), and for results of another form than is documented.
    """
    wanted = check_dimensions(dimensions)
    videos = check_videos(paths)
    package = load_package()
    results = {}
    with tempfile.TemporaryDirectory(prefix="steadykv-vbench-") as folder:
        links = _linked(videos, Path(folder) / "videos")
        for done, name in enumerate(wanted):
            if on_dimension is not None:
                on_dimension(done, len(wanted), name)
            results[name] = _evaluate(package, name, links, Path(folder), device)
    return {"dimensions": results, "versions": {"vbench": _version()}}


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What `run_vbench` gave as one row a video, {"video", dimension: score}, for a store."""
    dimensions = found["dimensions"]
    videos = next(iter(dimensions.values()))["videos"]
    return [
        {"video": video} | {name: one["videos"][video] for name, one in dimensions.items()}
        for video in videos
    ]


def _linked(videos: Sequence[Path], folder: Path) -> dict[str, Path]:
    """A folder with the videos alone, under names that cannot collide: link -> video."""
    folder.mkdir()
    links = {}
    for number, video in enumerate(videos):
        link = folder / f"{number:06}{video.suffix.lower()}"
        link.symlink_to(video.resolve())
        links[str(link)] = video
    return links


def _evaluate(
    package: Any, name: str, links: dict[str, Path], folder: Path, device: str
) -> dict[str, Any]:
    """Mean score and each video's, of one dimension."""
    import torch

    info = Path(package.__file__ or "").parent / "VBench_full_info.json"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            bench = package.VBench(torch.device(device), str(info), str(folder))
            bench.evaluate(
                videos_path=str(folder / "videos"),
                name=name,
                dimension_list=[name],
                mode="custom_input",
            )
        results = json.loads((folder / f"{name}_eval_results.json").read_text(encoding="utf-8"))
    except Exception as error:  # whatever its models, downloads and files may raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BackendUnavailable(
            f"vbench could not measure {name} ({reason}); its weights are downloaded by vbench "
            f"itself, to {_cache()}: see that it can, or that they are there"
        ) from error
    return _scores(name, results, links)


def _scores(name: str, results: Any, links: dict[str, Path]) -> dict[str, Any]:
    """What the package wrote, checked: every video once, every score a number from 0 to 1."""
    scale = 100.0 if name == "imaging_quality" else 1.0
    try:
        score, by_video = results[name]
        found = {v["video_path"]: float(v["video_results"]) / scale for v in by_video}
        numbers = [float(score), *found.values()]
    except (KeyError, TypeError, ValueError) as error:
        raise BackendUnavailable(
            f"vbench {_version()} wrote {name} in another form than version 0.1.5 does; "
            "expected [score, [{video_path, video_results}, ...]]: use that version"
        ) from error
    if set(found) != set(links) or not all(
        math.isfinite(x) and -1e-6 <= x <= 1 + 1e-6 for x in numbers
    ):
        raise BackendUnavailable(
            f"vbench {_version()} gave {name} for {len(found)} of {len(links)} videos, from "
            f"{min(numbers):.4g} to {max(numbers):.4g}; expected 0 to 1 for each of them"
        )
    videos = {str(links[link]): value for link, value in found.items()}
    return {"score": float(score), "videos": videos}


def _cache() -> str:
    return os.environ.get("VBENCH_CACHE_DIR") or "~/.cache/vbench, torch.hub's and CLIP's folders"


def _version() -> str:
    try:
        return metadata.version("vbench")
    except metadata.PackageNotFoundError:
        return "of unknown version"
