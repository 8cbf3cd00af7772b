"""An exception inside a pass, behind the attention of the last layer: the host comes back whole."""

from __future__ import annotations

from typing import Any

import pytest

import steadykv as skv
from steadykv.hosts.registry import adapters
from tests.hosts.cases import CASES, at
from tests.hosts.checks import assert_equal, assert_same_state, small_config, state_of


class Failure(RuntimeError):
    """Raised by the host, and by nobody else."""


class Fails:
    """Calls `original`, but for its call number `when`, counted from 0."""

    def __init__(self, original: Any, when: int) -> None:
        self.original, self.left = original, when

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise Failure("inside a pass")
        return self.original(*args, **kwargs)


def test_every_adapter_has_a_case():
    assert {case.adapter for case in CASES.values()} == {adapter.name for adapter in adapters()}


@pytest.mark.parametrize("method", ["bf16", "quantwm"])
@pytest.mark.parametrize("name", CASES)
def test_a_failure_inside_a_pass(name, method, monkeypatch):
    """After it the same block makes the whole video, and after the block the host is untouched.

    The 5th call is in the second chunk, or, of hosts with few calls, in a later segment.
    """
    case = CASES[name]
    case.prepare(monkeypatch)
    plain, host = case.make(), case.make()
    failing = Fails(getattr(at(host, case.inside), case.method), 4)
    setattr(at(host, case.inside), case.method, failing)
    before = state_of(*case.owners(host))

    def of_the_adapter(state):
        return {label: value for label, value in state.items() if label not in case.own}

    def fail():
        with skv.attach(host, config=small_config(method), **case.options):
            case.run(host)

    with pytest.raises(Failure, match="inside a pass"):
        fail()
    assert_same_state(of_the_adapter(before), of_the_adapter(state_of(*case.owners(host))))
    if method == "bf16":
        failing.left = 4
        with skv.attach(host, config=small_config(method), **case.options):
            with pytest.raises(Failure, match="inside a pass"):
                case.run(host)
            got = case.run(host)
        assert_equal(got, case.run(plain))
        assert_same_state(of_the_adapter(before), of_the_adapter(state_of(*case.owners(host))))
