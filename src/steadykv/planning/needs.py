"""What one method needs for a video of a model: bytes of all layers, branches and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from steadykv.config import METHODS, CacheConfig
from steadykv.errors import ConfigError
from steadykv.ops.attention import BUDGETS
from steadykv.planning.catalog import Model
from steadykv.planning.replay import Geometry, Moment, Replay

__all__ = ["Need", "Setting", "longest", "need"]

# Chunks after which a video counts as endless: days of it.
MOST_CHUNKS = 1 << 15


@dataclass(frozen=True)
class Setting:
    """A model at one resolution, on one of `shards` GPUs that split its heads.

    compressed_tokens: of a latent frame that the model has compressed. attends_packed: whether
    attention is computed from the packed cache, and no layer's window is decoded.
    """

    model: Model
    frame_tokens: int
    compressed_tokens: int
    branches: int
    shards: int
    attends_packed: bool = False

    @property
    def geometry(self) -> Geometry:
        model = self.model
        return Geometry(model.batch, model.heads // self.shards, model.head_dim, self.frame_tokens)

    @property
    def caches(self) -> int:
        """Layers of all branches: so many times a layer's bytes are held."""
        return self.model.layers * self.branches

    def dense(self, tokens: int) -> int:
        """Keys and values of so many tokens, in BF16, in all layers and branches."""
        return 2 * self.geometry.dense(tokens) * self.caches

    def policy(self, config: CacheConfig) -> CacheConfig:
        """The configuration with the model's window, as an adapter sets it."""
        if self.model.storage == "appended":
            window, sink = self.model.window_latents, self.model.sink_latents
            return config.replace(window_frames=window, sink_frames=sink)
        config = config.replace(span_chunks=1)
        if self.model.storage == "condition":
            config = config.replace(recent_keep=0)
            if "first_span" in METHODS[config.keys.method]:
                config = config.replace(first_span="own")
        return config


@dataclass
class Need:
    """Bytes at the largest moment, all layers and branches together, and the highest peak.

    parts: by ledger part. bf16: what the attended tokens take in BF16. window: of one layer, dense,
    with what decoding takes; attend: scratch memory of attention from the packed cache, instead;
    encode: the most that packing one layer takes beside what is held; handed_over: what the host
    itself holds in BF16 while it hands all layers over. peak: the most that these and what is
    held came to.
    """

    parts: dict[str, int] = field(default_factory=dict)
    resident: int = 0
    payload: int = 0
    packed_elements: int = 0
    packed_bits: int = 0
    bf16: int = 0
    window: int = 0
    attend: int = 0
    encode: int = 0
    handed_over: int = 0
    peak: int = 0

    def see(self, setting: Setting, layers: list[Moment], encode: bool = True) -> None:
        """One moment more: what each of a layer's caches holds, in all layers and branches."""
        held = setting.caches * sum(moment.resident for moment in layers)
        geometry = setting.geometry
        window = max(2 * geometry.dense(m.attended_tokens) + m.decode for m in layers)
        chunk = geometry.dense(setting.model.chunk_latents * setting.frame_tokens)
        attend = BUDGETS["default"] + chunk + max(moment.decode for moment in layers)
        most = max(moment.encode for moment in layers) if encode else 0
        self.window, self.attend = max(self.window, window), max(self.attend, attend)
        self.encode = max(self.encode, most)
        read = attend if setting.attends_packed else window
        self.peak = max(self.peak, held + max(read, most))
        if held < self.resident:
            return
        self.resident = held
        self.parts = {}
        for moment in layers:
            for name, nbytes in moment.parts.items():
                self.parts[name] = self.parts.get(name, 0) + setting.caches * nbytes
        tokens = sum(moment.packed_tokens for moment in layers)
        sides = sum(moment.packed_sides for moment in layers)
        of_token = geometry.batch * geometry.heads * geometry.head_dim * setting.caches
        self.payload = setting.caches * sum(moment.payload for moment in layers)
        self.packed_elements = 2 * tokens * of_token
        self.packed_bits = 8 * self.payload + 16 * of_token * (2 * tokens - sides)
        self.bf16 = setting.dense(sum(moment.attended_tokens for moment in layers))


def need(setting: Setting, config: CacheConfig, chunks: int, cached: int | None = None) -> Need:
    """For a video of so many chunks; cached: latent frames that a rebuilt cache is made from."""
    if setting.model.storage == "appended":
        if chunks > MOST_CHUNKS:
            raise ConfigError(f"{chunks} chunks of frames: expected at most {MOST_CHUNKS}")
        return next(islice(_appended(setting, config), chunks - 1, None))
    return _rebuilt(setting, config, chunks, cached)


