"""What the cache costs: bytes of the tensors that exist, and the highest they ever came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LayerLedger", "Ledger", "MemoryMeter"]

_BF16_BYTES = 2


class MemoryMeter:
    """Resident bytes now and the peak of resident bytes plus transients; host integers only.

    One meter serves all layers of a cache, so that the peak is that of the whole cache.
    """

    def __init__(self) -> None:
        self.resident = 0
        self.peak = 0

    def hold(self, nbytes: int) -> None:
        """Bytes that came to stay, or, negative, went."""
        self.resident += nbytes
        self.peak = max(self.peak, self.resident)

    def transient(self, nbytes: int) -> None:
        """Bytes that the cache allocates and releases within, or by, one call."""
        self.peak = max(self.peak, self.resident + nbytes)

    def restart_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.resident


@dataclass(frozen=True)
class LayerLedger:
    """One layer. `parts`: bytes by part; `packed_bits`: bits that its packed tokens take.

    packed_elements: key and value elements of the packed tokens.
    """

    layer: int
    parts: dict[str, int]
    packed_tokens: int
    dense_tokens: int
    attended_tokens: int
    packed_bits: int
    packed_elements: int
    attended_elements: int
    dense_element_bits: int

    @property
    def resident_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Ledger:
    """Bytes by layer and part, and what follows from them.

    parts: codes, scales, ids, centroids, basis, coefficients (payloads); waiting (committed BF16
        tokens that are still to be packed), dense (committed tokens that stay BF16 for good), open
        (the open chunk), query_moment, counters (of non-finite input, flags of payloads).
    resident_bytes: sum of the parts: all memory that the cache holds between two calls.
    peak_bytes: the most that resident bytes and the transients of one call ever came to. Transients
        are the dense view that a read returns, the result and scratch memory of attend, workspace
        and joined source of an encode, and temporaries of write, observe_queries and decode, each
        by a stated bound.
    bits_per_element: payload bits of the packed tokens over their elements, keys and values
        together; a side of them that stays dense counts with its dtype's bits (16). The dense bits
        where nothing is packed.
    compression: BF16 bytes of all attended tokens over resident bytes. A packed span that has
        partly left the window is paid for in full and credited in part. 1 for an empty cache.
    packed_tokens, dense_tokens: held tokens, summed over layers; one packed side makes a token
        packed. attended_tokens: held tokens that a read returns.
    """

    layers: tuple[LayerLedger, ...]
    peak_bytes: int

    @property
    def parts(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for layer in self.layers:
            for name, nbytes in layer.parts.items():
                total[name] = total.get(name, 0) + nbytes
        return total

    @property
    def resident_bytes(self) -> int:
        return sum(layer.resident_bytes for layer in self.layers)

    @property
    def packed_tokens(self) -> int:
        return sum(layer.packed_tokens for layer in self.layers)

    @property
    def dense_tokens(self) -> int:
        return sum(layer.dense_tokens for layer in self.layers)

    @property
    def attended_tokens(self) -> int:
        return sum(layer.attended_tokens for layer in self.layers)

    @property
    def bits_per_element(self) -> float:
        elements = sum(layer.packed_elements for layer in self.layers)
        if not elements:
            return float(max((layer.dense_element_bits for layer in self.layers), default=16))
        return sum(layer.packed_bits for layer in self.layers) / elements

    @property
    def compression(self) -> float:
        dense = sum(layer.attended_elements for layer in self.layers) * _BF16_BYTES
        return dense / self.resident_bytes if dense else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: the totals, the parts and one object per layer."""
        return {
            "resident_bytes": self.resident_bytes,
            "peak_bytes": self.peak_bytes,
            "bits_per_element": self.bits_per_element,
            "compression": self.compression,
            "packed_tokens": self.packed_tokens,
            "dense_tokens": self.dense_tokens,
            "attended_tokens": self.attended_tokens,
            "parts": self.parts,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        """A few lines for a terminal."""
        lines = [
            f"bits per element {self.bits_per_element:.3f}   compression {self.compression:.3f}x",
            f"resident {_mib(self.resident_bytes)}   peak {_mib(self.peak_bytes)}",
            f"tokens: {self.packed_tokens} packed, {self.dense_tokens} dense, "
            f"{self.attended_tokens} attended ({len(self.layers)} layers)",
        ]
        lines += [f"  {name:<13}{_mib(nbytes)}" for name, nbytes in _by_size(self.parts.items())]
        return "\n".join(lines)


def _by_size(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(parts, key=lambda item: (-item[1], item[0]))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:10.3f} MiB"
