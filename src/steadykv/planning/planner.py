"""Will it fit: `plan` adds weights, caches and transients, and compares them with a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from steadykv.config import PRESETS, CacheConfig, parse_method, preset
from steadykv.errors import ConfigError
from steadykv.planning.catalog import GIB, Gpu, Model, find_gpu, find_model, find_resolution
from steadykv.planning.needs import Need, Setting, longest, need
from steadykv.planning.offers import check_choices

__all__ = ["ATTENTION", "WEIGHT_BYTES", "MethodPlan", "Plan", "plan"]

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter; scales of quantized weights are not counted."""

ATTENTION = ("dense", "packed")
DEFAULT_FPS = 16


@dataclass(frozen=True)
class MethodPlan:
    """Bytes of one method, all layers and guidance branches together, on one GPU.

    parts: what is held at the largest moment, by ledger part; resident_bytes: their sum.
    payload_bytes: packed spans. dense_bytes: the open chunk, committed tokens that wait to be
    packed, and those that stay dense. statistics_bytes: query statistics. bf16_bytes: the attended
    tokens in BF16. bits_per_element: of what is packed; 16 where nothing is.
    window_bytes: the dense window of one layer and what decoding takes, for a host's own attention;
    attend_bytes: what `LayerCache.attend` takes instead; encode_bytes: what packing a layer takes;
    handed_over_bytes: what a host holds in BF16 while it hands over all layers. cache_peak_bytes:
    the most that what is held and these came to. total_bytes: with weights and others.
    free_bytes: what the GPU has left, negative where that is too much; None without a GPU.
    longest_latents: latent frames of the longest video that fits, 0 where none does; None where
    there is no limit, or no GPU. longest_frames, longest_seconds: the same in frames and seconds.
    """

    method: str
    parts: dict[str, int]
    resident_bytes: int
    payload_bytes: int
    dense_bytes: int
    statistics_bytes: int
    bf16_bytes: int
    bits_per_element: float
    window_bytes: int
    attend_bytes: int
    encode_bytes: int
    handed_over_bytes: int
    cache_peak_bytes: int
    total_bytes: int
    free_bytes: int | None
    longest_latents: int | None
    longest_frames: int | None
    longest_seconds: float | None

    @property
    def fits(self) -> bool | None:
        """Whether the GPU has room for it; None without a GPU."""
        return None if self.free_bytes is None else self.free_bytes >= 0

    @property
    def compression(self) -> float:
        """BF16 bytes of the attended tokens over what is held."""
        return self.bf16_bytes / self.resident_bytes if self.bf16_bytes else 1.0


@dataclass(frozen=True)
class Plan:
    """What a video of a model needs with each method. `str()` of it is a table.

    model: with the numbers that were changed. frames: of the video, of which `latents` latent
    frames are made in `chunks` chunks. condition_latents: what the cache is made of, for a model
    that caches nothing else. gpu: None for no verdict. weights_bytes, weights_from: and how they
    are known. dense_caches_bytes: the model's other caches, which stay dense. other_bytes: whatever
    else the user adds. notes: assumptions, one line each.
    """

    model: Model
    resolution: str
    frame_tokens: int
    frames: int
    latents: int
    chunks: int
    condition_latents: int | None
    fps: float
    branches: int
    shards: int
    attention: str
    gpu: Gpu | None
    weights_bytes: int
    weights_from: str
    dense_caches_bytes: int
    other_bytes: int
    methods: tuple[MethodPlan, ...]
    notes: tuple[str, ...]

    def __getitem__(self, method: str) -> MethodPlan:
        """The row of a method."""
        for row in self.methods:
            if row.method == method:
                return row
        known = ", ".join(row.method for row in self.methods)
        raise KeyError(f"{method!r}: planned are {known}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        rows = [
            {**asdict(row), "fits": row.fits, "compression": row.compression}
            for row in self.methods
        ]
        return {**asdict(self), "methods": rows, "notes": list(self.notes)}

    def __str__(self) -> str:
        from steadykv.planning.text import plain

        return plain(self)


