"""A cache object with the calling contract of SGLang's: one call writes a chunk and reads.

`SGLangCache` stands in for `CausalSelfAttentionKVCache` and for the packed
`QVGPackedCausalKVCache` of sglang 0.5.23 (Apache-2.0), so that an engine can build it in their
place. It needs nothing of SGLang.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from steadykv.cache import LayerCache
from steadykv.config import CacheConfig, parse_method
from steadykv.errors import HostError
from steadykv.hosts.before_rope import KeyTurns
from steadykv.hosts.queries import Readers
from steadykv.hosts.sglang_chunks import all_heads, check_chunk, given_heads

__all__ = ["KVView", "SGLangCache"]


@dataclass(slots=True)
class KVView:
    """What attention sees: k, v [B, T, H, D]; the chunk's place in it as the dense cache has it."""

    k: Tensor
    v: Tensor
    local_start_index: int
    local_end_index: int
    visible_local_end: int
    visible_global_end: int


class SGLangCache:
    """One layer's cache: of all tokens the first `sink_tokens`, then the newest.

    Both together are `attention_window_size` tokens, by default `cache_size`. These arguments,
    batch_size, num_heads, head_dim, dtype, device, the two indices and use_int_indices are those of
    SGLang's classes. config: in place of its quantization arguments a preset's name, or a
    CacheConfig, whose window is set here. layer: number of this layer. frame_tokens: of one frame,
    for policies that count frames. store: a `LayerCache` with this geometry and window, instead.
    readers: told which layer gave which keys. warn: told once of queries that did not come. turns:
    of the host's rotary embedding, where keys are to be stored before it.
    A chunk is committed by the first write behind it. Heads that no call fills stay zero, as in the
    dense cache: under tensor parallelism a rank fills its own ones only.
    Raises ConfigError for sizes that make no cache.
    """

    global_sink_tokens = 0
    allow_growth = False

    def __init__(
        self,
        *,
        batch_size: int,
        cache_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        global_end_index: Tensor | None = None,
        local_end_index: Tensor | None = None,
        use_int_indices: bool = False,
        sink_tokens: int = 0,
        attention_window_size: int | None = None,
        config: CacheConfig | str = "quantwm",
        layer: int = 0,
        frame_tokens: int | None = None,
        store: LayerCache | None = None,
        readers: Readers | None = None,
        warn: Callable[[str], None] = warnings.warn,
        turns: KeyTurns | None = None,
    ) -> None:
        self.batch_size, self.cache_size = batch_size, cache_size
        self.sink_tokens = sink_tokens
        self.attention_window_size = attention_window_size or cache_size
        window = self.attention_window_size
        if store is None:
            frame = gcd(frame_tokens or window, window, sink_tokens)
            chosen = parse_method(config) if isinstance(config, str) else config
            chosen = chosen.replace(window_frames=window // frame, sink_frames=sink_tokens // frame)
            store = LayerCache(
                num_heads, head_dim, frame, chosen, layer=layer, dtype=dtype, device=device
            )
        self.layer = store
        self._readers, self._warn, self._turns = readers, warn, turns
        self._was_observed, self._was_warned = False, store.stats is None
        place = store.geometry.device
        self.global_end_index, self.local_end_index = (
            torch.zeros(1, dtype=torch.long, device=place) if index is None else index
            for index in (global_end_index, local_end_index)
        )
        self.global_end_index_int: int | None = 0 if use_int_indices else None
        self.local_end_index_int: int | None = 0 if use_int_indices else None

    @property
    def num_cache_heads(self) -> int:
        return self.layer.geometry.heads

    @property
    def num_heads(self) -> int:
        return self.layer.geometry.heads

    @property
    def head_dim(self) -> int:
        return self.layer.geometry.head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.geometry.dtype

    @property
    def device(self) -> torch.device:
        return self.layer.geometry.device

    def resident_nbytes(self) -> int:
        """Bytes that this layer keeps."""
        return self.layer.nbytes

    def can_direct_current_attention(self, num_new_tokens: int) -> bool:
        """Whether a chunk of this length is all that is ever seen, so that the host skips us."""
        sizes = {self.cache_size, self.attention_window_size}
        return self.sink_tokens == 0 and sizes == {num_new_tokens}

    def pin_current_chunk(self, current_num_tokens: int) -> None:
        """Raises HostError, as SGLang's own packed cache does."""
        raise HostError(
            f"SGLang: pin_current_chunk({current_num_tokens}): a packed cache keeps no pinned "
            "chunk; expected the dense cache for models with scene cuts"
        )

    def reset_pinned_sink(self) -> None:
        """Nothing is ever pinned."""

    def reset_indices(self) -> None:
        """Forget everything: a new prompt begins."""
        self.layer.reset()
        self._set_ends(0)

    @torch.compiler.disable
    def update_and_get_attention_kv(
        self,
        *,
        key: Tensor,
        value: Tensor,
        current_chunk_start: int,
        cache_head_start: int | None = None,
        recent_window_tokens: int | None = None,
        debug_name: str = "causal KV cache",
    ) -> KVView:
        """Write key, value [B, S, H, D] at a token, and return what this chunk attends to.

        current_chunk_start: that of the newest chunk writes it again, its end appends one.
        cache_head_start: the first of the heads that key and value carry, where they are not all;
        the view then has these heads. recent_window_tokens: see only the sink, so many tokens
        before the chunk, and the chunk; the window stays as long as it is.
        The view is fresh memory. Raises HostError for another start, or another length of the
        same chunk, as SGLang's packed cache does; ShapeError or ValueError for what means nothing.
        """
        if recent_window_tokens is not None and recent_window_tokens < 0:
            raise ValueError(
                f"{debug_name}: recent_window_tokens is {recent_window_tokens}: expected 0 or more"
            )
        tokens = key.shape[1]
        check_chunk(self.layer, current_chunk_start, tokens, debug_name)
        heads = given_heads(self.layer, key, cache_head_start, debug_name)
        if self._turns is not None:
            key = self._turns.stored(self.layer, key, current_chunk_start)
        if heads is None:
            self._store(key, value, current_chunk_start)
        else:
            whole = all_heads(self.layer, key, value, current_chunk_start, heads[0])
            self._store(*whole, current_chunk_start)
        end = current_chunk_start + tokens
        self._set_ends(end)
        k, v = self._visible(current_chunk_start, recent_window_tokens)
        if heads is not None:
            k, v = (x.narrow(2, *heads) for x in (k, v))
        elif self._readers is not None:
            self._readers.gave(k, self.layer, self._turns)
        local = min(end, self.cache_size)
        return KVView(k, v, local - tokens, local, local, end)

    @torch.compiler.disable
    def observe_queries(self, q: Tensor) -> None:
        """The queries of this pass, [B, S, n·H, D] after RoPE; behind the update of the pass.

        Without them query-aware presets weigh all key errors alike; one warning says so.
        """
        self._was_observed = True
        self.layer.observe_queries(q if self._turns is None else self._turns.before(q))

    # --- steps ------------------------------------------------------------------------------

    def _store(self, key: Tensor, value: Tensor, start: int) -> None:
        before = self.layer.progress.open
        self.layer.write(key, value, start)
        is_next = before is not None and before[0] != start
        if is_next and not self._was_warned and not self._is_observed():
            self._was_warned = True
            self._warn(
                f"observe_queries was not called for the first chunk: {self.layer.config.name} "
                "weighs all key errors alike (w = 1), as qvg does"
            )

    def _is_observed(self) -> bool:
        stats = self.layer.stats
        return self._was_observed or (stats is not None and stats.nbytes > 0)

    def _visible(self, start: int, recent: int | None) -> tuple[Tensor, Tensor]:
        ranges = self.layer.spans()
        if recent is not None:
            progress = self.layer.progress
            sink = min(self.sink_tokens, progress.newest)
            first = max(sink, start - recent, progress.window_start)
            ranges = [(0, sink), (first, progress.newest)]
        k, v = (self.layer.read_tensor(name, ranges) for name in ("key", "value"))
        if self._turns is not None:
            self._turns.turn(k, ranges)
        return k, v

    def _set_ends(self, end: int) -> None:
        """Both forms of both indices: hosts read either one."""
        local = min(end, self.cache_size)
        if self.global_end_index_int is not None:
            self.global_end_index_int, self.local_end_index_int = end, local
        self.global_end_index.fill_(end)
        self.local_end_index.fill_(local)
