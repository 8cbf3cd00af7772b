"""Stores keys before their rotary embedding, of hosts that cache them after it.

Per-channel structure, which codecs live on, is lost when pairs of channels turn with the position.
The host's own function is asked what it does: what it was given is stored in place of what it
returned, and what it does to unit vectors is done to keys when they are read.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steadykv.cache.policy import TokenRange
from steadykv.errors import ConfigError, HostError
from steadykv.hosts.patches import Patches

if TYPE_CHECKING:
    from steadykv.hosts.adapter import Session

__all__ = ["STORE_KEYS", "HostRotation", "stores_before_rope"]

STORE_KEYS = {"store_keys": "'after_rope' (the default), as the host does, or 'before_rope'"}
"""The option of an adapter that can store keys before their rotary embedding."""


def stores_before_rope(session: Session) -> bool:
    """What the option says; where keys stay dense it changes nothing, and nothing is turned."""
    wanted = session.options.get("store_keys", "after_rope")
    if wanted not in ("after_rope", "before_rope"):
        raise ConfigError(f"store_keys is {wanted!r}: expected 'after_rope' or 'before_rope'")
    return wanted == "before_rope" and not session.config.keys.is_dense


class HostRotation:
    """A host's function `name(x, grid_sizes, freqs, start_frame)` in its module `owner`.

    x: [B, S, H, D] of whole frames, layout BSHD. grid_sizes: int [B, 3] or [3], frames, rows and
    columns.
    Pairs of neighbouring channels have to turn by an angle of their position alone, alike in every
    head and row; that is checked once, on the first keys.
    The turns of one read, FP32 [T, D], are kept, as all layers of a pass read the same tokens.
    """

    def __init__(self, patches: Patches, owner: Any, name: str, frame_tokens: int) -> None:
        self.frame_tokens = frame_tokens
        self._function: Callable[..., Tensor] = getattr(owner, name)
        self._recent: deque[tuple[weakref.ref[Tensor], Tensor]] = deque(maxlen=2)  # of q and of k
        self._grid: Tensor | None = None
        self._freqs: Any = None
        self._turns: tuple[tuple[TokenRange, ...], Tensor] | None = None
        self._is_checked = False
        patches.wrap(owner, name, self._tap)
        patches.on_undo(self._forget)

    def _tap(
        self, original: Callable[..., Tensor], x: Tensor, grid_sizes: Tensor, freqs: Any,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        turned = original(x, grid_sizes, freqs, *args, **kwargs)
        self._grid, self._freqs = grid_sizes, freqs
        self._recent.append((weakref.ref(turned), x))
        return turned

    def _forget(self) -> None:
        self._recent.clear()
        self._turns = self._grid = self._freqs = None

    def begin(self, frame_tokens: int) -> None:
        """A new video, whose frames may be of another size."""
        self._forget()
        self.frame_tokens, self._is_checked = frame_tokens, False

    def before(self, turned: Tensor) -> Tensor:
        """What the host's function was given when it returned exactly this tensor."""
        for found, source in reversed(self._recent):
            if found() is turned:
                return source
        raise HostError(
            f"keys or queries {tuple(turned.shape)} that are not what the host's rotary embedding "
            "returned: expected its result, uncopied; leave store_keys out to store keys after it"
        )

    def turn(self, keys: Tensor, ranges: Sequence[TokenRange]) -> Tensor:
        """Turn keys [B, T, H, D] of these tokens in place, frame by frame; returns them.

        Allocates FP32 copies of one frame, and once for equal ranges the turns.
        """
        turns = self._turns_of(tuple(ranges), keys)
        for first in range(0, keys.shape[1], self.frame_tokens):
            part = keys[:, first : first + self.frame_tokens]
            part.copy_(_turned(part, turns[first : first + self.frame_tokens]))
        return keys

    def check(self, turned: Tensor, start: int) -> None:
        """HostError unless the host's function turned these keys as `turn` would; waits once."""
        if self._is_checked:
            return
        source, end = self.before(turned), start + turned.shape[1]
        ours = _turned(source, self._turns_of(((start, end),), source))
        error = float((ours - turned.float()).norm() / turned.float().norm().clamp_min(1e-20))
        if not error < 0.02:  # the host's own rounding to BF16 is 0.002
            raise HostError(
                f"the host's rotary embedding is off by {error:.3f} from turns of neighbouring "
                "channels by the token's position: expected those; leave store_keys out"
            )
        self._is_checked = True

    def _turns_of(self, ranges: tuple[TokenRange, ...], like: Tensor) -> Tensor:
        if self._turns is None or self._turns[0] != ranges or self._turns[1].device != like.device:
            parts = [self._table(start, end, like) for start, end in ranges if end > start]
            self._turns = ranges, torch.cat(parts) if parts else like.new_empty(0, like.shape[3])
        return self._turns[1]

    def _table(self, start: int, end: int, like: Tensor) -> Tensor:
        """FP32 [end - start, D]: what becomes of (1, 0) in every pair of channels."""
        assert self._grid is not None  # a token is read after it was written
        first, last = start // self.frame_tokens, -(-end // self.frame_tokens)
        grid = (self._grid if self._grid.dim() == 1 else self._grid[:1]).clone()
        grid[..., 0] = last - first
        unit = torch.zeros(1, (last - first) * self.frame_tokens, 1, like.shape[3])
        unit[..., 0::2] = 1.0
        turned = self._function(unit.to(like.device), grid, self._freqs, start_frame=first)
        skipped = start - first * self.frame_tokens
        return turned[0, skipped : skipped + end - start, 0].float()


def _turned(keys: Tensor, turns: Tensor) -> Tensor:
    """FP32: pairs of channels of [B, S, H, D] times the complex numbers [S, D]."""
    numbers = torch.view_as_complex(keys.float().unflatten(-1, (-1, 2)))
    factors = torch.view_as_complex(turns.unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * factors[None, :, None]).flatten(-2)