def plan(
    model: str,
    *,
    frames: int = 93,
    resolution: str | None = None,
    gpu: str | float | None = None,
    presets: Sequence[str | CacheConfig] | None = None,
    span_chunks: int | None = None,
    centroids: int | None = None,
    attention: str = "dense",
    condition_frames: int | None = None,
    window_latents: int | None = None,
    sink_latents: int | None = None,
    chunk_latents: int | None = None,
    frame_tokens: int | None = None,
    branches: int | None = None,
    shards: int = 1,
    fps: float | None = None,
    weights_gib: float | None = None,
    parameters: float | None = None,
    weight_dtype: str = "bf16",
    other_gib: float = 0.0,
) -> Plan:
    """How much memory a video takes with each method, and what fits a GPU.

    model, gpu: names as people write them; a number is a GPU of so many GiB. frames: of the video.
    resolution: "480p", "480x832"; the model's own by default. presets: names or KEYS:VALUES, or
    configurations; by default all that need no calibration and whose own policy suits the window.
    span_chunks, centroids: for all of them. attention: "dense" decodes one layer's window for the
    host, "packed" is `LayerCache.attend`, where its adapter offers that. condition_frames: of a
    model that caches those alone.
    window_latents (0: none), sink_latents, chunk_latents, frame_tokens, branches: in place of the
    model's own. shards: GPUs that split its heads; bytes are those of one. weights_gib, or
    parameters times the bytes of weight_dtype: in place of the number in the model's name, on every
    GPU in full. other_gib: activations, text encoder, VAE and what else you know of.

    Bytes of caches are those that `KVCache` will hold, with the spans that it will cut.
    Raises ConfigError for what is unknown, or means nothing together.
    """
    known = find_model(model)
    place = find_resolution(known, resolution) if frame_tokens is None else resolution or "given"
    tokens = known.frame_tokens[place] if frame_tokens is None else frame_tokens
    changes = {"window_latents": window_latents, "sink_latents": sink_latents}
    changes |= {"chunk_latents": chunk_latents}
    for name, number in (
        ("frames", frames), ("frame_tokens", frame_tokens), ("branches", branches),
        ("shards", shards), ("condition_frames", condition_frames), *changes.items(),
    ):  # fmt: skip
        low = 0 if name in ("window_latents", "sink_latents") else 1
        _check_number(name, number, low)
    if attention not in ATTENTION:
        raise ConfigError(f"attention is {attention!r}: expected {' or '.join(ATTENTION)}")
    check_choices(known, attention, window_latents, sink_latents)
    own = {name: number for name, number in changes.items() if number is not None}
    changed = replace(known, **own)  # type: ignore[arg-type]
    if window_latents == 0:
        changed = replace(changed, window_latents=None, sink_latents=sink_latents or 0)
    cached = _condition(changed, condition_frames)
    if changed.heads % shards:
        raise ConfigError(f"shards is {shards}: expected a divisor of {changed.heads} heads")
    rate = _positive("fps", fps) or known.fps or DEFAULT_FPS
    setting = Setting(
        model=changed,
        frame_tokens=tokens,
        compressed_tokens=known.compressed_frame_tokens.get(place, -(-tokens // 4)),
        branches=branches or known.branches,
        shards=shards,
        attends_packed=attention == "packed",
    )
    device = None if gpu is None else find_gpu(gpu)
    weights, source = _weights(known, weights_gib, parameters, weight_dtype, device is not None)
    other = int((_positive("other_gib", other_gib) or 0) * GIB)
    dense_caches = setting.branches * sum(cache.nbytes or 0 for cache in known.other_caches)
    fixed = weights + dense_caches + other
    latents, chunks = changed.latents(frames), 1
    if cached is None:
        chunks = changed.chunks(latents)
        latents = changed.latents_of(chunks)
    rows: list[MethodPlan] = []
    left_out: list[str] = []
    for config in _configs(presets, span_chunks, centroids):
        try:
            found = need(setting, config, chunks, cached)
        except ConfigError as error:
            if presets is not None or PRESETS[config.name][2] == {}:
                raise  # not for the policy of a preset that nobody asked for
            left_out.append(f"left out: {config.name} ({error})")
            continue
        limit = None
        if device is not None:
            limit = longest(setting, config, device.nbytes - fixed, cached)
        taken = fixed + found.peak
        free = None if device is None else device.nbytes - taken
        rows.append(_row(config.name, found, changed, taken, free, limit, rate))
    room = None if device is None else device.nbytes - fixed
    return Plan(
        model=changed,
        resolution=place,
        frame_tokens=tokens,
        frames=frames,
        latents=latents,
        chunks=chunks,
        condition_latents=cached,
        fps=rate,
        branches=setting.branches,
        shards=shards,
        attention=attention,
        gpu=device,
        weights_bytes=weights,
        weights_from=source,
        dense_caches_bytes=dense_caches,
        other_bytes=other,
        methods=tuple(rows),
        notes=(*_notes(known, fps is None, room), *left_out),
    )


def _row(
    name: str,
    found: Need,
    model: Model,
    taken: int,
    free: int | None,
    limit: int | None,
    fps: float,
) -> MethodPlan:
    parts = dict(sorted(found.parts.items(), key=lambda item: (-item[1], item[0])))
    latents = None if limit is None else model.latents_of(limit)
    frames = None if latents is None else model.pixel_frames(latents)
    return MethodPlan(
        method=name,
        parts=parts,
        resident_bytes=found.resident,
        payload_bytes=found.payload,
        dense_bytes=sum(parts.get(role, 0) for role in ("open", "waiting", "dense")),
        statistics_bytes=parts.get("query_moment", 0),
        bf16_bytes=found.bf16,
        bits_per_element=found.packed_bits / found.packed_elements if found.packed_elements else 16,
        window_bytes=found.window,
        attend_bytes=found.attend,
        encode_bytes=found.encode,
        handed_over_bytes=found.handed_over,
        cache_peak_bytes=found.peak,
        total_bytes=taken,
        free_bytes=free,
        longest_latents=latents,
        longest_frames=frames,
        longest_seconds=None if frames is None else frames / fps,
    )


def _configs(
    presets: Sequence[str | CacheConfig] | None, span_chunks: int | None, centroids: int | None
) -> list[CacheConfig]:
    """The configurations of the rows, each once."""
    if isinstance(presets, str):
        presets = [presets]
    named = [name for name in PRESETS if not preset(name).needs_calibration]
    found: list[CacheConfig] = []
    for item in named if presets is None else presets:
        config = item if isinstance(item, CacheConfig) else parse_method(item)
        if config.needs_calibration:
            raise ConfigError(
                f"presets has {config.name!r}, whose calibration has a size of its own: expected "
                "one without, such as 'kvquant', which packs to the same size"
            )
        span = config.policy.span_chunks if span_chunks is None else span_chunks
        config = config.with_span(span, centroids)
        if config.name in [other.name for other in found]:
            raise ConfigError(f"presets has {config.name!r} twice: expected each name once")
        found.append(config)
    if not found:
        raise ConfigError("presets is empty: expected at least one name, such as 'quantwm'")
    return found


def _condition(model: Model, frames: int | None) -> int | None:
    """Condition latents of a model whose cache is made of them; None for other models."""
    if model.storage == "condition":
        if frames is None:
            return model.window_latents
        most = (model.window_latents or 0) + model.chunk_latents  # of a segment, at the default
        if model.latents(frames) >= most:
            raise ConfigError(
                f"condition_frames is {frames}: expected less than the frames of a segment of "
                f"{model.id}, {model.pixel_frames(most)}"
            )
        return model.latents(frames)
    if frames is not None:
        raise ConfigError(
            f"condition_frames is {frames}, but the cache of {model.id} is not made from condition "
            "frames: leave it out"
        )
    return None


def _weights(
    model: Model, gib: float | None, parameters: float | None, dtype: str, is_needed: bool
) -> tuple[int, str]:
    """Bytes of the weights, and how they are known."""
    if dtype not in WEIGHT_BYTES:
        raise ConfigError(f"weight_dtype is {dtype!r}: expected {' or '.join(WEIGHT_BYTES)}")
    if gib is not None:
        return int((_positive("weights_gib", gib) or 0) * GIB), "given"
    count = _positive("parameters", parameters) or model.parameters
    if count is None:
        if is_needed:
            raise ConfigError(
                f"the parameters of {model.id} are not known: pass parameters= or weights_gib="
            )
        return 0, "unknown"
    origin = "given" if parameters else f"in its name, {model.evidence['parameters']}"
    nbytes = int(count * WEIGHT_BYTES[dtype])
    return nbytes, f"assumed: {count / 1e9:g}e9 parameters ({origin}) in {dtype}"


def _notes(model: Model, is_own_rate: bool, room: int | None) -> tuple[str, ...]:
    found = []
    if room is not None and room < 0:
        found.append(
            f"what is not the cache is {-room / GIB:.2f} GiB too much by itself: fewer bytes a "
            "weight, weights kept elsewhere, or another GPU"
        )
    unknown = [cache.title for cache in model.other_caches if cache.nbytes is None]
    unknown += ["activations", "text encoder", "VAE", "CUDA context"]
    found.append(f"not counted: {', '.join(unknown)}; add what you know of them")
    if is_own_rate:
        rate = f"{model.fps:g}" if model.fps else f"{DEFAULT_FPS}"
        found.append(f"seconds: at {rate} frames a second ({model.evidence['fps']})")
    if model.storage == "selected":
        found.append("while the host hands over a new cache, it holds all layers in BF16 as well")
    if model.notes:
        found.append(f"{model.id}: {model.notes}")
    return tuple(found)


def _check_number(name: str, number: Any, low: int) -> None:
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise ConfigError(f"{name} is {number!r}: expected an integer from {low} on")


def _positive(name: str, number: Any) -> float | None:
    """The number, or None; else ConfigError."""
    if number is None:
        return None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 <= number < float("inf"):
        raise ConfigError(f"{name} is {number!r}: expected a number from 0 on")
    return float(number)
