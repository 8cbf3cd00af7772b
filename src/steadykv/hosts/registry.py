"""The adapters there are, and which of them a host is meant for."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from steadykv.errors import ConfigError, HostError
from steadykv.hosts.adapter import Adapter
from steadykv.hosts.contract import describe

__all__ = ["adapter_named", "adapters", "find"]

# One module each, with an ADAPTERS tuple. The order is that of the documentation.
_MODULES = (
    "self_forcing",
    "causal_forcing_rolling",
    "matrix_game_2",
    "lingbot",
    "fastvideo",
    "longlive2",
    "longcat",
    "hy_worldplay",
    "anyflow_far",
    "sana_wm_refiner",
    "flashdreams",
    "sglang",
    "lightx2v",
)  # fmt: skip


@cache
def adapters() -> tuple[Adapter, ...]:
    """All adapters."""
    modules = (import_module(f"steadykv.hosts.{name}") for name in _MODULES)
    return tuple(adapter for module in modules for adapter in module.ADAPTERS)


def adapter_named(name: str) -> Adapter:
    """The adapter of that name or alias; else ConfigError."""
    if not isinstance(name, str):
        raise ConfigError(f"adapter is {name!r}: expected a name, such as 'self-forcing'")
    wanted = _plain(name)
    for adapter in adapters():
        if wanted in {_plain(known) for known in (adapter.name, *adapter.aliases)}:
            return adapter
    known_names = ", ".join(adapter.name for adapter in adapters())
    raise ConfigError(f"adapter is {name!r}: expected one of {known_names}")


def find(host: Any) -> Adapter:
    """The one adapter that `host` is meant for; else HostError."""
    found = [adapter for adapter in adapters() if adapter.matches(host)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(repr(adapter.name) for adapter in found)
        raise HostError(
            f"host is a {describe(host)}, which {len(found)} adapters know: expected a choice; "
            f"pass adapter={names}"
        )
    known = "; ".join(f"{adapter.name}: {adapter.expects}" for adapter in adapters())
    raise HostError(
        f"host is a {describe(host)}, which no adapter knows: expected one of ({known}); or use "
        "steadykv.KVCache in the host's attention"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
