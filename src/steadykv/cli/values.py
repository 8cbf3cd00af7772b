"""Option values that need reading: lists of numbers, sizes in bytes, counts."""

from __future__ import annotations

import re

from steadykv.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)(b?)|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_MOST = 100_000


def number_list(text: str | None, option: str) -> tuple[int, ...] | None:
    """ "0,2,5-7" as ascending numbers; None and "all" are None. Raises ConfigError."""
    if text is None or text.strip() == "all":
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= _MOST:
            raise ConfigError(
                f"{option}: got {text!r}, expected numbers and ranges such as 0,2,5-7, or all"
            )
        numbers |= set(range(first, last + 1))
    return tuple(sorted(numbers))


def walk_numbers(first: int, count: int) -> int | list[int]:
    """`count` walks from number `first` on, as `load_episodes` takes them."""
    return list(range(first, first + count)) if first else count


def byte_size(text: str, option: str) -> int:
    """ "512MiB", "2G" (powers of 1024), "1.5GB" (of 1000) or plain bytes. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option}: got {text!r}, expected a size such as 800MB, 2GiB or 1000000")
    unit, binary, byte = match[2], match[3], match[4]
    base = 1000 if byte and not binary else 1024
    return int(float(match[1]) * base ** _POWERS.get((unit or "").lower(), 0))


def count(text: str | None, option: str) -> float | None:
    """ "14B" (billions), "900M" or a plain number. Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([mb])?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{option}: got {text!r}, expected a number such as 14B, 900M or 1.3e9")
    return float(match[1]) * {"": 1.0, "m": 1e6, "b": 1e9}[(match[2] or "").lower()]
