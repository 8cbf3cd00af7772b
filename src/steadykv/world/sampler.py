"""Rollouts: chunk after chunk.

Several denoising passes overwrite the open chunk, then one more commits it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.world.config import WorldConfig
from steadykv.world.episodes import Episodes
from steadykv.world.model import Table, WorldModel
from steadykv.world.pose import walk_poses
from steadykv.world.rope import apply_rope, rope_table

AttentionBackend = Literal["sdpa", "math"]
KeyRope = Literal["post", "pre"]


class LayerLike(Protocol):
    """What the model needs of one layer's cache; tensors are [B,S,H,D]."""

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None: ...
    def observe_queries(self, q: torch.Tensor) -> None: ...
    def read(self) -> tuple[torch.Tensor, torch.Tensor]: ...
    def spans(self) -> list[tuple[int, int]]: ...


class CacheLike(Protocol):
    """What the model needs of a cache: one object a layer, and the end of a chunk."""

    def __getitem__(self, layer: int) -> LayerLike: ...
    def commit(self) -> None: ...


class CachedAttention:
    """Attention of one open chunk over a cache.

    Writes its keys and values, shows its queries, reads the window. `key_rope="post"` stores
    rotated keys, as most hosts do; "pre" stores them unrotated and rotates what is read.
    """

    def __init__(
        self,
        config: WorldConfig,
        cache: CacheLike,
        attention: AttentionBackend,
        key_rope: KeyRope,
        cache_dtype: torch.dtype = torch.bfloat16,
    ):
        if attention not in ("sdpa", "math"):
            raise ConfigError(
                f"attention: got {attention!r}, expected 'sdpa' or 'math'; choose one of them"
            )
        if key_rope not in ("post", "pre"):
            raise ConfigError(
                f"key_rope: got {key_rope!r}, expected 'post' or 'pre'; choose one of them"
            )
        self.config, self.cache, self.attention, self.key_rope = config, cache, attention, key_rope
        self.cache_dtype = cache_dtype
        self.start = 0  # first token of the open chunk

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Table
    ) -> torch.Tensor:
        memory = self.cache[layer]
        rotated = apply_rope(q, table)
        if self.key_rope == "post":
            memory.write(
                apply_rope(k, table).to(self.cache_dtype), v.to(self.cache_dtype), self.start
            )
            memory.observe_queries(rotated)
            keys, values = memory.read()
        else:
            memory.write(k.to(self.cache_dtype), v.to(self.cache_dtype), self.start)
            memory.observe_queries(q)
            keys, values = memory.read()
            keys = apply_rope(keys, self._table_of(memory.spans(), keys.device))
        q, keys, values = (x.to(v.dtype).transpose(1, 2) for x in (rotated, keys, values))
        if self.attention == "sdpa":
            out = F.scaled_dot_product_attention(q, keys, values)
        else:
            logits = q.float() @ keys.float().transpose(-1, -2) * self.config.head_dim**-0.5
            out = (logits.softmax(-1) @ values.float()).to(v.dtype)
        return out.transpose(1, 2)

    def _table_of(self, spans: list[tuple[int, int]], device: torch.device) -> Table:
        tokens = self.config.frame_tokens
        parts = []
        for start, end in spans:
            first, last = start // tokens, -(-end // tokens)
            cosine, sine = rope_table(self.config, first, last - first, device)
            parts.append(
                (
                    cosine[start - first * tokens : end - first * tokens],
                    sine[start - first * tokens : end - first * tokens],
                )
            )
        return torch.cat([c for c, _ in parts]), torch.cat([s for _, s in parts])


def row_noise(
    seeds: Sequence[int], names: Sequence[str], chunk: int, use: str, shape: Sequence[int]
) -> torch.Tensor:
    """Gaussian noise FP32 [B,*shape] on the CPU.

    A row depends on its own seed, episode, chunk and use alone.
    """
    rows = []
    for seed, name in zip(seeds, names, strict=True):
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{seed}/{name}/{chunk}/{use}".encode())
        )
        rows.append(torch.randn(*shape, generator=generator))
    return torch.stack(rows)


