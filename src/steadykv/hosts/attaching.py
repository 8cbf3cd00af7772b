"""`attach`: a host runs with steadykv's caches inside a block, and is untouched outside it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from steadykv.codecs import Calibration
from steadykv.config import CacheConfig, parse_method
from steadykv.errors import ConfigError, HostError
from steadykv.hosts.adapter import Session
from steadykv.hosts.attached import AttachedCaches
from steadykv.hosts.contract import describe
from steadykv.hosts.registry import adapter_named, find

__all__ = ["attach"]

_attached: weakref.WeakValueDictionary[int, AttachedCaches] = weakref.WeakValueDictionary()


@contextmanager
def attach(
    host: Any,
    preset: str = "quantwm",
    *,
    config: CacheConfig | None = None,
    adapter: str | None = None,
    calibration: Calibration | None = None,
    debug: bool = False,
    **options: Any,
) -> Iterator[AttachedCaches]:
    """Let a model keep its key/value cache in steadykv while the block runs.

        with skv.attach(pipeline, preset="quantwm") as caches:
            video = pipeline.inference(...)
        print(caches.ledger())

    host: what the adapter's page in docs/hosts names: the pipeline, or the model itself.
    preset: a preset's name, or a method such as "quantwm:bf16" (keys:values). config: instead of a
    preset. adapter: its name, where several know the host. calibration: for codecs that ask for
    one. debug: see `KVCache`. options: of the adapter, listed on its page.

    Nothing of the host is edited but attributes of its objects, which are put back at the end of
    the block, also after an exception. The caches stay readable after it.
    Raises HostError for a host that no adapter knows, that differs from what its adapter expects
    or that is attached already, and ConfigError for an unknown preset or option: each before
    anything is changed.
    """
    chosen = find(host) if adapter is None else adapter_named(adapter)
    if not chosen.matches(host):
        raise HostError(f"{chosen.title}: got a {describe(host)}: expected {chosen.expects}")
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        known = ", ".join(sorted(chosen.options)) or "none"
        raise ConfigError(
            f"attach got {', '.join(unknown)}: expected options of {chosen.name} ({known})"
        )
    wanted = parse_method(preset) if config is None else config
    if not isinstance(wanted, CacheConfig):
        raise ConfigError(f"config is {config!r}: expected a CacheConfig, or a preset's name")
    if id(host) in _attached:
        raise HostError(
            f"host {describe(host)} is attached already: expected one block at a time; leave the "
            "first one before attaching again"
        )
    chosen.check(host)
    session = Session(chosen, wanted, options, calibration, debug)
    try:
        chosen.install(session, host)
        _attached[id(host)] = session.caches
        yield session.caches
    finally:
        _attached.pop(id(host), None)
        session.patches.undo()
