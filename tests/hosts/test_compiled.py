"""Trap 11: hosts whose models are compiled; our methods are left out of what is traced.

Backend "eager" runs what Dynamo captured, and "aot_eager" what AOTAutograd made of it, without a
code generator: where graphs break, what is guarded and what is seen of Python is as with inductor.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

import steadykv as skv
from steadykv.hosts import halves
from steadykv.hosts.adapter import Session
from steadykv.hosts.passes import see_output
from steadykv.hosts.registry import adapters, find
from tests.hosts import self_forcing
from tests.hosts.cases import CASES, at
from tests.hosts.checks import assert_equal, assert_same_state, small_config, state_of

# Tracing takes seconds a host, so each one is compiled in one of the two ways: "replaced" by what
# torch.compile makes of the model, or "in place" by its own method.
COMPILED = {
    "self-forcing": "replaced",
    "causal-forcing-rolling": "in place",
    "lingbot-world": "in place",
    "fastvideo, Matrix-Game-2, keys before RoPE": "replaced",
    "longlive2": "replaced",
    "hy-worldplay": "in place",
    "anyflow-far": "replaced",
    "sana-wm-refiner": "replaced",
    "sglang": "in place",
}


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    torch.compiler.reset()
    with warnings.catch_warnings():
        # A video's own list, and what the host or Dynamo warn of.
        warnings.filterwarnings("ignore", message=".*(allocated before|does not know how to trace)")
        warnings.filterwarnings("ignore", message=".*more memory than in BF16")
        yield
    torch.compiler.reset()


def compiled(host, case, way, backend="eager"):
    """The host, whose model is compiled, see `COMPILED`."""
    if way == "in place":
        at(host, case.model).compile(backend=backend)
        return host
    module = torch.compile(at(host, case.model), backend=backend)
    if not case.model:
        return module
    owner, _, name = case.model.rpartition(".")
    setattr(at(host, owner), name, module)
    return host


def counts_of(caches):
    """How many queries each layer of each branch has settled."""
    found = []
    for cache in caches:
        for layer in cache:
            moment = None if layer.stats is None else layer.stats.for_encoding(1 << 20)
            found.append(0 if moment is None else int(moment.count.flatten()[0]))
    return found


def of_the_adapter(state, case):
    """Without what the host writes itself, and what Dynamo puts into the files that it traced."""
    dynamo = re.compile(r"\d+\.\.(___|__(compiled_fn|resume_at|builtins_dict|import)_)")
    return {k: v for k, v in state.items() if k not in case.own and not dynamo.match(k)}


def traced():
    """Frames that were compiled since the last question."""
    count = counters["frames"]["total"]
    counters.clear()
    return count


@pytest.mark.parametrize(("name", "way"), COMPILED.items())
def test_a_compiled_host(name, way, monkeypatch):
    """It ran, and was traced, before the block. bf16: as the compiled host without a block.

    quantwm: as the plain host within one, with queries of every layer; a second block traces
    nothing anew. After all of them the host is as before, and gives what it gave. Dynamo notes in
    a file which modules it traced for it: those that keep the tokens are not among them.
    """
    case = CASES[name]
    case.prepare(monkeypatch)
    host = compiled(case.make(), case, way)
    wanted = case.run(host)
    assert_equal(case.run(case.make()), wanted)
    assert find(host).name == case.adapter
    before = state_of(*case.owners(host))
    with skv.attach(host, preset="bf16", **case.options):
        assert_equal(case.run(host), wanted)
    config = small_config("quantwm")
    plain = case.make()
    with skv.attach(plain, config=config, **case.options) as expected:
        packed = case.run(plain)
    for number in range(2):
        counters.clear()
        with skv.attach(host, config=config, **case.options) as caches:
            assert_equal(case.run(host), packed)
        assert traced() == 0 or number == 0
        assert counts_of(caches) == counts_of(expected)
        assert ("queries cannot" in str(caches.notes)) == ("queries cannot" in str(expected.notes))
    assert all(counts_of(caches)[:2])
    assert_equal(case.run(host), wanted)
    after = state_of(*case.owners(host))
    assert_same_state(of_the_adapter(before, case), of_the_adapter(after, case))
    names = " ".join(after)
    assert not any(f"steadykv_dot_{part}" in names for part in ("codecs", "ops", "reference"))
    assert "steadykv_dot_cache_dot_layer" not in names


@pytest.mark.parametrize("name", ["self-forcing", "hy-worldplay"])
def test_aot_autograd(name):
    """Attached before the first run, as the pages say."""
    case = CASES[name]
    wanted = case.run(compiled(case.make(), case, "replaced", "aot_eager"))
    torch.compiler.reset()
    host = compiled(case.make(), case, "replaced", "aot_eager")
    with skv.attach(host, preset="bf16", **case.options):
        assert_equal(case.run(host), wanted)
    plain = case.make()
    with skv.attach(plain, config=small_config("quantwm"), **case.options) as expected:
        packed = case.run(plain)
    with skv.attach(host, config=small_config("quantwm"), **case.options) as caches:
        assert_equal(case.run(host), packed)
    assert counts_of(caches) == counts_of(expected)


def test_a_longer_video_compiles_no_more():
    """Positions grow for ever; a frame is compiled for Dynamo's limit of them at most."""
    host = compiled(self_forcing.CausalInferencePipeline(6, 3), CASES["self-forcing"], "replaced")
    with skv.attach(host, config=small_config("quantwm")):
        found = []
        for chunks in (6, 12, 24):
            counters.clear()
            host.inference(self_forcing.noise_of(3 * chunks), [3] * chunks, self_forcing.text_of())
            found.append(traced())
    assert found[0] > found[1] > found[2] == 0


