"""What holds for every codec: bytes, errors, determinism, storage.

`test_codecs_inputs.py` has the independence of heads and rows, and odd numbers.
"""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from steadykv.codecs import CODECS, Payload, QueryMoment, payload_layout
from steadykv.config import METHODS

from .codecs import (
    ADAPTIVE_CASES,
    CASES,
    DEVICES,
    CodecCase,
    sample_moment,
    sample_tokens,
    sqnr,
)
from .conftest import poisoned_allocations

every_codec = pytest.mark.parametrize("case", CASES, ids=str)
every_adaptive_codec = pytest.mark.parametrize("case", ADAPTIVE_CASES, ids=str)
every_device = pytest.mark.parametrize("device", DEVICES)

# Odd lengths, lengths below the number of centroids, head dims that no group or byte divides.
SHAPES = [
    (1, 1, 1, 32), (1, 2, 5, 40), (2, 1, 31, 96), (1, 1, 130, 37), (1, 1, 66, 192), (1, 1, 33, 256),
]  # fmt: skip


@every_device
@every_codec
def test_round_trip_stays_inside_its_band(case: CodecCase, device: str) -> None:
    for head_dim in (64, 128):
        x = sample_tokens(head_dim=head_dim, device=device)
        decoded = case.encode(x).decode()
        assert decoded.dtype == torch.bfloat16
        assert decoded.shape == x.shape
        low, high = case.sqnr
        assert low <= sqnr(x, decoded) <= high


@every_codec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_input_dtype(case: CodecCase, dtype: torch.dtype) -> None:
    """BF16 numbers give the same payload in every dtype that can hold them."""
    x = sample_tokens().half().bfloat16()
    expected = case.encode(x)
    assert case.encode(x.to(dtype)) == expected


@every_codec
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_decode_and_their_bytes_are_predicted(
    case: CodecCase, shape: tuple[int, int, int, int]
) -> None:
    x = sample_tokens(*shape)
    payload = case.encode(x)
    assert payload.decode().shape == shape
    assert sqnr(x, payload.decode()) > 3
    expected = payload_layout(case.config, shape, compensated=case.is_compensated)
    if case.config.coef_layout == "dense":
        found = {k: (tuple(t.shape), t.dtype) for k, t in payload.tensors.items()}
        assert found == {k: (item.shape, item.dtype) for k, item in expected.items()}
        assert payload.nbytes == case.config.payload_nbytes(*shape, case.is_compensated)
    assert payload.nbytes <= case.config.payload_nbytes(*shape)
    assert payload.nbytes == sum(payload.nbytes_by_part().values())
    assert payload.nbytes == sum(t.untyped_storage().nbytes() for t in payload.tensors.values())
    assert payload.bits_per_element == 8 * payload.nbytes / math.prod(shape)
    assert all(t.is_contiguous() for t in payload.tensors.values())


@every_codec
def test_no_tokens(case: CodecCase) -> None:
    x = torch.empty(2, 3, 0, 64)
    payload = case.encode(x, stats=sample_moment(x))
    assert payload.nbytes == 0 == case.config.payload_nbytes(2, 3, 0, 64)
    assert payload.decode().shape == (2, 3, 0, 64)
    assert case.config.bits_per_element(2, 3, 0, 64) == 0


@every_codec
def test_same_input_same_bytes_whatever_the_threads(case: CodecCase) -> None:
    x = sample_tokens(1, 2, 320, 128)  # enough elements for torch to split the work
    threads = torch.get_num_threads()
    try:
        payloads = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            payloads.append(case.encode(x))
            payloads[-1].tensors["decoded"] = payloads[-1].decode()
    finally:
        torch.set_num_threads(threads)
    assert all(payload == payloads[0] for payload in payloads)


@pytest.mark.cuda
@every_codec
def test_same_input_same_bytes_on_every_run_on_cuda(case: CodecCase) -> None:
    """Of statistics, payload and decoded numbers, large enough for many blocks at work at once."""
    x = sample_tokens(1, 4, 4680, 128, device="cuda")
    runs = []
    for run in range(3):
        held = torch.empty(run * 3 << 20, dtype=torch.uint8, device="cuda")  # other addresses
        stats = case.stats(x)
        payload = case.encode(x, stats)
        payload.tensors["decoded"] = payload.decode()
        if stats is not None:
            payload.tensors["moment"] = stats.moment
        runs.append(payload)
        del held
    assert all(payload == runs[0] for payload in runs)


