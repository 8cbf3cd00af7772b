"""What an adapter is, and what it builds caches with while it is attached."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from steadykv.cache import KVCache
from steadykv.codecs import Calibration
from steadykv.config import METHODS, CacheConfig, CachePolicy
from steadykv.errors import ConfigError
from steadykv.hosts.attached import AttachedCaches
from steadykv.hosts.patches import Patches
from steadykv.hosts.queries import Readers

__all__ = ["Adapter", "Session"]


@dataclass(frozen=True)
class Adapter:
    """One host family.

    name: how `attach(host, adapter=name)` asks for it. aliases: the same, as people write it.
    title: for messages. expects: one line, what the host object has to be. page: its page in docs.
    matches: whether an object is meant by it, by the names of its attributes alone.
    check: raises HostError where the object is not as the adapter knows it; changes nothing.
    install: makes the host use steadykv's caches, by `session.patches` alone.
    options: keyword arguments of `attach` that it reads, and what they mean.
    """

    name: str
    title: str
    expects: str
    page: str
    matches: Callable[[Any], bool]
    check: Callable[[Any], None]
    install: Callable[[Session, Any], None]
    aliases: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)


@dataclass
class Session:
    """One attachment: the configuration, the changes to undo, the caches that were built.

    options: the keyword arguments of `attach` that the adapter declared.
    """

    adapter: Adapter
    config: CacheConfig
    options: dict[str, Any]
    calibration: Calibration | None = None
    debug: bool = False
    patches: Patches = field(default_factory=Patches)
    caches: AttachedCaches = field(default_factory=AttachedCaches)
    readers: Readers = field(default_factory=Readers)

    def build(
        self,
        branch: str,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        frame_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: str = "BSHD",
        window_frames: int | None = None,
        sink_frames: int = 0,
        **changes: Any,
    ) -> KVCache:
        """A cache for a guidance branch; it takes the place of the one with that name before.

        window_frames, sink_frames: what the host attends to, in the policy's words. A policy of the
        user's that says something else is a ConfigError. changes: of the configuration, such as
        dim_splits, set wherever a codec reads them.
        """
        config = self.config
        for name, value in (("window_frames", window_frames), ("sink_frames", sink_frames)):
            asked = getattr(config.policy, name)
            if asked and asked != value:
                raise ConfigError(
                    f"{name} is {asked} in {config.name!r}: expected {value}, which is what "
                    f"{self.adapter.title} attends to; leave it out, the adapter sets it"
                )
        config = config.replace(window_frames=window_frames, sink_frames=sink_frames)
        read = {f for codec in (config.keys, config.values) for f in METHODS[codec.method]}
        read |= {f.name for f in fields(CachePolicy)}
        if not (config.keys.is_dense and config.values.is_dense):
            config = config.replace(**{name: changes[name] for name in changes if name in read})
        cache = KVCache(
            layers,
            heads,
            head_dim,
            frame_tokens,
            config,
            layout=layout,
            dtype=dtype,
            device=device,
            debug=self.debug,
            calibration=self.calibration,
            meter=self.caches.meter,
        )
        self.caches.add(branch, cache)
        return cache

    @property
    def needs_queries(self) -> bool:
        """Whether the codecs get better with queries, so that they are worth observing."""
        return self.config.needs_queries

    def warn(self, message: str) -> None:
        """Say something once; it is kept in `AttachedCaches.notes` too."""
        text = f"{self.adapter.title}: {message}"
        if text not in self.caches.notes:
            self.caches.notes.append(text)
            warnings.warn(text, stacklevel=4)

    def without_queries(self, why: str) -> None:
        """The one warning of a host that offers no place to see queries."""
        if self.needs_queries:
            self.warn(
                f"queries cannot be observed ({why}): {self.config.name} weighs all key errors "
                "alike (w = 1), as qvg does"
            )
