"""The choice of an implementation: order, refusals, explanations."""

from __future__ import annotations

from importlib import import_module
from threading import Thread

import pytest
import torch

from steadykv import ops
from steadykv.errors import BackendUnavailable
from steadykv.ops import dispatch

CODES = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
CPU = torch.device("cpu")


def test_automatic_choice_is_explained() -> None:
    rows = ops.explain("cpu")
    assert [row["op"] for row in rows] == list(ops.OPS)
    assert {row["backend"] for row in rows} == {"reference"}
    assert all(row["reason"] for row in rows)


def test_every_op_has_its_module_in_every_folder() -> None:
    for op in ops.OPS:
        contract, definition = (import_module(f"steadykv.{f}.{op}") for f in ("ops", "reference"))
        assert dispatch.resolve(op, CPU) is definition
        names = [name for name in contract.__all__ if name.islower() and name != "packed_length"]
        # Prepared calls, of which the reference has none: None is what its users then get.
        names = [name for name in names if not name.endswith("_decoder")]
        assert names
        for name in names:
            target = "gather_rows" if name == "gather_centroids" else name
            assert callable(getattr(definition, target))


@pytest.mark.parametrize("backend", ["cuda", "Reference", ""])
def test_an_explicit_backend_is_never_replaced(backend: str) -> None:
    with pytest.raises(BackendUnavailable, match="expected 'triton' or 'reference'"):
        ops.pack(CODES, 2, backend=backend)
    with pytest.raises(BackendUnavailable, match="use_backend"), ops.use_backend(backend):
        pass


def test_order_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument before context before environment before automatic."""
    monkeypatch.setitem(dispatch.BACKENDS, "none", lambda op, device, named: f"no {op} here")
    monkeypatch.setenv("STEADYKV_BACKEND", "none")
    with pytest.raises(BackendUnavailable, match=r"STEADYKV_BACKEND .* no pack here"):
        ops.pack(CODES, 2)
    with ops.use_backend("reference"):
        assert ops.pack(CODES, 2).item() == 0b111001
        assert ops.explain()[0]["reason"] == "use_backend"
        with pytest.raises(BackendUnavailable, match="call argument"):
            ops.pack(CODES, 2, backend="none")
        with pytest.raises(BackendUnavailable, match="use_backend"), ops.use_backend("none"):
            ops.pack(CODES, 2)
        assert ops.pack(CODES, 2).item() == 0b111001
    monkeypatch.setenv("STEADYKV_BACKEND", "")
    assert ops.pack(CODES, 2).item() == 0b111001
    monkeypatch.setenv("STEADYKV_BACKEND", "cuda")
    with pytest.raises(BackendUnavailable, match="STEADYKV_BACKEND asks for backend 'cuda'"):
        ops.pack(CODES, 2)


def test_automatic_choice_names_what_it_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = {"none": lambda op, device, named: "needs a better day"}
    monkeypatch.setattr(dispatch, "BACKENDS", {**refusing, **dispatch.BACKENDS})
    reasons = [row["reason"] for row in ops.explain()]
    assert all(reason.startswith("automatic; not none: needs a better day; ") for reason in reasons)
    monkeypatch.setattr(dispatch, "BACKENDS", refusing)
    with pytest.raises(BackendUnavailable, match="needs a better day"):
        ops.pack(CODES, 2)


def test_the_context_belongs_to_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.BACKENDS, "none", lambda op, device, named: "never")
    seen = []
    with ops.use_backend("none"):
        thread = Thread(target=lambda: seen.append(ops.pack(CODES, 2).item()))
        thread.start()
        thread.join()
    assert seen == [0b111001]


def test_full_precision_gives_the_settings_back() -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    try:
        for outside in ("bf16", "ieee"):
            settings.fp32_precision = outside
            with torch.autocast("cpu", torch.bfloat16), ops.full_precision(CPU):
                assert settings.fp32_precision == "ieee"
                assert not torch.is_autocast_enabled("cpu")
                assert not torch.is_grad_enabled()
            assert settings.fp32_precision == outside
            with pytest.raises(KeyError), ops.full_precision(CPU):
                raise KeyError
            assert settings.fp32_precision == outside
            assert torch.is_grad_enabled()
    finally:
        settings.fp32_precision = before