def _check_request(config: WorldConfig, episodes: Episodes, frames: int) -> None:
    """Refuse what the model cannot generate, before anything is computed."""
    size = config.chunk_frames
    if frames < size or frames % size:
        raise ConfigError(
            f"frames: got {frames}, expected a positive multiple of {size}; "
            f"try {max(size, -(-frames // size) * size)}"
        )
    parts = {"frames": episodes.frames, "actions": episodes.actions, "camera": episodes.camera}
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor) and (name != "camera" or part is not None):
            raise ShapeError(
                f"episodes: got {name} of type {type(part).__name__}, expected a tensor; "
                "use load_episodes, or torch.as_tensor"
            )
    shape = (size, config.image_height, config.image_width, 3)
    got = tuple(episodes.frames.shape[1:])
    if got[1:] != shape[1:] or not got[0] or got[0] % size:
        raise ShapeError(
            f"first frames: got {got} a row, expected {shape} for this world, or a multiple of "
            f"{size} frames; use walks recorded for it"
        )
    if episodes.actions.shape[1] < got[0] + frames:
        raise ShapeError(
            f"actions: got {episodes.actions.shape[1]} a row, expected {got[0] + frames}; "
            "ask for fewer frames"
        )
    camera = episodes.camera
    if camera is not None and (
        not config.view_degrees
        or camera.ndim != 3
        or camera.shape[::2] != (len(episodes), 3)
        or camera.shape[1] < got[0] + frames
        or not bool(torch.isfinite(camera).all())
    ):
        raise ConfigError(
            f"camera: got {tuple(camera.shape)} for a world with view_degrees "
            f"{config.view_degrees:g}, expected finite poses [{len(episodes)}, "
            f"{got[0] + frames} or more, 3] for a world that is told where it looks; leave them out"
        )
    if int(episodes.actions.max()) >= config.num_actions:
        raise ConfigError(
            f"actions: got {int(episodes.actions.max())}, expected numbers below "
            f"{config.num_actions}; use walks recorded for this world"
        )


@torch.no_grad()
def rollout(
    world: WorldModel,
    episodes: Episodes,
    cache: CacheLike,
    frames: int = 48,
    seeds: Sequence[int] | int = 0,
    on_chunk: Callable[[int, int], None] | None = None,
    attention: AttentionBackend = "sdpa",
    key_rope: KeyRope = "post",
    cache_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Generate `frames` frames after the episodes' true first ones, under the episodes' actions.

    The C true frames, chunk_frames or a multiple, are committed chunk by chunk, each in the one
    pass that commits a generated chunk. A world with `view_degrees` is told where each frame
    looks: `episodes.camera`, or else what `walk_poses` reckons from the buttons. `cache` is empty
    and laid out "BSHD"; `seeds` holds one seed a row. Returns uint8 [B, C + frames, H, W, 3] on the
    CPU, the true frames first. Keys and values are handed over in `cache_dtype`.
    `on_chunk(done, total)` is called after each generated and committed chunk.
    Raises ShapeError when first frames or actions do not fit, ConfigError for a length that is no
    whole number of chunks, an unknown action or a camera that does not fit, NonFiniteError when
    the model's output is not finite (looked at once a chunk, when its pixels go to the CPU).
    """
    config = world.config
    device, dtype = world.embed.weight.device, world.embed.weight.dtype
    size, batch = config.chunk_frames, len(episodes)
    _check_request(config, episodes, frames)
    row_seeds = [seeds] * batch if isinstance(seeds, int) else list(seeds)
    if len(row_seeds) != batch:
        raise ShapeError(
            f"seeds: got {len(row_seeds)}, expected one for each of {batch} rows; "
            "repeat or cut them"
        )

    attend = CachedAttention(config, cache, attention, key_rope, cache_dtype)
    shape = (size, config.frame_tokens, config.channels)
    actions = episodes.actions.to(device, torch.int64)
    true_frames, total = episodes.frames.shape[1], frames // size
    poses = None
    if config.view_degrees:  # on the CPU, so that every device sees the same walk
        held, camera = episodes.actions[:, : true_frames + frames].cpu(), episodes.camera
        poses = (walk_poses(held) if camera is None else camera[:, : held.shape[1]]).to(device)
    true_chunks = true_frames // size
    pixel_shape = (config.image_height, config.image_width, 3)
    video = torch.empty(batch, true_frames + frames, *pixel_shape, dtype=torch.uint8)
    video[:, :true_frames] = episodes.frames

    def evaluate(x: torch.Tensor, time: float) -> torch.Tensor:
        times = torch.full((batch, size), time, device=device)
        return world(x.to(dtype), times, actions[:, span], attend, table, sight).float()

    for chunk in range(true_chunks + total):
        attend.start = chunk * size * config.frame_tokens
        table = rope_table(config, chunk * size, size, device)
        span = slice(chunk * size, (chunk + 1) * size)
        sight = None if poses is None else world.sight(poses[:, span])  # the same in every pass
        pixels = episodes.frames[:, span]
        if chunk >= true_chunks:
            x = clean = row_noise(row_seeds, episodes.names, chunk, "start", shape).to(device)
            for time, following in zip(
                config.noise_levels, (*config.noise_levels[1:], 1.0), strict=True
            ):
                clean = evaluate(x, time)
                x = x + (following - time) / (1 - time) * (clean - x)
            if not bool(torch.isfinite(clean).all()):
                raise NonFiniteError(
                    f"chunk {chunk}: got NaN or Inf from the world model, expected finite frames; "
                    "check its weights, or compute in float32"
                )
            pixels = world.tokenizer.decode(clean)
            video[:, span] = pixels.cpu()
        clean = world.tokenizer.encode(pixels)  # history holds what a viewer sees
        noise = row_noise(row_seeds, episodes.names, chunk, "commit", shape).to(device)
        evaluate(config.commit_time * clean + (1 - config.commit_time) * noise, config.commit_time)
        cache.commit()
        if chunk >= true_chunks and on_chunk is not None:
            on_chunk(chunk - true_chunks + 1, total)
    return video
