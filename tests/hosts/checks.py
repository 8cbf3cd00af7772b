"""What the tests of all adapters share: is a host untouched, what was packed, what was alive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import steadykv as skv
from steadykv.cache import KVCache
from steadykv.config import METHODS, CacheConfig
from tests.cache_cases import Allocations

QUANTIZING = ["qvg", "quantwm", "steady"]


def small_config(method: str, **changes: Any) -> CacheConfig:
    """The preset, scaled down to heads of 16 channels or more and spans of a few dozen tokens."""
    config = skv.preset(method)
    fields = {"group_size": 16, "centroids": 4, "rank": 4, "candidates": 2}
    read = {f for codec in (config.keys, config.values) for f in METHODS[codec.method]}
    own = {name: value for name, value in fields.items() if name in read}
    return config.replace(**{**own, **changes})


def state_of(*owners: Any) -> dict[str, Any]:
    """Every attribute of the objects' own dictionaries, modules below them and their hooks."""
    found: dict[str, Any] = {}
    for number, owner in enumerate(owners):
        below = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
        for path, module in below:
            for name, value in vars(module).items():
                label = f"{number}.{path}.{name}"
                found[label] = dict(value) if isinstance(value, dict) else value
    return found


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Attribute by attribute the same objects; a dictionary holds the same ones."""
    assert list(before) == list(after)
    for label, value in before.items():
        other = after[label]
        if isinstance(value, dict):
            assert list(value) == list(other), label
            assert all(other[key] is item for key, item in value.items()), label
        else:
            assert other is value, label


def assert_equal(got: Any, wanted: Any) -> None:
    """Tensors, or nested lists and tuples of them, bit by bit."""
    if isinstance(wanted, Tensor):
        assert got.shape == wanted.shape
        assert torch.equal(got, wanted)
        return
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert_equal(a, b)


def assert_packed_once(cache: KVCache) -> None:
    """Every committed span of the last run was encoded once, and what is packed stays so."""
    for layer in cache:
        status = layer.status()
        end = layer.progress.end
        assert status.encoded_tokens == end - status.dropped_dense_tokens
        assert status.packed_tokens > 0


def assert_ledger_is_real(caches: skv.AttachedCaches) -> None:
    """The ledger's bytes are those of the storages that the layers keep alive."""
    storages: dict[int, int] = {}
    for cache in caches:
        for layer in cache:
            for tensor in tensors_of(layer):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    assert caches.ledger().resident_bytes == caches.nbytes
    # A layer's counters are one number each; everything else is counted byte by byte.
    turns = sum(turns.nbytes for turns in caches.turns.values())
    assert caches.nbytes == sum(storages.values()) + turns


def tensors_of(layer: Any) -> list[Tensor]:
    """Every tensor that a layer keeps."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = [layer.keys, layer.values, layer.stats, layer.calibration, layer.nonfinite_count]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or thing is None:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[id(thing)] = thing
        elif isinstance(thing, dict):
            todo += list(thing.values())
        elif isinstance(thing, list | tuple):
            todo += list(thing)
        elif hasattr(thing, "__dict__"):
            todo += list(vars(thing).values())
    return list(found.values())


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that tensors made inside `run` ever took."""
    gc.collect()
    with Allocations() as allocations:
        run()
    return allocations.peak


def notes_of(caches: skv.AttachedCaches) -> list[str]:
    """What was warned of, but for the size of small hosts' caches: statistics outweigh them."""
    return [note for note in caches.notes if "more memory than in BF16" not in note]