@every_device
@every_codec
def test_the_global_generators_are_untouched(case: CodecCase, device: str) -> None:
    x = sample_tokens(device=device)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    cuda_before = torch.cuda.get_rng_state_all()
    case.encode(x).decode()
    assert torch.equal(torch.get_rng_state(), before)
    for state, after in zip(cuda_before, torch.cuda.get_rng_state_all(), strict=True):
        assert torch.equal(state, after)


@every_adaptive_codec
def test_zero_stays_zero_and_equal_tokens_stay_equal(case: CodecCase) -> None:
    zeros = torch.zeros(1, 2, 33, 64)
    payload = case.encode(zeros)
    assert torch.equal(payload.decode(torch.float32), zeros)
    token = sample_tokens(1, 2, 1, 64).float()
    payload = case.encode(token.expand(1, 2, 33, 64))
    decoded = payload.decode(torch.float32)
    assert torch.equal(decoded, decoded[:, :, :1].expand_as(decoded))
    if "ids" in payload.tensors:
        assert not payload.tensors["ids"].any()
        if case.config.centroid_format == "bf16":
            assert torch.equal(decoded, token.expand_as(decoded))  # the centroid; residual zero
        else:
            assert sqnr(token, decoded[:, :, :1]) > 30


@every_adaptive_codec
@pytest.mark.parametrize("value", [1.0, -3.0, 1e5, -1e5, 3e-5], ids=str)
def test_constants_come_back(case: CodecCase, value: float) -> None:
    """Within the rounding of the stored numbers, and of what is left where those saturate."""
    x = torch.full((1, 1, 20, 48), value)
    payload = case.encode(x)
    low, high = case.constant_range
    stored = max(min(value, high), low)
    relative, absolute = case.constant_error
    decoded = payload.decode(torch.float32)
    if abs(value) > case.constant_peak:  # off by no more than the centroid, and not in silence
        assert payload.flags["saturated"].all()
        assert decoded.allclose(x, rtol=2**-4, atol=0)
        return
    expected = torch.full_like(x, stored)
    expected[:, :, : case.config.first_tokens] = value  # these stay dense
    assert decoded.allclose(expected, rtol=relative, atol=absolute)
    assert bool(payload.flags["saturated"].any() if "saturated" in payload.flags else False) == (
        stored != value
    )


@every_device
@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_nonfinite_numbers_become_zero_and_are_counted(
    case: CodecCase, bad: float, device: str
) -> None:
    x = sample_tokens(2, 2, 40, 64, device=device)
    clean = x.clone()
    for at in ((0, 0, 0, 0), (0, 1, 3, 9), (0, 1, 39, 63)):
        x[at], clean[at] = bad, 0
    stats = case.stats(clean)
    payload, expected = case.encode(x, stats), case.encode(clean, stats)
    assert payload.flags["nonfinite"].tolist() == [[1, 2], [0, 0]]
    payload.flags["nonfinite"].zero_()
    assert payload == expected
    assert payload.decode().isfinite().all()


@every_adaptive_codec
@pytest.mark.parametrize("scale", [1e5, 1e36, 1e-7, 1e-38], ids=str)
def test_extreme_numbers_stay_finite(case: CodecCase, scale: float) -> None:
    x = (sample_tokens(tokens=50).float() / 64 * scale).bfloat16()
    decoded = case.encode(x).decode(torch.float32)
    assert decoded.isfinite().all()
    assert (decoded - x.float()).abs().max() <= 4 * x.abs().max()


@every_adaptive_codec
def test_float16_output_saturates(case: CodecCase) -> None:
    """What a host in FP16 stored comes back as a number, even at the end of the range."""
    limit = torch.finfo(torch.float16).max
    x = torch.full((1, 2, 20, 48), limit, dtype=torch.float16)
    x[:, 1] = -limit
    decoded = case.encode(x).decode(torch.float16)
    low, high = case.constant_range
    if low <= -limit and limit <= high:
        assert torch.equal(decoded, x)
    else:  # saturated before
        relative, _ = case.constant_error
        assert decoded.float().allclose(x.float().clamp(low, high), rtol=relative)


