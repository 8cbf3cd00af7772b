"""The SANA-WM refiner in diffusers: an object per layer that keeps a sink and a history.

The pipeline fills the sink once, and appends to the history by getting it, concatenating and
storing the longer one; then it stores the end of what it gets. The sink's keys are stored before
their rotary embedding, those of the history after it: two caches, as codecs see other statistics.
Written for the calling contract of diffusers 0.42.1 (Apache-2.0).
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.before_rope import STORE_KEYS, KeyTurns, SeenRotation, stores_before_rope
from steadykv.hosts.contract import module_of, need, need_arguments, need_function
from steadykv.hosts.passes import follow_calls, watch_queries
from steadykv.hosts.rebuilt import RebuiltLayer

__all__ = ["ADAPTERS"]

TITLE = "SANA-WM refiner"
ATTENTION = "dispatch_attention_fn"
EMBEDDINGS = ("apply_interleaved_rotary_emb", "apply_split_rotary_emb")
Pair = tuple[Tensor, Tensor]


class StoredLayer:
    """Takes the place of a layer's object; what it does not keep itself, `plain` keeps."""

    def __init__(self, window: Window, number: int, plain: Any) -> None:
        self.window, self.number, self.plain = window, number, plain
        for get, store in (("get_sink", "store_sink"), ("get_history", "store_history")):
            held = getattr(plain, get)()
            if held is not None and store == "store_history" and window.passes.seen is not None:
                raise HostError(
                    f"{TITLE}: got a video that began before the block, whose history is turned: "
                    "expected a new cache object; leave store_keys out to go on with it"
                )
            if held is not None:  # the host began before the block
                getattr(self, store)(*held)
        plain.store_sink(None, None)
        plain.store_history(None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @torch.compiler.disable
    def store_sink(self, k: Tensor, v: Tensor) -> None:
        """Hold keys before their rotary embedding and values, each [B, S, H·D]."""
        side, k, v = self.window.side("sink", self.number, k, v)
        side.replace(k, v, observed=True)

    @torch.compiler.disable
    def get_sink(self) -> Pair | None:
        """What `store_sink` was given, or None."""
        return self.window.read("sink", self.number)

    @torch.compiler.disable
    def store_history(self, k: Tensor, v: Tensor) -> None:
        """Hold keys after their rotary embedding and values, each [B, S, H·D].

        What `get_history` gave is recognised with tokens behind it, and without its first ones.
        """
        side, k, v = self.window.side("history", self.number, k, v)
        if not trimmed(side, k, v):
            side.extend(k, v, observed=True)

    @torch.compiler.disable
    def store_captured_post_rope(self, k: Tensor, v: Tensor) -> None:
        """Keep what the pipeline will append: keys that were turned just now."""
        self.window.learn(self.number, k, v)
        self.plain.store_captured_post_rope(k, v)

    @torch.compiler.disable
    def get_history(self) -> Pair | None:
        """What `store_history` was given, or None."""
        return self.window.read("history", self.number)

    def clear(self) -> None:
        """Forget everything."""
        self.plain.clear()
        self.window.clear(self.number)


class Window:
    """The two caches of one cache object of the host, built at their first tensor."""

    def __init__(
        self, session: Session, passes: Passes, layers: int, heads: int, tokens: int
    ) -> None:
        self.session, self.passes = session, passes
        self.layers, self.heads, self.frame_tokens = layers, heads, tokens
        self.sides: dict[str, list[RebuiltLayer]] = {}

    def side(self, branch: str, number: int, *given: Tensor) -> tuple[Any, ...]:
        """One layer of a branch, and what is given, [B, S, H·D], by heads in its dtype."""
        if branch not in self.sides:
            # The sink is one span, which has no earlier queries and no later neighbour.
            own = {"first_span": "own", "recent_keep": 0} if branch == "sink" else {}
            cache = self.session.build(
                branch,
                layers=self.layers,
                heads=self.heads,
                head_dim=given[0].shape[2] // self.heads,
                frame_tokens=self.frame_tokens,
                dtype=given[0].dtype,
                device=given[0].device,
                span_chunks=1,
                **own,  # type: ignore[arg-type]  # names of the configuration's
            )
            turns = None
            if branch == "history" and self.passes.seen is not None:
                seen, tokens = self.passes.seen, self.frame_tokens
                turns = KeyTurns.of(self.session, branch, seen, tokens)
            self.sides[branch] = [RebuiltLayer(layer, turns) for layer in cache]
        side = self.sides[branch][number]
        dtype = side.layer.geometry.dtype
        return side, *(x.unflatten(2, (self.heads, -1)).to(dtype) for x in given)

    def read(self, branch: str, number: int) -> Pair | None:
        """Everything a layer holds, dense [B, S, H·D] in fresh memory; None where it is empty."""
        self.passes.reading = number
        if branch not in self.sides or not self.sides[branch][number].layer.spans():
            return None
        side = self.sides[branch][number]
        # Only what the pipeline asks for, between the passes, comes back to be stored.
        k, v = side.dense() if self.passes.mode else side.read()
        return k.flatten(2), v.flatten(2)

    def learn(self, number: int, k: Tensor, v: Tensor) -> None:
        """k, v [B, S, H·D] of this pass will be the newest tokens of the history."""
        if self.passes.seen is not None:
            side, k, _ = self.side("history", number, k, v)
            side.turns.learn(side.layer, k, side.layer.progress.newest)

    def observe(self, branch: str, number: int, queries: Tensor) -> None:
        """queries: [B, S, H, D]."""
        side, queries = self.side(branch, number, queries.flatten(2))
        side.layer.observe_queries(queries)

    def clear(self, number: int) -> None:
        for sides in self.sides.values():
            sides[number].reset()


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


def trimmed(side: RebuiltLayer, k: Tensor, v: Tensor) -> bool:
    """Whether these [B, S, H, D] are the newest tokens that are held; then only they stay.

    They are decoded once more: what the host read is not kept, and it may have changed its copy.
    """
    layer, tokens = side.layer, k.shape[1]
    held = sum(end - start for start, end in layer.spans())
    if not 0 < tokens <= held:
        return False
    same = [
        torch.equal(x[:, held - tokens :], y) for x, y in zip(side.dense(), (k, v), strict=True)
    ]
    if all(same):
        layer.evict(layer.progress.end - tokens)
    return all(same)


def transformer_of(host: Any) -> Any:
    """The transformer, also of the refiner's pipeline."""
    return host.transformer if "_capture_block_kv" in dir(host) else host


def matches(host: Any) -> bool:
    """A transformer that is told absolute positions, or the pipeline that has one."""
    names = {"transformer_blocks", "build_rotary_emb_for_absolute_positions"}
    return names <= set(dir(transformer_of(host)))


def check(host: Any) -> None:
    """The forward's arguments, the configuration, the attention of the blocks."""
    transformer = transformer_of(host)
    names = ("hidden_states", "kv_cache", "kv_cache_mode")
    need_arguments(TITLE, transformer.forward, *names)
    need_arguments(TITLE, transformer.build_rotary_emb_for_absolute_positions, "height", "width")
    for name in ("patch_size", "patch_size_t"):
        need(TITLE, transformer, f"config.{name}", int)
    need(TITLE, transformer, "transformer_blocks.0.attn1.heads", int)
    need(TITLE, transformer, "transformer_blocks.0.attn1.norm_q", nn.Module)
    processor = need(TITLE, transformer, "transformer_blocks.0.attn1.processor")
    need_function(TITLE, module_of(processor), ATTENTION)


def install(session: Session, host: Any) -> None:
    """Hooks around the forward, and on the queries where a codec reads them."""
    transformer = transformer_of(host)
    passes = Passes(session, transformer)
    session.patches.wrap(transformer, "build_rotary_emb_for_absolute_positions", passes.frame)
    follow_calls(session, transformer, passes.before, passes.after)
    layers = [block.attn1 for block in transformer.transformer_blocks]
    module = module_of(layers[0].processor)
    if stores_before_rope(session):
        passes.seen = SeenRotation(session, heads=layers[0].heads)
        passes.seen.watch_all(TITLE, module, EMBEDDINGS)
    for number, layer in enumerate(layers):
        watch_queries(session, layer.norm_q, layer.heads, partial(passes.show, number))
    if session.needs_queries and passes.seen is None:
        session.patches.wrap(module, ATTENTION, passes.attention)


ADAPTERS = (
    Adapter(
        name="sana-wm-refiner",
        title=TITLE,
        expects="a diffusers SanaWMLTX2RefinerTransformer3DModel, or a SanaWMLTX2Refiner pipeline",
        page="docs/hosts/sana-wm-refiner.md",
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
        aliases=("sana-wm",),
    ),
)
