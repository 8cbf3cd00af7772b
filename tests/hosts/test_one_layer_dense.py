"""While one layer is read, no other layer's decoded window is alive: on every host."""

from __future__ import annotations

import weakref

import pytest
import torch

import steadykv as skv
from tests.hosts.cases import CASES
from tests.hosts.checks import small_config

# These are measured by their own tests alone: two read both tensors by another method, and the
# runner of the third holds a layer's window until it has read the next one's.
OTHERS = {"longcat-video", "sana-wm-refiner", "lightx2v"}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHERS])
def test_no_other_layer_is_dense(name, monkeypatch):
    case = CASES[name]
    case.prepare(monkeypatch)
    alive: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    others, original = [], skv.LayerCache.read_tensor

    def read_tensor(layer, *args, **kwargs):
        found = original(layer, *args, **kwargs)
        alive[:] = [(number, ref) for number, ref in alive if ref() is not None]
        others.append({number for number, _ in alive} - {layer.layer})
        alive.append((layer.layer, weakref.ref(found)))
        return found

    monkeypatch.setattr(skv.LayerCache, "read_tensor", read_tensor)
    host = case.make()
    with skv.attach(host, config=small_config("rtn"), **case.options) as caches:
        case.run(host)
    assert len(caches)
    assert others
    assert not any(others)