def longest(
    setting: Setting, config: CacheConfig, room: int, cached: int | None = None
) -> int | None:
    """The most chunks whose peak is at most `room`; None where no length is too much."""
    model = setting.model
    if model.storage == "appended":
        steady = None
        if model.window_latents is not None:
            # Behind the window everything repeats with each span, statistics and warm start too.
            policy = config.policy
            steady = model.chunks(model.window_latents) + 3 * policy.span_chunks
            steady += policy.recent_keep + model.chunks(policy.sink_keep + 1) + 1
        for chunks, found in enumerate(_appended(setting, config), 1):
            if found.peak > room:
                return chunks - 1
            if chunks == (steady or MOST_CHUNKS):
                break
        return None
    if model.storage != "compressed":
        most = 1 if model.storage == "condition" else model.chunks(model.window_latents or 1) + 2
        fitting = [n for n in range(1, most + 1) if need(setting, config, n, cached).peak <= room]
        return None if len(fitting) == most else max(fitting, default=0)
    return _longest_linear(lambda chunks: room - need(setting, config, chunks).peak)


def _longest_linear(left: Callable[[int], int]) -> int | None:
    """The most chunks that leave something of the room, which shrinks by nearly as much each."""
    probe = 16
    if left(1) < 0:
        return 0
    step = (left(probe) - left(2 * probe)) / probe
    low = 1
    guess = int(probe + left(probe) / step) if step > 0 else MOST_CHUNKS
    if guess >= MOST_CHUNKS:
        return None
    high = max(2, guess + 2)
    while left(high) >= 0:
        low, high = high, 2 * high
    if guess - 2 > low and left(guess - 2) >= 0:
        low = guess - 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left(middle) >= 0 else (low, middle)
    return low


def _appended(setting: Setting, config: CacheConfig) -> Iterator[Need]:
    """After each chunk more, what the video so far needed; always the same object."""
    replay = Replay(setting.geometry, setting.policy(config))
    found = Need()
    tokens = setting.model.chunk_latents * setting.frame_tokens
    while True:
        is_open, committed = replay.chunk(tokens)
        found.see(setting, [is_open])
        found.see(setting, [committed])
        yield found


def _rebuilt(setting: Setting, config: CacheConfig, chunks: int, cached: int | None) -> Need:
    """The cache of the last chunk of a video, which is made anew, one layer after the other."""
    model = setting.model
    all_pieces = _pieces(setting, config.policy.span_chunks, chunks, cached)
    config = setting.policy(config)
    is_condition = model.storage == "condition"
    found, layers, most = Need(), [], 0
    for pieces in all_pieces:
        replay = Replay(setting.geometry, config, observes=is_condition)
        if not is_condition and chunks > 2:  # the second chunk is the first to show its queries
            replay.has_history()
        moment = replay.more_queries()
        peak = 0
        for tokens in pieces:
            is_open, moment = replay.chunk(tokens)
            peak = max(peak, is_open.resident + is_open.encode)
        most = max(most, peak - moment.resident)
        if not is_condition:
            replay.observes = config.keys.needs_queries
            moment = replay.more_queries()
        layers.append(moment)
    found.see(setting, layers)
    found.encode = most
    if model.storage == "selected":
        found.handed_over = found.bf16 // setting.branches
    # The cache before, or the layers that are packed already, the layer being packed, and the rest.
    found.peak = max(found.peak, found.resident + most + found.handed_over)
    return found


def _pieces(setting: Setting, span: int, chunks: int, cached: int | None) -> list[list[int]]:
    """Tokens of the spans of a layer's caches while the last chunk is made."""
    model = setting.model
    if model.storage == "condition":
        return [[(cached or model.window_latents or 1) * setting.frame_tokens]]
    if model.storage == "selected":
        total = model.latents_of(chunks - 1)
        total = min(total, model.window_latents or total)
        size = span * model.chunk_latents
        return [[min(size, total - n) * setting.frame_tokens for n in range(0, total, size)]]
    lengths = [model.latents_of(n + 1) - model.latents_of(n) for n in range(chunks - 1)]
    old = max(0, len(lengths) - 2)
    return [
        [length * setting.compressed_tokens for length in lengths[:old]],
        [length * setting.frame_tokens for length in lengths[old:]],
    ]
