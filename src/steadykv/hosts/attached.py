"""What `attach` hands out: the caches of a host, by guidance branch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from steadykv.cache import KVCache, Ledger
from steadykv.cache.ledger import MemoryMeter

if TYPE_CHECKING:
    from steadykv.hosts.before_rope import KeyTurns
    from steadykv.hosts.given_rotation import GivenRotation

__all__ = ["AttachedCaches"]


class AttachedCaches:
    """The caches of one host. They appear when the host makes its own, and stay readable later.

        with skv.attach(pipeline, preset="quantwm") as caches:
            video = pipeline(...)
        print(caches.ledger())

    branches: by name, "main" where there is only one. notes: what was warned of. turns: by branch,
    what its keys are turned with when they are read, where they are stored before that.
    """

    def __init__(self) -> None:
        self.meter = MemoryMeter()
        self.branches: dict[str, KVCache] = {}
        self.turns: dict[str, KeyTurns | GivenRotation] = {}
        self.notes: list[str] = []

    def add(self, branch: str, cache: KVCache) -> None:
        """Take a cache in; the one of that name before is forgotten."""
        before = self.branches.pop(branch, None)
        if before is not None:
            for layer in before:
                layer.reset()  # frees the tokens even if the host still holds its old list
            self.meter.hold(-before.nbytes)
        if branch in self.turns:
            self.turns.pop(branch).reset()
        self.branches[branch] = cache

    def __getitem__(self, branch: str) -> KVCache:
        try:
            return self.branches[branch]
        except KeyError:
            known = ", ".join(map(repr, self.branches)) or "none yet: the host has not run"
            raise KeyError(f"no branch {branch!r}: expected one of {known}") from None

    def __iter__(self) -> Iterator[KVCache]:
        return iter(self.branches.values())

    def __len__(self) -> int:
        return len(self.branches)

    def __repr__(self) -> str:
        return f"AttachedCaches({', '.join(f'{k}: {v!r}' for k, v in self.branches.items())})"

    @property
    def nbytes(self) -> int:
        """Bytes held now, of all branches."""
        return sum(cache.nbytes for cache in self) + sum(t.nbytes for t in self.turns.values())

    def ledger(self) -> Ledger:
        """Bytes by layer and part of all branches; layers count on from branch to branch.

        The part "turns", of the first layer of a branch, serves all of its layers.
        """
        layers = []
        for branch, cache in self.branches.items():
            found = [layer.ledger() for layer in cache]
            if branch in self.turns:
                parts = {**found[0].parts, "turns": self.turns[branch].nbytes}
                found[0] = replace(found[0], parts=parts)
            layers += found
        return Ledger(tuple(layers), self.meter.peak)

    def commit(self) -> None:
        """Commit the open chunk everywhere, as after the last chunk of a video."""
        for cache in self:
            cache.commit()

    def reset(self) -> None:
        """Forget all tokens and statistics."""
        for cache in self:
            cache.reset()
        for turns in self.turns.values():
            turns.reset()
        self.meter.restart_peak()

    @property
    def encoded_tokens(self) -> int:
        """Tokens encoded since the last reset, each counted in every layer and branch."""
        return sum(layer.encoded_tokens for cache in self for layer in cache)
