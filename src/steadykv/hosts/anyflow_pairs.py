"""What stands for AnyFlow-FAR's cache tensors, and the passes that fill and read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steadykv.errors import HostError, PositionError
from steadykv.hosts.adapter import Session
from steadykv.hosts.rebuilt import RebuiltLayer

__all__ = ["TITLE", "Passes", "StoredPair"]

TITLE = "AnyFlow-FAR"
# Entry of a layer's dictionary -> branch.
ENTRIES = {"compressed_cache": "compressed", "full_cache": "full"}


class StoredPair:
    """Stands for a tensor [2, B, H, S, D] of keys and values that is indexed [0|1, :, :, :n, :].

    lengths: of the chunks in tokens, as the pass that runs stores them; `Passes` changes it.
    """

    def __init__(self, side: RebuiltLayer, shape: torch.Size, lengths: list[int]) -> None:
        self.side, self.shape, self.lengths = side, shape, lengths
        self.dtype, self.device = side.layer.geometry.dtype, side.layer.geometry.device
        self._keys: Tensor | None = None

    @torch.compiler.disable
    def __getitem__(self, key: Any) -> Tensor:
        which, tokens = self._parts(key)
        if not tokens:
            shape = (*self.shape[1:3], 0, self.shape[4])
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.side.layer.read_tensor(("key", "value")[which], [(0, tokens)])

    @torch.compiler.disable
    def __setitem__(self, key: Any, value: Tensor) -> None:
        which, tokens = self._parts(key)
        if value.shape[2] != tokens or (which == 1 and self._keys is None):
            raise PositionError(
                f"layer {self.side.layer.layer}: {value.shape[2]} tokens of "
                f"{('keys', 'values')[which]} written to :{tokens}: expected keys and then values, "
                "as long as the slice"
            )
        keys, self._keys = self._keys, value if which == 0 else None
        if keys is not None:
            self.store(keys, value)

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Hold these [B, H, n, D] and nothing else; equal chunks at the front keep their bytes."""
        tokens = keys.shape[2]
        lengths = self.lengths if sum(self.lengths) == tokens else [tokens]
        self.side.replace(keys.to(self.dtype), values.to(self.dtype), lengths, observed=True)

    def _parts(self, key: Any) -> tuple[int, int]:
        """Keys or values, and how many tokens."""
        if isinstance(key, tuple) and len(key) == 5 and key[0] in (0, 1):
            which, *others, channels = key
            tokens = others.pop()
            if [*others, channels] == [slice(None)] * 3 and tokens == slice(None, tokens.stop):
                return which, self.shape[3] if tokens.stop is None else int(tokens.stop)
        raise HostError(f"{TITLE}: got index {key!r}: expected [0 or 1, :, :, :n, :]")

    def __repr__(self) -> str:
        return f"StoredPair({tuple(self.shape)}, {self.side.layer.held()})"


class Passes:
    """Which chunks a pass stores, in which cache, and whose queries count."""

    def __init__(self, session: Session, transformer: Any) -> None:
        self.session, self.config, self.blocks = session, transformer.config, transformer.blocks
        self.sides: dict[str, list[RebuiltLayer]] = {branch: [] for branch in ENTRIES.values()}
        self.lengths: dict[str, list[int]] = {}
        self.reads_cache = False

    def before(self, call: dict[str, Any]) -> None:
        """Take over a new `kv_cache`, empty one that begins again, note the chunks it holds."""
        kv_cache, flag = call.get("kv_cache"), call.get("kv_cache_flag") or {}
        if kv_cache is None:
            return
        stores, count = bool(flag.get("is_cache_step")), int(flag.get("num_cached_chunks", 0))
        first = kv_cache[0]["full_cache"]
        is_new = isinstance(first, Tensor)
        if is_new:
            self.lengths = {branch: [] for branch in ENTRIES.values()}
        elif first.side not in self.sides["full"]:
            raise HostError(
                f"{TITLE}: got a kv_cache of an earlier video or block: expected the newest one; "
                "start a video with new tensors"
            )
        elif count == 0:
            self._start_over()
        height, width = call["hidden_states"].shape[-2:]
        patches = {"compressed": self.config.compressed_patch_size, "full": self.config.patch_size}
        frame = {branch: (height // p[1]) * (width // p[2]) for branch, p in patches.items()}
        chunks = list(call["chunk_partition"])
        self._note(chunks if stores else chunks[:count], frame)
        if is_new:
            self._take_over(kv_cache, frame, is_filled=count > 0 and not stores)
        self.reads_cache = not stores

    def after(self) -> None:
        """The pass is over, or failed."""
        self.reads_cache = False

    def show(self, number: int, queries: Tensor) -> None:
        """Queries [B, S, H, D] of a layer: of denoising passes, as only those read the caches."""
        if self.reads_cache:
            for sides in self.sides.values():
                sides[number].layer.observe_queries(queries.transpose(1, 2))

    def _start_over(self) -> None:
        """A video that begins in the dictionaries of one before it."""
        for sides in self.sides.values():
            for side in sides:
                if side.layer.progress.end:
                    side.reset()

    def _note(self, chunks: list[int], frame: dict[str, int]) -> None:
        """The tokens of these chunks, oldest first, as they are spread over the two caches."""
        old = max(0, len(chunks) - self.config.full_chunk_limit + 1)
        for branch, part in (("compressed", chunks[:old]), ("full", chunks[old:])):
            self.lengths[branch][:] = [frames * frame[branch] for frames in part]

    def _take_over(self, kv_cache: Any, frame: dict[str, int], is_filled: bool) -> None:
        """Put steadykv's caches in the place of the tensors, which are not written."""
        whole = self.session.options.get("pieces") == "whole"
        for name, branch in ENTRIES.items():
            like, attention = kv_cache[0][name], self.blocks[0].attn1
            cache = self.session.build(
                branch,
                layers=len(self.blocks),
                heads=attention.heads,
                head_dim=attention.inner_dim // attention.heads,
                frame_tokens=max(1, frame[branch]),
                dtype=like.dtype,
                device=like.device,
                layout="BHSD",
                span_chunks=1,
                recent_keep=0,  # the newest span may be the only one
            )
            self.sides[branch] = [RebuiltLayer(layer) for layer in cache]
            # Full chunks move up with every pass, so that none of them could keep its bytes.
            lengths = [] if whole or branch == "full" else self.lengths[branch]
            for number, side in enumerate(self.sides[branch]):
                tensor = kv_cache[number][name]
                kv_cache[number][name] = pair = StoredPair(side, tensor.shape, lengths)
                held = sum(self.lengths[branch]) if is_filled else 0
                if held:
                    pair.store(tensor[0, :, :, :held], tensor[1, :, :, :held])
