"""The cache: takes keys and values by chunks, packs what is complete, reads what is attended."""

from steadykv.cache.layer import LayerCache
from steadykv.cache.ledger import LayerLedger, Ledger
from steadykv.cache.model import KVCache
from steadykv.cache.policy import SpanPolicy
from steadykv.cache.status import LayerStatus, SegmentStatus

__all__ = [
    "KVCache",
    "LayerCache",
    "LayerLedger",
    "LayerStatus",
    "Ledger",
    "SegmentStatus",
    "SpanPolicy",
]
