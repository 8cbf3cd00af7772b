"""Token shift by brute force, through public calls of the caches, head by head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steadykv.cache import KVCache, LayerCache
from steadykv.config import CacheConfig, preset
from steadykv.evaluation.shift_layer import Rotation

HEADS, DIM, FRAME = 2, 32, 24


class BruteForce:
    """A reference cache and one shadow, asked pass by pass."""

    def __init__(
        self, config: CacheConfig, layers: int, stride: int, rotation: Rotation | None = None
    ) -> None:
        self.rotation = rotation
        bf16 = preset("bf16").replace(policy=config.policy)
        self.reference = KVCache(layers, HEADS, DIM, FRAME, bf16)
        self.shadow = KVCache(layers, HEADS, DIM, FRAME, config)
        self.stride = stride
        # Per layer and pass: start of the chunk, and moved or not [row, head, query].
        self.passes: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(layers)]

    def __getitem__(self, index: int) -> BruteForceLayer:
        return BruteForceLayer(self, index)

    def commit(self) -> None:
        self.reference.commit()
        self.shadow.commit()

    def by_head(self, head: int) -> float:
        """Share of moved selections of one query head, over rows, layers and denoising passes."""
        found = [moved[:, head].flatten() for _, moved in self.denoising()]
        return torch.cat(found).double().mean().item()

    def by_step(self, step: int) -> float:
        """The same of one pass of all chunks."""
        found = [moved.flatten() for number, moved in self.denoising() if number == step]
        return torch.cat(found).double().mean().item()

    def denoising(self) -> list[tuple[int, torch.Tensor]]:
        """(step, moved [row, head, query]) of every measured pass that is not the chunk's last."""
        found = []
        for layer in self.passes:
            step = 0
            for place, (start, selected) in enumerate(layer):
                step = step + 1 if place and layer[place - 1][0] == start else 0
                is_last = place + 1 == len(layer) or layer[place + 1][0] != start
                if not is_last and len(selected):
                    found.append((step, selected))
        return found

    def share(self, row: int, clean: bool) -> float:
        """Share of moved selections over denoising passes, or over the last pass of each chunk."""
        moved = []
        for layer in self.passes:
            for place, (start, selected) in enumerate(layer):
                is_last = place + 1 == len(layer) or layer[place + 1][0] != start
                if is_last == clean and len(selected):
                    moved.append(selected[row].flatten())
        return torch.cat(moved).double().mean().item()


class BruteForceLayer:
    def __init__(self, owner: BruteForce, index: int) -> None:
        self.owner, self.index = owner, index
        self.reference, self.shadow = owner.reference[index], owner.shadow[index]

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        self.reference.write(k, v, start)
        self.shadow.write(k, v, start)
        self.owner.passes[self.index].append((start, torch.empty(0)))

    def read(self) -> None:
        """Nothing: what a read returns plays no part here."""

    def observe_queries(self, q: torch.Tensor) -> None:
        self.shadow.observe_queries(q)
        tokens, (start, _) = packed_tokens(self.shadow), self.owner.passes[self.index][-1]
        if not tokens:
            return
        sides = [keys_at(cache, tokens).float() for cache in (self.reference, self.shadow)]
        if self.owner.rotation is not None:
            places = [start + i for i in range(q.shape[1])]
            sides = [turned(k, tokens, self.owner.rotation) for k in sides]
            q = turned(q, places, self.owner.rotation)
        moved = []
        for row in range(q.shape[0]):
            for head in range(q.shape[2]):
                queries = q[row, :: self.owner.stride, head].float()
                best = [
                    (queries @ k[row, :, head * HEADS // q.shape[2]].T).argmax(1) for k in sides
                ]
                moved.append(best[0] != best[1])
        self.owner.passes[self.index].pop()
        self.owner.passes[self.index].append((start, torch.stack(moved).view(*q.shape[:3:2], -1)))


def turned(x: torch.Tensor, tokens: Sequence[int], rotation: Rotation) -> torch.Tensor:
    """Pairs of channels of x [B, N, H, D] as complex numbers, turned token by token."""
    angles = torch.cat([rotation(token, token + 1) for token in tokens], 1).double()
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    pairs = pairs * torch.complex(*angles)[:, None]
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype).float().bfloat16().float()


def packed_tokens(layer: LayerCache) -> list[int]:
    packed = {
        token
        for segment in layer.status().segments
        if segment.keys == "packed"
        for token in range(segment.start, segment.end)
    }
    return [token for low, high in layer.spans() for token in range(low, high) if token in packed]


def keys_at(layer: LayerCache, tokens: Sequence[int]) -> torch.Tensor:
    attended = [token for low, high in layer.spans() for token in range(low, high)]
    place = {token: index for index, token in enumerate(attended)}
    return layer.read()[0][:, [place[token] for token in tokens]]
