"""The cache everybody writes first: concatenate, keep the last window.

The oracle for `bf16` and for the world model. Nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class PlainLayer:
    """Keys and values [B,S,H,D] of one layer.

    `window` counts tokens up to the end of the open chunk, the first `sink` ones included. It never
    moves back.
    """

    def __init__(self, window: int | None, dtype: torch.dtype, sink: int = 0):
        self.window, self.dtype, self.sink = window, dtype, sink
        self.first = 0
        self.kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.open: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        if self.open is not None and start != self.open[0]:
            self.commit()
        self.open = (start, k.detach().to(self.dtype).clone(), v.detach().to(self.dtype).clone())
        if self.window is not None:
            # what has left stays gone; the open chunk is there as a whole
            held = min(self.first, start)
            self.first = max(held, start + k.shape[1] - (self.window - self.sink))

    def observe_queries(self, q: torch.Tensor) -> None:
        pass

    def commit(self) -> None:
        if self.open is not None:
            self.kept.append(self.open)
            self.open = None

    def _visible(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for start, k, v in (*self.kept, *([self.open] if self.open is not None else [])):
            end = start + k.shape[1]
            cuts = ((start, min(self.sink, end)), (max(start, self.sink, self.first), end))
            if self.first <= self.sink:
                cuts = ((start, end),)
            for low, high in cuts:
                if low < high:
                    yield low, k[:, low - start : high - start], v[:, low - start : high - start]

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = list(self._visible())
        return torch.cat([k for _, k, _ in pieces], 1), torch.cat([v for _, _, v in pieces], 1)

    def spans(self) -> list[tuple[int, int]]:
        return [(start, start + k.shape[1]) for start, k, _ in self._visible()]

    def indices(self) -> list[int]:
        return [index for start, end in self.spans() for index in range(start, end)]


class PlainCache:
    def __init__(
        self,
        num_layers: int,
        window: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        sink: int = 0,
    ):
        self.layers = [PlainLayer(window, dtype, sink) for _ in range(num_layers)]

    def __getitem__(self, layer: int) -> PlainLayer:
        return self.layers[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def commit(self) -> None:
        for layer in self.layers:
            layer.commit()
