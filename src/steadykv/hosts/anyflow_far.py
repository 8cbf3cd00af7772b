"""AnyFlow-FAR in diffusers: two tensors a layer, written anew by every cache pass.

A cache pass encodes all latents so far, the newest chunks in full and older ones by larger patches;
denoising passes read what it stored. The caller makes the tensors and hands them to every call, so
they are replaced in its dictionaries at the first one. Keys are stored before their rotary
embedding. Written for the calling contract of diffusers 0.42.1 (Apache-2.0).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from steadykv.errors import ConfigError, HostError, PositionError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.contract import need, need_arguments
from steadykv.hosts.rebuilt import RebuiltLayer

__all__ = ["ADAPTERS"]

TITLE = "AnyFlow-FAR"
# Entry of a layer's dictionary -> branch.
ENTRIES = {"compressed_cache": "compressed", "full_cache": "full"}
PIECES = ("chunks", "whole")


class StoredPair:
    """Stands for a tensor [2, B, H, S, D] of keys and values that is indexed [0|1, :, :, :n, :].

    lengths: of the chunks in tokens, as the pass that runs stores them; shared with `Passes`.
    """

    def __init__(self, side: RebuiltLayer, shape: torch.Size, lengths: list[int]) -> None:
        self.side, self.shape, self.lengths = side, shape, lengths
        self.dtype, self.device = side.layer.geometry.dtype, side.layer.geometry.device
        self._keys: Tensor | None = None

    def __getitem__(self, key: Any) -> Tensor:
        which, tokens = self._parts(key)
        if not tokens:
            shape = (*self.shape[1:3], 0, self.shape[4])
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.side.layer.read_tensor(("key", "value")[which], [(0, tokens)])

    def __setitem__(self, key: Any, value: Tensor) -> None:
        which, tokens = self._parts(key)
        if value.shape[2] != tokens or (which == 1) != (self._keys is not None):
            raise PositionError(
                f"layer {self.side.layer.layer}: {value.shape[2]} tokens of "
                f"{('keys', 'values')[which]} written to :{tokens}: expected keys and then values, "
                "as long as the slice"
            )
        if which == 0:
            self._keys = value
            return
        keys, self._keys = self._keys, None
        assert keys is not None
        self.store(keys, value)

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Hold these [B, H, n, D] and nothing else; equal chunks at the front keep their bytes."""
        tokens = keys.shape[2]
        lengths = self.lengths if sum(self.lengths) == tokens else [tokens]
        self.side.replace(keys.to(self.dtype), values.to(self.dtype), lengths, observed=True)

    def _parts(self, key: Any) -> tuple[int, int]:
        """Keys or values, and how many tokens."""
        if isinstance(key, tuple) and len(key) == 5 and key[0] in (0, 1):
            which, batch, heads, tokens, channels = key
            if (
                batch
                == heads
                == channels
                == slice(None)
                == slice(getattr(tokens, "start", 0), None)
            ):
                return which, self.shape[3] if tokens.stop is None else int(tokens.stop)
        raise HostError(f"{TITLE}: index {key!r}: expected [0 or 1, :, :, :n, :]")

    def __repr__(self) -> str:
        return f"StoredPair({tuple(self.shape)}, {self.side.layer.held()})"


