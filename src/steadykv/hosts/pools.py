"""One pool for the layers of a host that addresses its window by places, and moves it itself.

The calling contract is that of LightX2V's rolling pools: `store_kv(k, v, a, b, layer)` writes the
places [a, b), `k_cache(layer, a, b)` reads them, `roll_window` says that places behind the sink
were freed. A place is turned back into a token that never moves: nothing is copied or packed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.cache import KVCache, LayerCache
from steadykv.cache.policy import TokenRange
from steadykv.errors import HostError
from steadykv.hosts.before_rope import KeyTurns
from steadykv.hosts.seen_rotation import SeenRotation

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["LayerPool"]


class LayerPool:
    """All layers, [S, H, D] each, for one denoising step or for all of them.

    num_layers, cache_size (tokens of the window), num_heads, head_dim, dtype, device: as for the
    host's pools. steps: how many caches of their own; `current_step` says which one is meant.
    chunk_frames: frames that are stored at a time. local_frames: of the window, or -1 for none.
    sink_frames: never freed. seen: the host's rotary embedding, where keys are to be stored before
    it.
    """

    def __init__(
        self,
        session: Session,
        *,
        num_layers: int,
        cache_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        chunk_frames: int,
        local_frames: int,
        sink_frames: int,
        steps: int | None = None,
        seen: SeenRotation | None = None,
    ) -> None:
        self.num_layers, self.cache_size = num_layers, cache_size
        self.dtype, self.device = dtype, torch.device(device)
        self.num_steps, self.current_step = steps or 1, 0
        self._session, self._has_steps = session, steps is not None
        self._sizes = (num_heads, head_dim)
        self._frames = (chunk_frames, local_frames, sink_frames)
        self._caches: list[KVCache] = []
        self._seen, self._turns = seen, list[KeyTurns]()
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new video begins."""
        for cache in self._caches:
            cache.reset()
        each = [[0] * self.num_layers for _ in range(self.num_steps)]
        self._freed = [list(row) for row in each]  # tokens behind the sink that places skip
        self._global = [list(row) for row in each]
        self._local = [list(row) for row in each]

    def _init_kv_buffer(self) -> None:
        """Where the host's pools allocate; ours does at the first chunk."""
        self.reset()

    # --- what the host asks and says ----------------------------------------------------------

    def get_global_end(self, layer_id: int) -> int:
        return self._global[self._row][layer_id]

    def get_local_end(self, layer_id: int) -> int:
        return self._local[self._row][layer_id]

    def set_ends(self, layer_id: int, global_end: int, local_end: int) -> None:
        self._global[self._row][layer_id] = global_end
        self._local[self._row][layer_id] = local_end

    def roll_window(self, layer_id: int, sink_tokens: int, num_evicted: int) -> None:
        """Places from the sink on move to the left; HostError for another sink than was set."""
        layer = self._layer(layer_id)
        if sink_tokens != layer.policy.sink_tokens:
            raise HostError(
                f"layer {layer_id}: a window rolled behind {sink_tokens} tokens: expected "
                f"{layer.policy.sink_tokens}, which is what ar_config.sink_size says"
            )
        self._freed[self._row][layer_id] += num_evicted

    def store_kv(self, k: Tensor, v: Tensor, start_idx: int, end_idx: int, layer_id: int) -> None:
        """Write k, v [S, H, D] to the places [start_idx, end_idx)."""
        if not self._caches:
            self._build(end_idx - start_idx)
        layer, start, k = self._layer(layer_id), self._token(start_idx, layer_id), k[None]
        if self._turns:
            k = self._turns[self._row].stored(layer, k, start)
        layer.write(k, v[None], start)

    def k_cache(
        self, layer_id: int, attn_start: int | None = None, local_end: int | None = None
    ) -> Tensor:
        """Keys [S, H, D] of the places [attn_start, local_end), fresh memory."""
        layer, ranges = self._layer(layer_id), self._ranges(layer_id, attn_start, local_end)
        keys, turns = layer.read_tensor("key", ranges), None
        if self._turns:
            turns = self._turns[self._row]
            turns.turn(keys, ranges)
        keys = keys[0]
        self._session.readers.gave(keys, layer, turns)
        return keys

    def v_cache(
        self, layer_id: int, attn_start: int | None = None, local_end: int | None = None
    ) -> Tensor:
        """Values [S, H, D] of the places [attn_start, local_end), fresh memory."""
        ranges = self._ranges(layer_id, attn_start, local_end)
        return self._layer(layer_id).read_tensor("value", ranges)[0]

    # Offloading, which is refused before: the host calls these only where it is on.

    def prefetch_initial(self, layer_ids: Any) -> None:
        """Nothing is fetched."""

    def begin_layer(self, layer_id: int) -> None:
        """Nothing is fetched."""

    def end_layer(self, layer_id: int, next_prefetch: int | None = None) -> None:
        """Nothing is fetched."""

    def sync_all(self) -> None:
        """Nothing is on its way."""

    # --- steps --------------------------------------------------------------------------------

    def _build(self, chunk_tokens: int) -> None:
        chunk_frames, local_frames, sink_frames = self._frames
        frame = chunk_tokens // chunk_frames
        for step in range(self.num_steps):
            branch = f"step {step}" if self._has_steps else "main"
            self._caches.append(
                self._session.build(
                    branch,
                    layers=self.num_layers,
                    heads=self._sizes[0],
                    head_dim=self._sizes[1],
                    frame_tokens=frame,
                    dtype=self.dtype,
                    device=self.device,
                    window_frames=None if local_frames == -1 else self.cache_size // frame,
                    sink_frames=0 if local_frames == -1 else sink_frames,
                )
            )
            if self._seen is not None:
                self._turns.append(KeyTurns.of(self._session, branch, self._seen, frame))

    @property
    def _row(self) -> int:
        """The denoising step that is meant; a host may count them where it has one cache, too."""
        return self.current_step if self._has_steps else 0

    def _layer(self, layer_id: int) -> LayerCache:
        if not self._caches:
            raise HostError(f"layer {layer_id}: read before the first chunk: expected store_kv")
        return self._caches[self._row][layer_id]

    def _token(self, place: int, layer_id: int) -> int:
        """The token that stands at a place behind the sink."""
        return place + self._freed[self._row][layer_id]

    def _ranges(self, layer_id: int, start: int | None, end: int | None) -> list[TokenRange]:
        first = 0 if start is None else start
        last = self.get_local_end(layer_id) if end is None else end
        sink = self._layer(layer_id).policy.sink_tokens
        front = (first, min(sink, last))
        back = (self._token(max(first, sink), layer_id), self._token(last, layer_id))
        return [(a, b) for a, b in (front, back) if b > a]