@every_device
@every_codec
def test_any_slice_goes_into_any_view(case: CodecCase, device: str) -> None:
    x = sample_tokens(2, 3, 67, 80, device=device)
    payload = case.encode(x)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = payload.decode(dtype)
        assert torch.equal(whole, payload.decode(torch.float32).to(dtype))
        for start, end in ((0, 67), (1, 2), (13, 13), (5, 66), (66, 67)):
            buffer = torch.full((2, 70, 3, 80), math.nan, dtype=dtype, device=device)
            out = buffer[:, 1 : 1 + end - start].transpose(1, 2)
            assert payload.decode(out=out, start=start, end=end) is out
            assert torch.equal(out, whole[:, :, start:end])
            assert buffer[:, 0].isnan().all()
            assert buffer[:, 1 + end - start :].isnan().all()


@every_device
@every_codec
def test_poisoned_memory_changes_nothing(case: CodecCase, device: str) -> None:
    x = sample_tokens(1, 2, 61, 80, device=device)
    expected = case.encode(x)
    with poisoned_allocations() as poison:
        payload = case.encode(x)
        decoded = payload.decode()
    assert poison.filled
    assert payload == expected
    assert torch.equal(decoded, expected.decode())
    assert decoded.isfinite().all()
    assert sqnr(x, decoded) > 3


@every_codec
def test_save_and_load_bit_for_bit(case: CodecCase, tmp_path) -> None:  # type: ignore[no-untyped-def]
    payload = case.encode(sample_tokens(2, 2, 39, 80))
    path = tmp_path / "span.safetensors"
    payload.save(path)
    loaded = Payload.load(path)
    assert loaded == payload
    assert list(loaded.tensors) == list(payload.tensors)
    assert torch.equal(loaded.decode(), payload.decode())
    assert [entry.name for entry in tmp_path.iterdir()] == ["span.safetensors"]


@every_codec
def test_input_is_neither_changed_nor_kept(case: CodecCase) -> None:
    buffer = sample_tokens(1, 50, 2, 64).transpose(1, 2).requires_grad_()
    before = buffer.detach().clone()
    payload = case.encode(buffer)
    assert torch.equal(buffer.detach(), before)
    assert payload == case.encode(before.contiguous())
    assert not any(t.requires_grad for t in payload.tensors.values())
    source = sample_tokens()
    alive = weakref.ref(source)
    payload = case.encode(source)
    del source
    gc.collect()
    assert alive() is None


@every_device
@every_codec
def test_host_settings_change_nothing(case: CodecCase, device: str) -> None:
    """Autocast, TF32 and inference mode of the host do not reach the arithmetic."""
    x = sample_tokens(device=device)
    stats = case.stats(x)
    expected = case.encode(x, stats)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            payload = case.encode(x, stats)
            decoded = payload.decode(torch.float32)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert payload == expected
    assert torch.equal(decoded, expected.decode(torch.float32))


@every_codec
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype_and_device_change_nothing(case: CodecCase, dtype: torch.dtype) -> None:
    x = sample_tokens()
    stats = case.stats(x)
    expected = case.encode(x, stats)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            payload = case.encode(x, stats)
            decoded = payload.decode()
            moment = QueryMoment.empty(1, 2, 64)
    finally:
        torch.set_default_dtype(before)
    assert payload == expected
    assert torch.equal(decoded, expected.decode())
    assert (moment.moment.dtype, moment.moment.device.type) == (torch.float32, "cpu")


def test_the_list_has_every_method() -> None:
    assert set(CODECS) == set(METHODS) == {case.config.method for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_codec_has_a_title_of_its_own() -> None:
    titles = [codec.title for codec in CODECS.values()]
    assert all(titles)
    assert len(set(titles)) == len(titles)


@every_codec
@pytest.mark.parametrize("value", [3.4e38, -3.4e38], ids=str)
def test_the_largest_numbers_stay_finite(case: CodecCase, value: float) -> None:
    """FP32 beyond the largest BF16 number rounds down, not to infinity."""
    payload = case.encode(torch.full((1, 1, 20, 48), value))
    for name, tensor in payload.tensors.items():
        assert tensor.dtype.is_floating_point is False or tensor.float().isfinite().all(), name
