"""HY-WorldPlay's lists of dicts, packed: every rebuild of a list replaces what it held before.

Written from a description of the calling contract alone, as `hy_worldplay.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadykv.cache import KVCache
from steadykv.errors import HostError
from steadykv.hosts.adapter import Session
from steadykv.hosts.before_rope import stores_before_rope
from steadykv.hosts.contract import describe
from steadykv.hosts.given_rotation import GivenRotation
from steadykv.hosts.halves import HalvesObserver
from steadykv.hosts.rebuilt import RebuiltLayer

__all__ = ["BRANCHES", "TITLE", "Rebuilds"]

TITLE = "HY-WorldPlay"
CHUNK = 4  # frames that the host denoises together; what is packed by itself
BRANCHES = ("main", "second")


@dataclass(frozen=True)
class Kind:
    """What is known of one of the two models.

    pair: names of the packed tensors. frame_tokens: of a latent frame at the model's resolution.
    has_halves: whether RoPE and PRoPE lie side by side. branches: lists; None is one or two.
    """

    pair: tuple[str, str]
    frame_tokens: int
    has_halves: bool
    branches: int | None


KINDS = (Kind(("k", "v"), 880, True, 1), Kind(("k_vision", "v_vision"), 1560, False, None))


class PackedEntry(MutableMapping[str, Any]):
    """One layer's dict: the packed pair is unpacked at each access, the rest is the host's own.

    number: of the rebuild that it belongs to; an entry of an older one cannot be read any more.
    """

    def __init__(self, branch: Branch, layer: int, pair: tuple[str, str], rest: dict[str, Any]):
        self._branch, self._layer, self._pair, self._rest = branch, layer, pair, rest
        self._number = branch.number

    @torch.compiler.disable
    def __getitem__(self, name: str) -> Any:
        if name not in self._pair:
            return self._rest[name]
        if self._number != self._branch.number:
            raise HostError(
                f"{TITLE}: layer {self._layer} of a list that was rebuilt since is read: expected "
                f"the newest one; for a host with a list per guidance branch pass branches=2"
            )
        return self._branch.read(self._layer, self._pair.index(name))

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        self._rest[name] = value

    def __delitem__(self, name: str) -> None:
        self._check(name)
        del self._rest[name]

    def __iter__(self) -> Iterator[str]:
        yield from (*self._pair, *self._rest)

    def __len__(self) -> int:
        return len(self._pair) + len(self._rest)

    def _check(self, name: str) -> None:
        if name in self._pair:
            raise HostError(
                f"{TITLE}: layer {self._layer}: {name!r} is changed in place: expected a new list "
                "from a call with is_cache=True"
            )


class Branch:
    """The cache of one list, which every rebuild replaces. number: of rebuilds."""

    def __init__(self, name: str, tap: HalvesObserver | None) -> None:
        self.name, self.tap = name, tap
        self.number = 0
        self.cache: KVCache | None = None
        self.sides: list[RebuiltLayer] = []
        self.rotation: GivenRotation | None = None

    def read(self, layer: int, which: int) -> Tensor:
        """Keys (0) or values (1) of a layer, dense, in fresh memory."""
        cache = self.sides[layer].layer
        found = cache.read_tensor(("key", "value")[which], cache.spans())
        if which == 0 and self.rotation is not None:
            self.rotation.keys(found)
        if which == 0 and self.tap is not None:
            self.tap.gave(found, cache, self.rotation)
        return found


class Rebuilds:
    """The wrapped transformer: takes returned lists in, one branch after the other."""

    def __init__(self, session: Session, parameters: list[str], tap: HalvesObserver | None) -> None:
        self.session, self.parameters, self.tap = session, parameters, tap
        self.branches = [Branch(name, tap) for name in BRANCHES]
        self.turn = 0  # rebuilds in a row, without any other pass; with `branches`: of all

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the transformer."""
        named = dict(zip(self.parameters, args, strict=False)) | kwargs
        if not named.get("is_cache"):
            self.turn = self.turn if "branches" in self.session.options else 0
            with nullcontext() if self.tap is None else self.tap:
                return original(*args, **kwargs)
        return self.take(original(*args, **kwargs))

    @torch.compiler.disable
    def take(self, entries: Any) -> Any:
        """Pack a list of dicts, layer by layer, freeing the dense tensors on the way."""
        is_list = isinstance(entries, list) and all(isinstance(e, MutableMapping) for e in entries)
        if not is_list or not entries:
            raise HostError(
                f"{TITLE}: a call with is_cache=True returned {describe(entries)}: expected a list "
                "of dicts, one per layer; this host differs from the one that the adapter knows"
            )
        kinds = (kind for kind in KINDS if isinstance(entries[0].get(kind.pair[0]), Tensor))
        kind = next(kinds, None)
        if kind is None:
            return entries  # no frames yet: k is None, or text alone
        pair = kind.pair
        count = self.session.options.get("branches", kind.branches) or len(self.branches)
        branch = self.branches[self.turn % count]
        self.turn += 1
        branch.number += 1
        for layer in range(len(entries)):
            entry = entries[layer]
            k, v = entry[pair[0]], entry[pair[1]]
            self.prepare(branch, k, len(entries), kind)
            tokens = k.shape[2]
            piece = CHUNK * self.frame_tokens(kind, tokens)
            lengths = [min(piece, tokens - start) for start in range(0, tokens, piece)]
            if branch.rotation is not None:
                k = branch.rotation.keys(k.clone(), back=True)
            branch.sides[layer].replace(k, v, lengths)
            rest = {name: value for name, value in entry.items() if name not in pair}
            entries[layer] = PackedEntry(branch, layer, pair, rest)
            del entry, k, v
        return entries

    def prepare(self, branch: Branch, k: Tensor, layers: int, kind: Kind) -> None:
        """A cache for keys like k [B, H, S, D]; a new one where anything but S is different."""
        known = branch.cache
        if known is not None and len(known) == layers:
            geometry, batch = known[0].geometry, branch.sides[0].layer.batch
            same = (geometry.heads, geometry.head_dim, geometry.dtype, geometry.device, batch)
            if same == (k.shape[1], k.shape[3], k.dtype, k.device, k.shape[0]):
                return
        half = k.shape[3] // 2
        changes: dict[str, Any] = {"dim_splits": (half, half)} if kind.has_halves else {}
        branch.cache = self.session.build(
            branch.name,
            layers=layers,
            heads=k.shape[1],
            head_dim=k.shape[3],
            frame_tokens=self.frame_tokens(kind, k.shape[2]),
            dtype=k.dtype,
            device=k.device,
            layout="BHSD",
            span_chunks=1,
            **changes,
        )
        branch.sides = [RebuiltLayer(layer) for layer in branch.cache]
        if stores_before_rope(self.session):
            function, meter = self.session.options["rotation"], self.session.caches.meter
            branch.rotation = GivenRotation(function, kind.has_halves, meter)
            self.session.caches.turns[branch.name] = branch.rotation

    def frame_tokens(self, kind: Kind, tokens: int) -> int:
        """Tokens of one frame, which the list does not tell."""
        size: int = self.session.options.get("frame_tokens", kind.frame_tokens)
        if tokens % size:
            raise HostError(
                f"{TITLE}: {tokens} tokens are cached: expected whole frames of {size}; pass "
                "frame_tokens= where the resolution is another one"
            )
        return size
