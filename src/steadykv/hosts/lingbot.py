"""LingBot-World v1-fast and v2: Self-Forcing's dicts in lists that `generate` makes and forgets.

`_initialize_self_kv_cache` returns the list; it is called once for a video or a warm-up, and twice
(with and without the prompt) in the mode "causal_pretrain". Under Ulysses a process has the heads
`num_heads / sp_size`. Written for the calling contract that Quant-VideoGen 0601468 keeps in
experiments/LingBot and experiments/LingBot-v2; v1 is Apache-2.0, v2 CC BY-NC-SA 4.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.contract import need, need_arguments
from steadykv.hosts.dicts import OPTIONS, DictCaches, IndexedEntry, module_of_forward
from steadykv.hosts.passes import follow_calls

__all__ = ["ADAPTERS"]

TITLE = "LingBot-World"
INITIALIZER = "_initialize_self_kv_cache"
# What attention may call, the first that its file has: on one device, under Ulysses; v2, pretrain.
ATTENTION = ("attention", "flash_attention")
ROPE = ("causal_rope_apply", "rope_apply")
BRANCHES = {"causal_pretrain": ("positive", "negative")}  # by `infer_mode`, which v1 has not


class PendingList(list[Any]):
    """The list that the host carries to its model, which alone knows how long a frame is."""

    def __init__(self, layers: int, build: Callable[[int], list[IndexedEntry]]) -> None:
        super().__init__({} for _ in range(layers))
        self._build: Callable[[int], list[IndexedEntry]] | None = build

    def fill(self, frame_tokens: int) -> None:
        """Make the caches, once."""
        if self._build is not None:
            self[:], self._build = self._build(frame_tokens), None


def matches(host: Any) -> bool:
    """A pipeline whose initializer returns its list."""
    return {INITIALIZER, "_initialize_crossattn_cache", "model", "sp_size"} <= set(dir(host))


def check(host: Any) -> None:
    """The initializer, the sizes of the model and the functions that its attention calls."""
    need_arguments(TITLE, getattr(host, INITIALIZER), "num_layers", "shape", "dtype", "device")
    need_arguments(TITLE, need(TITLE, host, "model.forward"), "x", "kv_cache", "max_attention_size")
    need(TITLE, host, "generate")
    need(TITLE, host, "patch_size.2", int)
    attention = need(TITLE, host, "model.blocks.0.self_attn")
    for name in ("num_heads", "head_dim", "local_attn_size", "sink_size"):
        need(TITLE, attention, name, int)
    shards = need(TITLE, host, "sp_size", int)
    if shards < 1 or attention.num_heads % shards:
        raise HostError(
            f"{TITLE}: got sp_size {shards} for {attention.num_heads} heads: expected a divisor; "
            "each process keeps its share of the heads"
        )
    if getattr(host, "use_chunked_kv", False):
        raise HostError(
            f"{TITLE}: got use_chunked_kv=True, a cache that is quantized already: expected False; "
            "load the pipeline without it"
        )
    for names in (ATTENTION, ROPE):
        function_of(attention, names)


def function_of(attention: Any, names: Sequence[str]) -> str:
    """The first of these functions that the file of the attention's forward has."""
    module = module_of_forward(attention)
    for name in names:
        if callable(vars(module).get(name)):
            return name
    raise HostError(
        f"{TITLE}: got {module.__name__} without a function {' or '.join(map(repr, names))}: "
        "expected the one that its attention calls; this host differs from the one that the "
        "adapter knows, see docs/hosts"
    )


def install(session: Session, host: Any) -> None:
    """Return our lists, name them by their order in a video, and fill them at the model's door."""
    attention = host.model.blocks[0].self_attn
    function, rope = function_of(attention, ATTENTION), function_of(attention, ROPE)
    caches = DictCaches(session, attention, function=function, rope=rope)
    made: list[str] = []  # branches of this video so far

    def initialize(
        _original: Any, num_layers: int, shape: Sequence[int], dtype: torch.dtype, device: Any,
        frame_seqlen: int | None = None,
    ) -> PendingList:  # fmt: skip
        names = BRANCHES.get(getattr(host, "infer_mode", ""), ("main",))
        branch = names[len(made) % len(names)]
        made.append(branch)
        batch, tokens, heads, head_dim = shape

        def build(frame_tokens: int) -> list[IndexedEntry]:
            if tokens % frame_tokens or frame_seqlen not in (None, frame_tokens):
                raise HostError(
                    f"{TITLE}: got a cache of {tokens} tokens and frames of {frame_seqlen}: "
                    f"expected whole frames of {frame_tokens}, which the model was given"
                )
            slides = attention.local_attn_size != -1
            return caches.build(
                branch, batch, layers=num_layers, heads=heads, head_dim=head_dim,
                frame_tokens=frame_tokens, dtype=dtype, device=device,
                window_frames=tokens // frame_tokens if slides else None,
                sink_frames=attention.sink_size,
            )  # fmt: skip

        return PendingList(num_layers, build)

    def before(call: dict[str, Any]) -> None:
        entries = call.get("kv_cache")
        if isinstance(entries, PendingList):
            rows, columns = call["x"][0].shape[-2:]  # of latents [C, F, rows, columns]
            entries.fill(rows * columns // (host.patch_size[1] * host.patch_size[2]))

    def generate(original: Any, *args: Any, **kwargs: Any) -> Any:
        made.clear()
        return original(*args, **kwargs)

    session.patches.wrap(host, INITIALIZER, initialize)
    session.patches.wrap(host, "generate", generate)
    follow_calls(session, host.model, before)


ADAPTERS = (
    Adapter(
        name="lingbot-world",
        title=TITLE,
        expects="a WanI2VFast (v1) or WanI2VCausal (v2)",
        page="docs/hosts/lingbot.md",
        matches=matches,
        check=check,
        install=install,
        options=OPTIONS,
        aliases=(
            "lingbot",
            "lingbot-world-v1-fast",
            "lingbot-world-v2",
            "lingbot-v1",
            "lingbot-v2",
        ),
    ),
)