class Passes:
    """Follows the calls of a transformer: which chunks a pass stores, whose queries count."""

    def __init__(self, session: Session, transformer: Any) -> None:
        self.session, self.config, self.blocks = session, transformer.config, transformer.blocks
        self.arguments = inspect.signature(transformer.forward)
        self.sides: dict[str, list[RebuiltLayer]] = {branch: [] for branch in ENTRIES.values()}
        self.lengths: dict[str, list[int]] = {}
        self.reads_cache = False

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take over a new `kv_cache`, empty one that begins again, note the chunks it holds."""
        call = self.arguments.bind_partial(*args, **kwargs).arguments
        kv_cache, flag = call.get("kv_cache"), call.get("kv_cache_flag") or {}
        if kv_cache is None:
            return
        partition, count = list(call["chunk_partition"]), flag.get("num_cached_chunks", 0)
        first = kv_cache[0]["full_cache"]
        is_new = isinstance(first, Tensor)
        if is_new:
            self.lengths = {branch: [] for branch in ENTRIES.values()}
        elif all(first.side is not side for side in self.sides["full"][:1]):
            raise HostError(
                f"{TITLE}: got a kv_cache of another video or block, whose tokens may be gone: "
                "expected the newest one, or a new one"
            )
        elif count == 0:
            self._start_over()
        height, width = call["hidden_states"].shape[-2:]
        sizes = {"compressed": self.config.compressed_patch_size, "full": self.config.patch_size}
        tokens = {name: (height // p[1]) * (width // p[2]) for name, p in sizes.items()}
        stores = bool(flag.get("is_cache_step"))
        self._note(partition if stores else partition[:count], tokens)
        if is_new:
            self._take_over(kv_cache, tokens, is_filled=count > 0)
        self.reads_cache = not stores

    def _start_over(self) -> None:
        """A video that begins in the dictionaries of one before it."""
        for sides in self.sides.values():
            for side in sides:
                if side.layer.progress.end:
                    side.reset()

    def after(self, *_: Any) -> None:
        """The pass is over, or failed."""
        self.reads_cache = False

    def watch(self, number: int, norm: nn.Module, heads: int) -> Any:
        """Show the queries of denoising passes to both caches; `norm` gives them unrotated."""

        def show(_module: nn.Module, _args: Any, out: Tensor) -> None:
            if self.reads_cache:
                queries = out.unflatten(2, (heads, -1)).transpose(1, 2)
                for sides in self.sides.values():
                    sides[number].layer.observe_queries(queries)

        return norm.register_forward_hook(show)

    def _note(self, chunks: list[int], tokens: dict[str, int]) -> None:
        """The tokens of these chunks, oldest first, as they are spread over the two caches."""
        old = max(0, len(chunks) - self.config.full_chunk_limit + 1)
        for branch, part in (("compressed", chunks[:old]), ("full", chunks[old:])):
            self.lengths[branch][:] = [frames * tokens[branch] for frames in part]

    def _take_over(self, kv_cache: Any, tokens: dict[str, int], is_filled: bool) -> None:
        """Put steadykv's caches in the place of the tensors, which are not written."""
        whole = self.session.options.get("pieces", "chunks") == "whole"
        for name, branch in ENTRIES.items():
            like, attention = kv_cache[0][name], self.blocks[0].attn1
            cache = self.session.build(
                branch,
                layers=len(self.blocks),
                heads=attention.heads,
                head_dim=attention.inner_dim // attention.heads,
                frame_tokens=max(1, tokens[branch]),
                dtype=like.dtype,
                device=like.device,
                layout="BHSD",
                span_chunks=1,
            )
            self.sides[branch] = [RebuiltLayer(layer) for layer in cache]
            # The full chunks move up with every pass, so that none of them could keep its bytes.
            lengths = [] if whole or branch == "full" else self.lengths[branch]
            for number, side in enumerate(self.sides[branch]):
                tensor = kv_cache[number][name]
                pair = StoredPair(side, tensor.shape, lengths)
                if is_filled and (held := sum(self.lengths[branch])):
                    pair.store(tensor[0, :, :, :held], tensor[1, :, :, :held])
                kv_cache[number][name] = pair


def transformer_of(host: Any) -> Any:
    """The transformer, also of a pipeline."""
    return host.transformer if "encode_kv_cache" in dir(host) else host


def matches(host: Any) -> bool:
    """A transformer with the patches for old chunks, or a pipeline that has one."""
    return {"far_patch_embedding", "build_attention_mask"} <= set(dir(transformer_of(host)))


def check(host: Any) -> None:
    """The forward's arguments, the configuration, the attention of the blocks."""
    transformer = transformer_of(host)
    names = ("hidden_states", "chunk_partition", "kv_cache", "kv_cache_flag")
    need_arguments(TITLE, transformer.forward, *names)
    need(TITLE, transformer, "config.full_chunk_limit", int)
    for name in ("patch_size", "compressed_patch_size"):
        need(TITLE, transformer, f"config.{name}", (tuple, list))
    for name, kind in (("heads", int), ("inner_dim", int), ("norm_q", nn.Module)):
        need(TITLE, transformer, f"blocks.0.attn1.{name}", kind)


def install(session: Session, host: Any) -> None:
    """Hooks before and after the forward, and on the queries where a codec reads them."""
    pieces = session.options.get("pieces", "chunks")
    if pieces not in PIECES:
        raise ConfigError(f"pieces is {pieces!r}: expected {' or '.join(map(repr, PIECES))}")
    transformer = transformer_of(host)
    passes = Passes(session, transformer)
    # Before everything else, as offloading hooks copy the dictionaries that they are given.
    hooks = [
        transformer.register_forward_pre_hook(passes.before, prepend=True, with_kwargs=True),
        transformer.register_forward_hook(passes.after, always_call=True),
    ]
    if session.needs_queries:
        for number, block in enumerate(transformer.blocks):
            hooks.append(passes.watch(number, block.attn1.norm_q, block.attn1.heads))
    for hook in hooks:
        session.patches.on_undo(hook.remove)


ADAPTERS = (
    Adapter(
        name="anyflow-far",
        title=TITLE,
        expects="a diffusers AnyFlowFARTransformer3DModel, or an AnyFlowFARPipeline",
        page="docs/hosts/anyflow-far.md",
        matches=matches,
        check=check,
        install=install,
        options={
            "pieces": "'chunks' (the default): old chunks are packed once; 'whole': all together, "
            "in fewer bits, after every chunk"
        },
        aliases=("anyflow",),
    ),
)
