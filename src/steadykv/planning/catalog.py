"""What is known of models and GPUs (the data files beside this module), by the names people use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from steadykv.errors import ConfigError

__all__ = ["Gpu", "Model", "find_gpu", "find_model", "find_resolution", "gpus", "models"]

GIB = 1 << 30
# Long side of what is called 360p, 480p and 720p: models round the short one to their patches.
_LONG_SIDES = {360: 640, 480: 832, 720: 1280}
# In front of a GPU's own name.
_MAKERS = ("nvidia", "geforce", "tesla")


@dataclass(frozen=True)
class OtherCache:
    """A cache that stays dense, of one guidance branch; nbytes is None where it is not known."""

    title: str
    nbytes: int | None


@dataclass(frozen=True)
class Model:
    """How one model holds its cache, whole, for one guidance branch.

    layers, heads, head_dim: of keys and values; batch: rows that it stores for one video.
    frame_tokens: resolution -> tokens of a latent frame; compressed_frame_tokens: of a compressed
    one, where it has such. chunk_latents: latent frames that it makes at once;
    first_chunk_latents: of the first chunk, where that differs. window_latents: latent frames that
    it attends to, sink included; None for all.
    storage: see `storage_values` in hosts.json. attention_options: what `attach` offers for it.
    needs_window: whether its host refuses to run without one. branches: guidance branches with a
    cache each.
    parameters: None where its name does not tell. fps: frames a second of its videos, or None.
    other_caches: those that stay dense. evidence: how sure each group of fields is.
    """

    id: str
    title: str
    aliases: tuple[str, ...]
    repository: str
    parameters: int | None
    layers: int
    heads: int
    head_dim: int
    batch: int
    frame_tokens: Mapping[str, int]
    compressed_frame_tokens: Mapping[str, int]
    default_resolution: str
    first_chunk_latents: int | None
    chunk_latents: int
    pixel_frames_per_latent: int
    window_latents: int | None
    sink_latents: int
    branches: int
    max_branches: int
    storage: str
    attention_options: tuple[str, ...]
    needs_window: bool
    fps: float | None
    other_caches: tuple[OtherCache, ...]
    notes: str
    evidence: Mapping[str, str]

    def pixel_frames(self, latents: int) -> int:
        """Frames of the video that so many latent frames become: the first one is one frame."""
        return 1 + (latents - 1) * self.pixel_frames_per_latent if latents else 0

    def latents(self, frames: int) -> int:
        """Latent frames of a video of `frames` frames, rounded up."""
        return 1 + -(-(frames - 1) // self.pixel_frames_per_latent)

    def chunks(self, latents: int) -> int:
        """Chunks that so many latent frames take, rounded up."""
        first = self.first_chunk_latents or self.chunk_latents
        return 1 + max(0, -(-(latents - first) // self.chunk_latents))

    def latents_of(self, chunks: int) -> int:
        """Latent frames of the first `chunks` chunks."""
        first = self.first_chunk_latents or self.chunk_latents
        return first + (chunks - 1) * self.chunk_latents if chunks else 0


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory in MiB, as `source` shows it."""

    id: str
    title: str
    mib: int
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.mib << 20


_Named = TypeVar("_Named", Model, Gpu)


@cache
def models() -> tuple[Model, ...]:
    """All models of hosts.json, in its order."""
    found = []
    for row in _data("hosts")["hosts"]:
        others = tuple(OtherCache(**other) for other in row["other_caches"])
        lists = {name: tuple(row[name]) for name in ("aliases", "attention_options")}
        found.append(Model(**{**row, **lists, "other_caches": others}))
    return tuple(found)


@cache
def gpus() -> tuple[Gpu, ...]:
    """All GPUs of gpus.json."""
    return tuple(Gpu(**{**row, "aliases": tuple(row["aliases"])}) for row in _data("gpus")["gpus"])


def find_model(name: str) -> Model:
    """The model of that name or alias; else ConfigError with those that are spelled alike."""
    named = [(model.id, model.title, *model.aliases) for model in models()]
    return _find("model", name, models(), named)


def find_gpu(name: str | float) -> Gpu:
    """The GPU of that name or alias, or one of so many GiB ("24", 24, "24GiB", "24GB")."""
    text = str(name)
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(gib|gb|g)?\s*", text, re.IGNORECASE)
    is_size = size is not None and (size[2] or not _named(text))
    if size is not None and is_size:
        unit = 10**9 if (size[2] or "").lower() == "gb" else GIB
        mib = int(float(size[1]) * unit) >> 20
        if not mib:
            raise ConfigError(f"gpu is {name!r}: expected a name or a size above 0, such as 24GiB")
        return Gpu("custom", f"GPU of {mib / 1024:.4g} GiB", mib, "given")
    return _find("gpu", text, gpus(), [(gpu.id, gpu.title, *gpu.aliases) for gpu in gpus()])


def find_resolution(model: Model, text: str | None) -> str:
    """A resolution of the model: "480p", "480x832", "832x480", "16:9"; else ConfigError."""
    if text is None:
        return model.default_resolution
    known = list(model.frame_tokens)
    wanted = _plain(text.replace("*", "x").replace("×", "x"))
    sizes = {name: _sides(name) for name in known}
    sides = _sides(wanted)
    for name in known:
        is_named = wanted in (_plain(name), _plain(name.split()[-1]))
        if is_named or (sides is not None and sides == sizes[name]):
            return name
    height = re.fullmatch(r"(\d+)p", wanted)
    short = int(height[1]) if height else 0
    for name, pair in sizes.items():
        if short and pair and (short == pair[0] or _LONG_SIDES.get(short) == pair[1]):
            return name
    raise ConfigError(
        f"resolution is {text!r}: expected {_or(known)} for {model.id}, or frame_tokens, the "
        "tokens of a latent frame"
    )


def _find(kind: str, name: str, things: Sequence[_Named], names: Sequence[Sequence[str]]) -> _Named:
    """The thing that has `name`, written in any way, among its names; else ConfigError."""
    wanted = _plain(name)
    by_name: dict[str, _Named] = {}
    for thing, own in zip(things, names, strict=True):
        by_name |= {_plain(known): thing for known in own}
    if wanted in by_name:
        return by_name[wanted]
    close = [known for known in by_name if len(wanted) > 2 and known.startswith(wanted)]
    close += get_close_matches(wanted, by_name, n=6, cutoff=0.6)
    found = list(dict.fromkeys(by_name[known].id for known in close))[:4]
    such = f", such as {_or(found)}" if found else ""
    size = "; a size like 12GiB works too" if kind == "gpu" else ""
    raise ConfigError(
        f"{kind} is {name!r}: expected a known one{such}; `steadykv plan` lists them{size}"
    )


def _named(text: str) -> bool:
    """Whether a number is a GPU's name, as in "4090"."""
    return any(_plain(text) in map(_plain, (gpu.id, *gpu.aliases)) for gpu in gpus())


def _plain(name: str) -> str:
    """Lower-case letters and digits; makers' names left out."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for maker in _MAKERS:
        plain = plain.removeprefix(maker)
    return plain


def _sides(text: str) -> tuple[int, int] | None:
    """ "832x480" as (480, 832)."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        return None
    low, high = sorted((int(found[1]), int(found[2])))
    return low, high


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)


def _data(name: str) -> Any:
    return json.loads((files(__package__) / f"{name}.json").read_text(encoding="utf-8"))
