"""The cache everybody writes first: concatenate, keep the last window.

The oracle for `bf16` and for the world model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class PlainLayer:
    """Keys and values [B,S,H,D] of one layer.

    `window` counts tokens up to the end of the open chunk.
    """

    def __init__(self, window: int | None, dtype: torch.dtype):
        self.window, self.dtype = window, dtype
        self.kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.open: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        self.open = (start, k.detach().to(self.dtype).clone(), v.detach().to(self.dtype).clone())

    def observe_queries(self, q: torch.Tensor) -> None:
        pass

    def commit(self) -> None:
        if self.open is not None:
            self.kept.append(self.open)
            self.open = None

    def _visible(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        pieces = [*self.kept, *([self.open] if self.open is not None else [])]
        end = pieces[-1][0] + pieces[-1][1].shape[1]
        first = 0 if self.window is None else max(0, end - self.window)
        for start, k, v in pieces:
            cut = min(max(0, first - start), k.shape[1])
            if cut < k.shape[1]:
                yield start + cut, k[:, cut:], v[:, cut:]

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = list(self._visible())
        return torch.cat([k for _, k, _ in pieces], 1), torch.cat([v for _, _, v in pieces], 1)

    def spans(self) -> list[tuple[int, int]]:
        return [(start, start + k.shape[1]) for start, k, _ in self._visible()]


class PlainCache:
    def __init__(
        self, num_layers: int, window: int | None = None, dtype: torch.dtype = torch.bfloat16
    ):
        self.layers = [PlainLayer(window, dtype) for _ in range(num_layers)]

    def __getitem__(self, layer: int) -> PlainLayer:
        return self.layers[layer]

    def commit(self) -> None:
        for layer in self.layers:
            layer.commit()
