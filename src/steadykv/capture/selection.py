"""What of a run is kept."""

from __future__ import annotations

from dataclasses import dataclass

from steadykv.errors import ConfigError

__all__ = ["Selection"]


@dataclass(frozen=True)
class Selection:
    """Which layers, key/value heads and spans are kept, and how many later queries a span.

    layers, heads, spans: numbers from 0 on, ascending, none twice; None is all of them.
    queries: query tokens a span and layer, sampled from all passes in which the whole span is
    attended after it was complete. seed: of that sample.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    spans: tuple[int, ...] | None = None
    queries: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "spans"):
            chosen = getattr(self, name)
            if chosen is None:
                continue
            is_list = isinstance(chosen, tuple) and bool(chosen)
            if not is_list or any(type(n) is not int or n < 0 for n in chosen):
                raise ConfigError(
                    f"Selection.{name} is {chosen!r}: expected numbers from 0 on, or None for all"
                )
            if list(chosen) != sorted(set(chosen)):
                raise ConfigError(
                    f"Selection.{name} is {chosen}: expected ascending numbers, none twice"
                )
        for name in ("queries", "seed"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"Selection.{name} is {value!r}: expected 0 or more")

    def chosen(self, name: str, count: int) -> tuple[int, ...]:
        """The numbers of `layers`, `heads` or `spans` among `count`.

        Raises ConfigError for one that there is not.
        """
        given: tuple[int, ...] | None = getattr(self, name)
        if given is None:
            return tuple(range(count))
        if given[-1] >= count:
            raise ConfigError(
                f"{name}: got {given[-1]}, but there are {count}; expected 0 to {count - 1}"
            )
        return given
