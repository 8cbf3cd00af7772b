"""What the closed loop can remember its chunks in: nothing, BF16 here or on the host, a KVCache.

Each takes the queries, keys and values of a layer's open chunk, [1, S, H, D], and returns what they
attend to. The window counts the open chunk; there is no mask within it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from steadykv.cache import KVCache, Ledger
from steadykv.config import CacheConfig

from .generator import PASSES, Shape

WAYS = ("ring", "read", "attend", "small", "host")
"""How the window is attended to."""
PLAIN_WAYS = ("ring", "host")
"""BF16 without a KVCache."""


class Memory(Protocol):
    """attention: of the open chunk. commit: what is written next is another chunk."""

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def commit(self) -> None: ...
    def ledger(self) -> Ledger | None: ...


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA of [1, S, H, D]."""
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


class Forgetful:
    """No cache: a chunk attends to itself."""

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return full_attention(q, k, v)

    def commit(self) -> None:
        pass

    def ledger(self) -> None:
        return None


class Ring(Forgetful):
    """BF16 at its best: the open chunk takes the place of the oldest one, and nothing is moved.

    The order of the keys changes nothing but rounding.
    """

    def __init__(
        self, shape: Shape, window_frames: int, device: torch.device, pinned: bool = False
    ) -> None:
        self.tokens, self.slots = shape.chunk_tokens, window_frames // shape.chunk_frames
        self.size = (1, self.slots * self.tokens, shape.heads, shape.head_dim)
        self.layers = [
            tuple(
                torch.empty(self.size, dtype=torch.bfloat16, device=device, pin_memory=pinned)
                for _ in range(2)
            )
            for _ in range(shape.layers)
        ]
        self.chunk = 0

    @property
    def open(self) -> slice:
        """The tokens that the open chunk takes."""
        first = self.chunk % self.slots * self.tokens
        return slice(first, first + self.tokens)

    @property
    def filled(self) -> int:
        return min(self.chunk + 1, self.slots) * self.tokens

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = self.layers[layer]
        for target, source in zip(held, (k, v), strict=True):
            target[:, self.open] = source
        return full_attention(q, *(t[:, : self.filled] for t in held))

    def commit(self) -> None:
        self.chunk += 1


class Host(Ring):
    """BF16 in pinned host memory: while one layer computes, the history of the next comes in.

    Two windows on the device take turns. The clean pass takes its chunk to the host.
    """

    def __init__(self, shape: Shape, window_frames: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        super().__init__(shape, window_frames, torch.device("cpu"), pinned=is_gpu)
        self.windows = [
            tuple(torch.empty(self.size, dtype=torch.bfloat16, device=device) for _ in range(2))
            for _ in range(2)
        ]
        self.copies = torch.cuda.Stream(device) if is_gpu else None
        self.turn = 0  # the window of the layer that computes
        self.fetched: int | None = None  # the layer whose history is in it, or on its way
        self.passes = 0  # of the open chunk

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.passes += layer == 0
        if self.fetched != layer:
            self._fetch(layer)
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
        window = self.windows[self.turn]
        self.turn = 1 - self.turn
        self._fetch((layer + 1) % len(self.layers))
        for host, target, source in zip(self.layers[layer], window, (k, v), strict=True):
            target[:, self.open] = source
            if self.passes == PASSES:
                host[:, self.open].copy_(target[:, self.open], non_blocking=True)
        return full_attention(q, *(t[:, : self.filled] for t in window))

    def commit(self) -> None:
        super().commit()
        self.passes = 0
        self.fetched = None  # it lacks the chunk that was open

    def _fetch(self, layer: int) -> None:
        """All committed chunks of the window, behind what the device was told to do so far."""
        ranges = [slice(0, self.open.start), slice(self.open.stop, self.filled)]
        if self.copies is not None:
            self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for host, target in zip(self.layers[layer], self.windows[self.turn], strict=True):
                for tokens in ranges:
                    if tokens.start < tokens.stop:
                        target[:, tokens].copy_(host[:, tokens], non_blocking=True)
        self.fetched = layer


class Packed:
    """A KVCache: `read` and SDPA, or `attend`; "small" is `attend` with memory="small".

    Each layer commits a chunk, and packs its span, when the next chunk is first written to it, as
    in a host that calls nothing else: the device computes meanwhile what the layers before queued.
    """

    def __init__(self, shape: Shape, config: CacheConfig, way: str, device: torch.device) -> None:
        self.cache = KVCache(
            shape.layers, shape.heads, shape.head_dim, shape.frame_tokens, config, device=device
        )
        self.tokens, self.way, self.chunk = shape.chunk_tokens, way, 0

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self.cache[layer]
        cache.write(k, v, self.chunk * self.tokens)
        cache.observe_queries(q)
        if self.way == "read":
            return full_attention(q, *cache.read())
        return cache.attend(q, memory="small" if self.way == "small" else "default")

    def commit(self) -> None:
        self.chunk += 1

    def ledger(self) -> Ledger:
        return self.cache.ledger()


def new_memory(
    shape: Shape, config: CacheConfig, way: str, window_frames: int, device: torch.device
) -> Memory:
    """An empty one."""
    if way in PLAIN_WAYS:
        return {"ring": Ring, "host": Host}[way](shape, window_frames, device)
    return Packed(shape, config.replace(window_frames=window_frames), way, device)


def fill(memory: Memory, shape: Shape, chunks: int, device: torch.device) -> None:
    """Commits so many chunks of random keys and values, like a video's, without the network.

    For a KVCache without attention as well: a chunk is written, its queries are shown, it is
    committed.
    """
    rng = torch.Generator(device).manual_seed(1)
    pool = [_tokens(shape, device, rng) for _ in range(4)]
    for chunk in range(chunks):
        k, v, q = (pool[(chunk + number) % len(pool)] for number in (0, 1, 2))
        for layer in range(shape.layers):
            if isinstance(memory, Packed):
                memory.cache[layer].write(k, v, chunk * shape.chunk_tokens)
                memory.cache[layer].observe_queries(q)
            elif isinstance(memory, Ring):
                for target, source in zip(memory.layers[layer], (k, v), strict=True):
                    target[:, memory.open].copy_(source)
        memory.commit()


def _tokens(shape: Shape, device: torch.device, rng: torch.Generator) -> Tensor:
    """BF16 [1, S, H, D]: 64 kinds of patches, a slow drift, noise; of unit RMS, as after a norm."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, device=device)

    size = (shape.chunk_tokens, shape.heads, shape.head_dim)
    which = torch.randint(0, 64, size[:1], generator=rng, device=device)
    drift = torch.linspace(0, 1, size[0], device=device)[:, None, None] * normal(*size[1:])
    x = 2 * normal(64, *size[1:])[which] + drift + normal(*size)
    return (x / x.square().mean((1, 2), keepdim=True).sqrt()).bfloat16()[None]
