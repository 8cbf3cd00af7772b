"""HY-WorldPlay (WAN 5B and HunyuanVideo-1.5 8B): a new list of keys and values for every chunk.

With `is_cache=True` the transformer runs over the frames that its memory selected, renumbered from
0, and returns a list of dicts: `k, v` [B, H, S, 2D] with the RoPE and PRoPE versions side by side,
or `k_vision, v_vision` [2B, H, S, D] beside `k_txt, v_txt`. The passes of the chunk read that list.
Written from a description of this calling contract alone: its licence (Tencent's community licence)
limits territory and use, so nothing of its code, and no tensor of its models, is here.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from steadykv.errors import ConfigError, HostError
from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.before_rope import STORE_KEYS, stores_before_rope
from steadykv.hosts.contract import describe, need, need_arguments, uncompiled
from steadykv.hosts.halves import HalvesObserver
from steadykv.hosts.hy_worldplay_lists import BRANCHES, TITLE, Rebuilds

__all__ = ["ADAPTERS"]

PAGE = "docs/hosts/hy-worldplay.md"


def transformer_of(host: Any) -> Any:
    """The transformer of a pipeline, or the host itself."""
    return uncompiled(getattr(host, "transformer", host))


def matches(host: Any) -> bool:
    """A transformer, or a pipeline with one, that is called with is_cache."""
    forward = getattr(transformer_of(host), "forward", None)
    try:
        return forward is not None and "is_cache" in inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return False


def check(host: Any) -> None:
    """The call's argument."""
    transformer = transformer_of(host)
    if not isinstance(transformer, nn.Module):
        raise HostError(
            f"{TITLE}: got {describe(host)}: expected a pipeline with a transformer, or that "
            "transformer itself (a torch.nn.Module)"
        )
    need_arguments(TITLE, need(TITLE, transformer, "forward"), "is_cache")


def install(session: Session, host: Any) -> None:
    """Wrap the transformer's call; show attention's queries to the layer that was read last."""
    for name, highest in (("frame_tokens", 1 << 30), ("branches", len(BRANCHES))):
        value = session.options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
            raise ConfigError(f"{name} is {value!r}: expected an integer from 1 to {highest}")
    if stores_before_rope(session) and not callable(session.options.get("rotation")):
        raise ConfigError(
            f"store_keys is 'before_rope' and rotation {session.options.get('rotation')!r}: "
            f"expected a function (x, start), as the host's own cannot be seen; {PAGE} has it"
        )
    transformer = transformer_of(host)
    parameters = [*inspect.signature(transformer.forward).parameters]
    tap = None
    if session.needs_queries:
        tap = HalvesObserver(session)
        tap.watch(transformer)
    rebuilds = Rebuilds(session, parameters, tap)
    session.patches.wrap(transformer, "forward", rebuilds.call)


ADAPTERS = (
    Adapter(
        name="hy-worldplay",
        title=TITLE,
        expects="a WorldPlay pipeline with its transformer, or the transformer",
        page=PAGE,
        matches=matches,
        check=check,
        install=install,
        options={
            "frame_tokens": "tokens of a latent frame: 880 (WAN 5B) or 1560 (8B) by default",
            **STORE_KEYS,
            "rotation": "function (x, start) that turns x [1, 1, S, D] as the host's RoPE does",
            "branches": "lists, rebuilt in turn; by default as many as rebuilds follow one another",
        },
        aliases=("hy-world-1.5", "hy-worldplay-wan-5b", "hy-worldplay-hv15-8b"),
    ),
)