@pytest.mark.parametrize("options", [{"attention": "packed"}, {"store_keys": "before_rope"}])
def test_options_of_compiled_pipelines(options):
    case = CASES["self-forcing"]
    plain, host = case.make(), compiled(case.make(), case, "replaced")
    config = small_config("quantwm")
    with skv.attach(plain, config=config, **options) as expected:
        wanted = case.run(plain)
    with skv.attach(host, config=config, **options) as caches:
        assert_equal(case.run(host), wanted)
    assert counts_of(caches) == counts_of(expected)


def test_a_compiled_attention_alone():
    """Causal-Forcing's mode: the function that attention calls is compiled, not the model."""
    case = CASES["self-forcing"]
    plain, host = case.make(), case.make()
    with skv.attach(plain, config=small_config("quantwm")) as expected:
        wanted = case.run(plain)
    original = self_forcing.attention
    self_forcing.attention = torch.compile(original, backend="eager")
    try:
        with skv.attach(host, config=small_config("quantwm")) as caches:
            assert_equal(case.run(host), wanted)
        assert self_forcing.attention is not original
    finally:
        self_forcing.attention = original
    assert counts_of(caches) == counts_of(expected)


@pytest.mark.parametrize("part", ["the pipeline", "the compiled transformer", "the one inside"])
def test_a_compiled_worldplay_transformer_is_known(part):
    case = CASES["hy-worldplay"]
    host = case.make()
    inside = host.transformer
    host.transformer = torch.compile(inside, backend="eager")
    wanted = case.run(case.make())
    given = {"the pipeline": host, "the compiled transformer": host.transformer}.get(part, inside)
    assert find(given).name == "hy-worldplay"
    with skv.attach(given, preset="bf16", **case.options) as caches:
        assert_equal(case.run(host), wanted)
        assert len(caches) == 1
        with pytest.raises(skv.HostError, match="is attached already"), skv.attach(inside):
            pass
    assert "forward" not in vars(inside)


def test_queries_of_a_compiled_worldplay_that_calls_pytorch_alone(monkeypatch):
    """Without a function of the host's that could be wrapped: the mode sees PyTorch's own."""
    monkeypatch.setattr(halves, "FUNCTIONS", ())
    case = CASES["hy-worldplay"]
    plain, host = case.make(), compiled(case.make(), case, "replaced")
    with skv.attach(plain, config=small_config("quantwm"), **case.options) as expected:
        wanted = case.run(plain)
    with skv.attach(host, config=small_config("quantwm"), **case.options) as caches:
        assert_equal(case.run(host), wanted)
    assert counts_of(caches) == counts_of(expected)
    assert any(counts_of(caches))


def test_outputs_of_what_was_traced_before_are_seen():
    """A hook would not be: compiled code does not look for those that came later."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    run, x, seen = torch.compile(model, backend="eager"), torch.ones(1, 2), []
    wanted = run(x)
    session = Session(adapters()[0], small_config("quantwm"), {})
    see_output(session, model[1], lambda out: seen.append(out))
    assert torch.equal(run(x), wanted)
    assert_equal(seen, [wanted])
    session.patches.undo()
    run(x)
    assert len(seen) == 1
    assert "forward" not in vars(model[1])
