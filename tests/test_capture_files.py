"""Capture files: round trip, sizes, users' own files, and one line for every bad one."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from steadykv.capture import CaptureHeader, Selection, open_capture
from steadykv.capture.format import FORMAT
from steadykv.capture.reader import CaptureFile
from steadykv.config import CachePolicy
from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.world_capture import CapturePlan, capture_world
from tests.worlds import TINY, tiny_episodes, tiny_world


def capture(path: Path, selection: Selection | None = None, **options: Any) -> dict[str, Any]:
    options = {"frames": 12, "seed": 3} | options
    return capture_world(tiny_world(), tiny_episodes(2), path, selection or Selection(), **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of two layers, two spans, 40 queries each."""
    file = tmp_path_factory.mktemp("captures") / "capture.safetensors"
    capture(file, Selection(queries=40))
    return file


def parts_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()[FORMAT])


# --- captures -------------------------------------------------------------------------------


def test_the_header_says_what_is_in_the_file(path: Path) -> None:
    file = open_capture(path)
    header = file.header
    assert header is not None
    assert (header.num_layers, header.num_heads, header.head_dim) == (2, 2, 32)
    assert header.frame_tokens == TINY.frame_tokens
    assert header.rows == ({"episode": "walk-0", "seed": 3}, {"episode": "walk-1", "seed": 3})
    assert (header.layers, header.heads, header.key_rope) == ((0, 1), (0, 1), "post")
    assert header.model["name"] == "steadykv.world"
    assert header.model["config"] == json.loads(json.dumps(TINY.to_dict()))
    assert header.environment["torch"] == torch.__version__
    assert [(s.index, s.start, s.end) for s in header.spans] == [(0, 0, 144), (1, 144, 288)]
    assert [(s.statistics, s.queries) for s in header.spans] == [("own", 40), ("history", 40)]
    assert header.spans[0].chunks == ((0, 72), (72, 144))
    assert file.cells == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert (file.layers, file.spans, file.longest_span) == ((0, 1), (0, 1), 144)
    span = file.load((1, 1))
    assert span.k.shape == span.v.shape == (2, 2, 144, 32)
    assert span.k.dtype == torch.bfloat16
    assert span.q is not None
    assert span.q.shape == (2, 2, 40, 32)
    assert span.moment is not None
    # Span 0 has two chunks: one pass of the given frames, and three of the first generated ones.
    assert span.moment.count.unique().tolist() == [72 * (1 + 3)]
    assert not span.has_own_statistics
    assert file.load((1, 0)).has_own_statistics
    data = json.loads(json.dumps(header.to_dict()))
    assert CaptureHeader.from_dict(data | {"later": 1}) == header


