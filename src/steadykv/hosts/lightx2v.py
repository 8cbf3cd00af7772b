"""LightX2V: one pool for all layers, addressed by places in a window that the host itself moves.

A runner's `init_kv_cache_manager` builds a manager, and the manager the pool that its configuration
names. Ours is registered under a name of its own. Written for the calling contract of
ModelTC/LightX2V f8aee98 (Apache-2.0). Thin: what is not supported is refused, see the docs page.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import Tensor

from steadykv.errors import HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.before_rope import STORE_KEYS, stores_before_rope
from steadykv.hosts.contract import need, need_arguments
from steadykv.hosts.pools import LayerPool
from steadykv.hosts.seen_rotation import SeenRotation

__all__ = ["ADAPTERS"]

TITLE = "LightX2V"
SCHEME = "steadykv"
EMBEDDING = "causal_rope"
REGISTRY = "SELF_ATTN_KV_CACHE_REGISTRY"
# Settings of `ar_config` that choose or need another pool.
OTHERS = ("kv_quant", "kv_offload", "hybrid_attn", "ref_num_frames")


def matches(host: Any) -> bool:
    """A runner of an autoregressive model."""
    return {"init_kv_cache_manager", "config", "model"} <= set(dir(host))


def registry_of(host: Any) -> Any:
    """The module that pools are registered in, as the runner's own file knows it."""
    function = inspect.unwrap(host.init_kv_cache_manager)
    known = getattr(function, "__globals__", {})
    manager = known.get("KVCacheManager")
    module = sys.modules.get(getattr(manager, "__module__", ""))
    if module is None:
        raise HostError(
            f"{TITLE}: got {function.__qualname__} without KVCacheManager in its file: expected a "
            "runner that builds one; this host differs from the one that the adapter knows, see "
            "docs/hosts"
        )
    return module


def check(host: Any) -> None:
    """The registry, and settings that leave the choice of the pool to us."""
    settings = host.config.get("ar_config")
    if not isinstance(settings, dict):
        raise HostError(
            f"{TITLE}: got a config whose ar_config is {settings!r}: expected a dict; only "
            "autoregressive models keep a cache"
        )
    for name in OTHERS:
        if settings.get(name):
            raise HostError(
                f"{TITLE}: got ar_config.{name}={settings[name]!r}: expected it unset; this pool "
                "does not do that"
            )
    if getattr(getattr(host, "model", None), "seq_p_group", None) is not None:
        raise HostError(f"{TITLE}: got sequence parallelism: expected one GPU; set parallel to off")
    module = registry_of(host)
    need(TITLE, module, REGISTRY, dict)
    register = need(TITLE, module, "register_self_attn_kv_cache")
    need_arguments(TITLE, register, "step", "kwargs_builder")


def kernels(host: Any, name: str) -> list[Any]:
    """What computes this in the self-attention of the layers; none where no weights are loaded."""
    weights = getattr(host.model, "transformer_weights", None)
    phases = (block.compute_phases[0] for block in getattr(weights, "blocks", ()))
    found = (getattr(phase, name, None) for phase in phases)
    return list({id(kernel): kernel for kernel in found if hasattr(kernel, "apply")}.values())


def rotation_of(session: Session, host: Any) -> SeenRotation:
    """The rotary embedding of queries and keys, which a phase computes by an object of its own."""
    seen = SeenRotation(session)
    found = kernels(host, EMBEDDING)
    if not found:
        raise HostError(
            f"{TITLE}: got a model without {EMBEDDING} in its transformer_weights.blocks: expected "
            "loaded weights, whose self-attention has one; leave store_keys out"
        )
    for kernel in found:
        seen.watch(kernel, "apply", 2)
    return seen


def install(session: Session, host: Any) -> None:
    """Register our pool, and let the configuration name it."""
    settings = host.config["ar_config"]
    module = registry_of(host)
    frames = settings.get("num_frame_per_chunk", 3)
    local, sink = settings.get("local_attn_size", -1), int(settings.get("sink_size", 0))
    seen = rotation_of(session, host) if stores_before_rope(session) else None

    def pool(**sizes: Any) -> LayerPool:
        return LayerPool(
            session, chunk_frames=frames, local_frames=local, sink_frames=sink, seen=seen, **sizes
        )

    def steps(config: Any, ar_config: Any, _quant: Any) -> dict[str, Any]:
        return {"steps": int(config.get("infer_steps", ar_config.get("cache_step", 1)))}

    for step in (False, True):
        # The registry's own function writes over what stands here until the block ends.
        session.patches.set_item(getattr(module, REGISTRY), (SCHEME, step), None)
        builder = {"kwargs_builder": steps} if step else {}
        module.register_self_attn_kv_cache(SCHEME, pool, step=step, **builder)
    session.patches.set_item(settings, "kv_cache_scheme", SCHEME)

    def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
        q, k = (args[i] if len(args) > i else kwargs.get("qk"[i]) for i in range(2))
        if isinstance(q, Tensor):
            session.readers.show(q[None], k)
        return original(*args, **kwargs)

    found = kernels(host, "self_attn_1")
    if not found:
        session.without_queries("the runner's model has no loaded transformer_weights.blocks")
    elif session.needs_queries:
        for kernel in found:
            session.patches.wrap(kernel, "apply", attention)


ADAPTERS = (
    Adapter(
        name="lightx2v",
        title=TITLE,
        expects="a LightX2V runner with init_kv_cache_manager, its modules loaded",
        page="docs/hosts/lightx2v.md",
        matches=matches,
        check=check,
        install=install,
        options=STORE_KEYS,
    ),
)
