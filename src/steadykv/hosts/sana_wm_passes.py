"""The passes of the SANA-WM refiner: which cache object they use, and whose queries count."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from steadykv.errors import HostError
from steadykv.hosts.adapter import Session
from steadykv.hosts.sana_wm_layers import TITLE, StoredLayer, Window
from steadykv.hosts.seen_rotation import SeenRotation

__all__ = ["Passes"]


class Passes:
    """Follows the calls of a transformer."""

    def __init__(self, session: Session, transformer: Any) -> None:
        self.session, self.blocks = session, transformer.transformer_blocks
        self.patch, self.patch_t = transformer.config.patch_size, transformer.config.patch_size_t
        self.frame_tokens = 0
        self.seen: SeenRotation | None = None
        self.mode: str | None = None
        self.newest: Window | None = None
        self.window: Window | None = None  # of the pass that runs
        self.reading: int | None = None

    def frame(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Every pass is told its positions by this method: it knows the size of a frame."""
        call = inspect.signature(original).bind(*args, **kwargs).arguments
        height, width = call["height"] // self.patch, call["width"] // self.patch
        self.frame_tokens = max(1, height * width // self.patch_t)
        return original(*args, **kwargs)

    def before(self, call: dict[str, Any]) -> None:
        """Take over a new cache object, before anything is stored in it."""
        cache, self.mode, self.reading = call.get("kv_cache"), call.get("kv_cache_mode"), None
        if cache is None:
            return
        if not isinstance(cache.layer_caches[0], StoredLayer):
            tokens = self.frame_tokens or call["hidden_states"].shape[1]
            heads = self.blocks[0].attn1.heads
            self.newest = Window(self.session, self, len(self.blocks), heads, tokens)
            for number, plain in enumerate(cache.layer_caches):
                cache.layer_caches[number] = StoredLayer(self.newest, number, plain)
        self.window = cache.layer_caches[0].window
        if self.window is not self.newest:
            raise HostError(
                f"{TITLE}: got a kv_cache of an earlier video or block: expected the newest one; "
                "start a video with a new cache object"
            )

    def after(self) -> None:
        """The pass is over, or failed."""
        self.mode = self.window = self.reading = None

    def show(self, number: int, queries: Tensor) -> None:
        """Queries [B, S, H, D] before their embedding: the sink is packed with its pass's own.

        The history's are those of the passes that read it, where its keys are stored before it too.
        """
        if self.window is None:
            return
        if self.mode == "capture_pre_rope":
            self.window.observe("sink", number, queries)
        elif self.mode is not None and self.seen is not None:
            self.window.observe("history", number, queries)

    def attention(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Show the queries of a layer that has just read its history, after their embedding."""
        reading, self.reading = self.reading, None
        if reading is not None and self.mode is not None and self.window is not None:
            self.window.observe("history", reading, args[0] if args else kwargs["query"])
        return original(*args, **kwargs)