def test_the_same_run_gives_the_same_file(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    capture(again, Selection(queries=40))
    assert again.read_bytes() == path.read_bytes()
    assert again.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.parametrize(
    ("selection", "options"),
    [
        (Selection(), {}),
        (Selection(layers=(1,), heads=(0,), spans=(1,), queries=17), {}),
        (Selection(queries=0), {"span_chunks": 1}),
        (Selection(queries=100_000), {"key_rope": "pre", "frames": 18}),
        (Selection(spans=(2,)), {"frames": 18}),
    ],
)
def test_the_predicted_size_is_a_tight_bound(
    selection: Selection, options: dict[str, Any], tmp_path: Path
) -> None:
    plans: list[CapturePlan] = []
    stored = capture(tmp_path / "c.safetensors", selection, on_plan=plans.append, **options)
    nbytes = (tmp_path / "c.safetensors").stat().st_size
    assert stored["nbytes"] == nbytes
    assert nbytes <= plans[0].nbytes <= 1.05 * nbytes + 8192
    file = open_capture(tmp_path / "c.safetensors")
    assert [span.index for span in plans[0].spans] == list(file.spans)
    assert (plans[0].layers, plans[0].heads) == (file.header.layers, file.header.heads)  # type: ignore[union-attr]


def test_a_capture_above_the_limit_is_refused_before_it_runs(tmp_path: Path) -> None:
    plans: list[CapturePlan] = []
    ran: list[int] = []
    limit = 300_000
    with pytest.raises(ConfigError, match=r"expected at most 300,000; keep fewer layers") as error:
        capture(
            tmp_path / "c.safetensors",
            max_nbytes=limit,
            on_plan=plans.append,
            on_chunk=lambda *_: ran.append(1),
        )
    assert f"{plans[0].nbytes:,}" in str(error.value)
    assert not ran
    assert not list(tmp_path.iterdir())
    capture(tmp_path / "c.safetensors", max_nbytes=plans[0].nbytes)


@pytest.mark.parametrize(
    ("selection", "options", "match"),
    [
        (Selection(layers=(2,)), {}, "layers: got 2, but there are 2; expected 0 to 1"),
        (Selection(heads=(5,)), {}, "heads: got 5"),
        (Selection(spans=(0, 2)), {}, "spans: got 2, but there are 2"),
        (Selection(), {"span_chunks": 6}, "span_chunks is 6: expected at most 5"),
        (Selection(), {"span_chunks": 5, "frames": 9}, "completes no span of 5 chunks"),
    ],
)
def test_what_there_is_not_is_refused(
    selection: Selection, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        capture(tmp_path / "c.safetensors", selection, **options)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses files above a limit, as it does on a full disk."""
    program = (
        "import sys; from pathlib import Path; from tests.test_capture_files import capture\n"
        "from steadykv.errors import SteadyKVError\n"
        "try: capture(Path(sys.argv[1]))\n"
        "except SteadyKVError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "c.safetensors")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.stdout.startswith(f"could not write {tmp_path / 'c.safetensors'}: "), done.stderr
    assert done.stdout.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- users' own files -----------------------------------------------------------------------


def own(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, str(path))
    return path


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_k_and_v_are_enough(dtype: torch.dtype, tmp_path: Path) -> None:
    k, v = random(1, 2, 40, 16, dtype=dtype), random(1, 2, 40, 16, dtype=dtype) + 1
    file = open_capture(own(tmp_path / "own", k=k, v=v, other=torch.zeros(3)))
    assert file.header is None
    assert file.cells == ((0, 0),)
    span = file.load((0, 0))
    assert torch.equal(span.k, k)
    assert torch.equal(span.v, v)
    assert (span.q, span.moment, span.rope) == (None, None, None)
    assert not file.needs_rope


def test_more_layers_and_spans_and_everything_optional(tmp_path: Path) -> None:
    k, q = random(1, 2, 40, 16), random(1, 6, 9, 16)
    names = ["layer7/span3", "layer7/span4", "layer2/span0"]
    tensors = {f"{name}/{part}": k.clone() for name in names for part in ("k", "v")}
    tensors["layer2/span0/q"] = q
    tensors["layer2/span0/moment"] = torch.zeros(1, 2, 16, 16)
    tensors["layer2/span0/moment_count"] = torch.ones(1, 2, dtype=torch.int64)
    file = open_capture(own(tmp_path / "own", **tensors))
    assert file.cells == ((2, 0), (7, 3), (7, 4))
    span = file.load((2, 0))
    assert span.q is not None
    assert torch.equal(span.q, q)
    assert span.moment is not None
    assert not span.has_own_statistics


K = random(1, 2, 40, 16)
BAD: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "nothing": ({}, "got tensors nothing; expected k and v"),
    "other names": ({"keys": K, "values": K}, "got tensors keys, values; expected k and v"),
    "no v": ({"k": K}, "it lacks v"),
    "no k": ({"layer1/span2/v": K}, "layer 1 span 2 lacks k"),
    "three dimensions": ({"k": K[0], "v": K[0]}, r"k is \[2, 40, 16\] BF16, expected \[B, H, S, D"),
    "no tokens": ({"k": K[:, :, :0], "v": K[:, :, :0]}, "with no dimension of 0"),
    "unequal": ({"k": K, "v": K[:, :, :39].clone()}, r"v is \[1, 2, 39, 16\].* the shape of k"),
    "integers": ({"k": K.int(), "v": K}, "k is .* I32, expected BF16 or F16 or F32; cast it"),
    "FP64": ({"k": K.double(), "v": K.double()}, "F64, expected"),
    "query heads": ({"k": K, "v": K, "q": random(1, 3, 5, 16)}, "a multiple of 2"),
    "query width": ({"k": K, "v": K, "q": random(1, 2, 5, 8)}, r"N, 16\]"),
    "no queries": ({"k": K, "v": K, "q": random(1, 2, 5, 16)[:, :, :0]}, "q is"),
    "moment alone": ({"k": K, "v": K, "moment": torch.zeros(1, 2, 16, 16)}, "no moment_count"),
    "moment shape": (
        {"k": K, "v": K, "moment": torch.zeros(1, 2, 8, 8), "moment_count": torch.ones(1, 2)},
        r"expected \[1, 2, 16, 16\] F32",
    ),
    "count dtype": (
        {"k": K, "v": K, "moment": torch.zeros(1, 2, 16, 16), "moment_count": torch.ones(1, 2)},
        r"moment_count is \[1, 2\] F32, expected \[1, 2\] I64",
    ),
    "rope shape": (
        {"layer0/span0/k": K, "layer0/span0/v": K, "span0/rope": torch.zeros(2, 40, 7)},
        r"span0/rope is .* expected \[2, 40, 8\] F32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_misshapen_file_gets_one_line(name: str, tmp_path: Path) -> None:
    tensors, match = BAD[name]
    tensors = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
    with pytest.raises(PayloadError, match=match) as error:
        open_capture(own(tmp_path / "own", **tensors))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "own"))


@pytest.mark.parametrize("part", ["k", "v", "q", "moment"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_get_one_line(part: str, bad: float, tmp_path: Path) -> None:
    tensors = {name: K.clone() for name in ("k", "v", "q")}
    tensors["moment"] = torch.zeros(1, 2, 16, 16)
    tensors["moment_count"] = torch.ones(1, 2, dtype=torch.int64)
    tensors[part].flatten()[5:7] = bad
    file = open_capture(own(tmp_path / "own", **tensors))
    with pytest.raises(PayloadError, match=f"{part} holds 2 NaN or Inf"):
        file.load((0, 0))


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (None, -1, "moment_count reaches -1, expected numbers of queries"),
        ((3, 3), -0.5, "moment has -0.5 on its diagonal, expected means of squares"),
        ((3, 4), 0.25, "moment is not symmetric, by up to 0.25; expected the mean of q q"),
    ],
)
def test_statistics_that_no_queries_have_get_one_line(
    at: tuple[int, int] | None, value: float, match: str, tmp_path: Path
) -> None:
    moment, count = torch.eye(16).repeat(1, 2, 1, 1), torch.ones(1, 2, dtype=torch.int64)
    if at is None:
        count[0, 1] = int(value)
    else:
        moment[0, 1][at] = value
    file = open_capture(
        own(tmp_path / "own", k=K.clone(), v=K.clone(), moment=moment, moment_count=count)
    )
    with pytest.raises(PayloadError, match=match) as error:
        file.load((0, 0))
    assert "\n" not in str(error.value)


def test_a_moment_of_no_queries_is_no_statistics(tmp_path: Path) -> None:
    moment, count = torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, dtype=torch.int64)
    names = {"k": K.clone(), "v": K.clone(), "moment": moment}
    assert (
        open_capture(own(tmp_path / "a", **names, moment_count=count)).load((0, 0)).moment is None
    )
    count[0, 1] = 1  # heads may differ
    found = open_capture(own(tmp_path / "b", **names, moment_count=count)).load((0, 0)).moment
    assert found is not None
    assert found.count.tolist() == [[0, 1]]


def write_text(path: Path) -> None:
    path.write_text("not a safetensors file, but long enough to look like one")


def write_truncated(path: Path) -> None:
    save_file({"k": K.clone(), "v": K.clone()}, str(path))
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    "make",
    [lambda path: None, Path.touch, write_text, write_truncated],
    ids=["missing", "empty", "text", "truncated"],
)
def test_what_is_no_safetensors_file_gets_one_line(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(PayloadError, match="got no readable safetensors file") as error:
        open_capture(tmp_path / "file")
    assert "\n" not in str(error.value)


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="got a folder, expected a safetensors file"):
        open_capture(tmp_path)


# --- damaged captures -----------------------------------------------------------------------


def reopened(path: Path, tensors: dict[str, torch.Tensor], header: Any) -> CaptureFile:
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, str(path), metadata={FORMAT: text})
    return open_capture(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version 2, expected 'steadykv.capture' version 1; capture it again"),
        ({"format": "other"}, "format 'other'"),
        ({"layers": [0, 2]}, "lacks layer 2 span 0|unexpected layer 1 span 0"),
        ({"layers": [0]}, "holds an unexpected layer 1 span 0"),
        ({"heads": [0]}, r"expected \[2, 1, 144, 32\], as its header says"),
        ({"rows": []}, r"expected \[0, 2, 144, 32\]"),
        ({"rows": [1]}, "rows are not objects"),
        ({"key_rope": "none"}, "key_rope is 'none'"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_heads": True}, "num_heads is True"),
        ({"policy": {"version": 1, "span": 2}}, "no field 'span'"),
        ({"spans": [{"index": 0}]}, "lacks 'start'"),
        ({"spans": None}, "damaged header"),
        ({"model": "world"}, "model is a str"),
    ],
)
def test_a_header_that_does_not_fit_gets_one_line(
    change: dict[str, Any], match: str, path: Path, tmp_path: Path
) -> None:
    tensors, header = parts_of(path)
    with pytest.raises(PayloadError, match=match) as error:
        reopened(tmp_path / "c", tensors, header | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000])
def test_a_header_that_is_no_object_gets_one_line(text: str, path: Path, tmp_path: Path) -> None:
    tensors, _ = parts_of(path)
    with pytest.raises(PayloadError):
        reopened(tmp_path / "c", tensors, text)


def test_a_lost_tensor_is_named(path: Path, tmp_path: Path) -> None:
    tensors, header = parts_of(path)
    for name in ("layer1/span0/v", "layer0/span1/moment_count"):
        left = {key: tensor for key, tensor in tensors.items() if key != name}
        with pytest.raises(PayloadError, match=r"layer 1 span 0 lacks v|no moment_count beside"):
            reopened(tmp_path / "c", left, header)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(name=st.sampled_from(sorted(CaptureHeader.__dataclass_fields__)), value=JSON)
def test_any_damage_of_a_header_is_a_payload_error(name: str, value: Any) -> None:
    header = CaptureHeader(
        model={"name": "m"}, num_layers=1, num_heads=1, query_heads=1, head_dim=8, frame_tokens=4,
        rows=({},), layers=(0,), heads=(0,), dtype="bfloat16", key_rope="post",
        policy=CachePolicy(), queries=1, query_seed=0, environment={},
    )  # fmt: skip
    data = json.loads(json.dumps(header.to_dict())) | {name: value}
    with contextlib.suppress(PayloadError):  # anything else fails the test
        CaptureHeader.from_dict(data)
