"""Payloads of an independent implementation, byte for byte.

`vectors/vectors.npz` has two spans, `a` [2, 3, 97, 128] and `b` [1, 2, 64, 80], made with NumPy
from the same description of the methods. BF16 and E4M3 tensors are raw bits, marked by "@".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload, QueryMoment, encode
from steadykv.codecs.quantwm import sparse_coefficients
from steadykv.config import METHODS, CodecConfig

ARCHIVE = np.load(Path(__file__).parent / "vectors" / "vectors.npz")
RAW = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
CENTROIDS = {"a": 16, "b": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "kivi_k": {"method": "kivi", "group_size": 32, "axis": "tokens"},
    "kivi_v": {"method": "kivi", "group_size": 32},
    "rtn": {"method": "rtn"},
    "quarot": {"method": "quarot"},
    "qvg": {"method": "qvg"},
    "qvg_trit": {"method": "qvg", "packing": "trits"},
    "qvg_pro": {"method": "qvg", "stages": 4, "group_size": 16},
    "qvg4": {"method": "qvg4"},
    "quantwm_k": {"method": "quantwm"},
    "kvquant_k": {"method": "kvquant", "axis": "tokens"},
    "kvquant_v": {"method": "kvquant", "axis": "channels"},
}
# Largest step (units in the last place, or codes) and share of differing elements, for what lies
# behind an eigen-solver. Everything else is exact.
TOLERANCE = {
    "basis": (2, 0.02),
    "coef_codes": (1, 0.02),
    "coef_scales": (2, 0.02),
}
# Decoded values round sums of FP32, whose order is free.
DECODED_SHARE = {"quantwm_k": 1e-2}


def stored(prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, in the dtypes they stand for."""
    tensors = {}
    for key in ARCHIVE.files:
        name, _, kind = key.partition("@")
        if name.startswith(prefix + "/"):
            tensor = torch.from_numpy(ARCHIVE[key])
            tensors[name.removeprefix(prefix + "/")] = tensor.view(RAW.get(kind, tensor.dtype))
    return tensors


def steps(a: Tensor, b: Tensor) -> Tensor:
    """Distance in units in the last place (floats) or codes (integers)."""

    def ordered(t: Tensor) -> Tensor:
        if not t.dtype.is_floating_point:
            return t.to(torch.int64)
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[t.element_size()]
        bits = t.contiguous().view(kind).to(torch.int64)
        return torch.where(bits < 0, -(bits + (1 << (8 * t.element_size() - 1))), bits)

    return (ordered(a) - ordered(b)).abs()


def check(codec: str, name: str, found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    largest, share = TOLERANCE.get(name, (0, 0.0))
    distance = steps(found, expected)
    assert distance.max() <= largest, name
    assert (distance > 0).double().mean() <= share, name


def moment_of(case: str) -> QueryMoment:
    given = stored(f"{case}/in")
    return QueryMoment(given["query_moment"].clone(), given["count"])


def payload_of(case: str, codec: str) -> Payload:
    fields = dict(CONFIGS[codec])
    given = stored(f"{case}/in")
    initial = None
    if "centroids" in METHODS[fields["method"]]:
        fields["centroids"] = CENTROIDS[case]
        initial = given["init_centroids"][:, :, : fields.get("stages", 1)]
    config = CodecConfig(**fields)
    return encode(given["X"], config, stats=moment_of(case), initial_centroids=initial)


@pytest.mark.parametrize("codec", CONFIGS)
@pytest.mark.parametrize("case", CENTROIDS)
def test_payloads(case: str, codec: str) -> None:
    expected = stored(f"{case}/{codec}")
    decoded = expected.pop("decoded")
    expected.pop("token_shift")
    payload = payload_of(case, codec)
    assert payload.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        check(codec, name, payload.tensors[name], tensor)
    difference = steps(payload.decode(), decoded) > 0
    assert difference.double().mean() <= DECODED_SHARE.get(codec, 1e-3)


@pytest.mark.parametrize("codec", CONFIGS)
@pytest.mark.parametrize("case", CENTROIDS)
def test_token_shift(case: str, codec: str) -> None:
    """Share of queries whose best key changes: the same number as the other implementation's."""
    given = stored(f"{case}/in")
    queries, keys = given["q_eval"].float(), given["X"].float()
    group = queries.shape[1] // keys.shape[1]

    def best(k: Tensor) -> Tensor:
        return (queries @ k.repeat_interleave(group, 1).transpose(2, 3)).argmax(-1)

    shift = (best(keys) != best(payload_of(case, codec).decode(torch.bfloat16).float())).double()
    expected = float(ARCHIVE[f"{case}/{codec}/token_shift"])
    assert float(shift.mean()) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("case", CENTROIDS)
def test_trits_hold_the_codes_of_the_bits(case: str) -> None:
    """Lossless: the same codes and the same decoded numbers in fewer bytes."""
    bits, trits = (payload_of(case, codec) for codec in ("qvg", "qvg_trit"))
    width = bits.shape[-1]
    codes = ops.unpack(trits.tensors["codes"], 2, width, "trits")
    assert torch.equal(codes, ops.unpack(bits.tensors["codes"], 2, width))
    assert torch.equal(trits.decode(torch.float32), bits.decode(torch.float32))
    assert trits.nbytes < bits.nbytes


@pytest.mark.parametrize("case", CENTROIDS)
def test_sparse_coefficients(case: str) -> None:
    """From the stored dense coefficients, so that no tolerance is needed."""
    dense, expected = stored(f"{case}/quantwm_k"), stored(f"{case}/quantwm_k_sparse")
    found = sparse_coefficients(dense["coef_codes"], dense["coef_scales"])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].to(torch.float64), tensor.to(torch.float64)), name


@pytest.mark.parametrize("case", CENTROIDS)
def test_compensation_with_a_given_basis(case: str) -> None:
    """The steps behind the eigen-solver are exact once they share a basis, up to reductions."""
    given, expected = stored(f"{case}/in"), stored(f"{case}/quantwm_k")
    payload = payload_of(case, "quantwm_k")
    tensors = {**payload.tensors, "coef_scales": torch.zeros_like(payload.tensors["coef_scales"])}
    plain = Payload(payload.config, payload.shape, tensors).decode(torch.float32)
    error = (given["X"].float() - plain).flatten(0, 1)
    basis, moment = expected["basis"].flatten(0, 1), given["query_moment"].flatten(0, 1)
    codes, scales, _ = ops.compensate(error, basis, moment, "row")
    for found, name in ((codes, "coef_codes"), (scales, "coef_scales")):
        distance = steps(found, expected[name].flatten(0, 1))
        assert distance.max() <= 1
        assert (distance > 0).double().mean() <= 2e-3


@pytest.mark.parametrize("case", CENTROIDS)
def test_query_statistics(case: str) -> None:
    given = stored(f"{case}/in")
    batch, heads, _, width = given["X"].shape
    moment = QueryMoment.empty(batch, heads, width)
    for name in ("q1", "q2"):
        moment.update(given[name])
    torch.testing.assert_close(moment.moment, given["query_moment"], rtol=1e-5, atol=1e-4)
    assert torch.equal(moment.count, given["count"])
    weight, active = ops.channel_weight(
        given["query_moment"].flatten(0, 1), given["count"].flatten()
    )
    torch.testing.assert_close(weight.view(batch, heads, width), given["channel_weight"])
    assert active.all()


def test_torch_rounds_to_e4m3_as_the_format_says() -> None:
    """To the nearest of m/8·2^e (e from -6) and m/8·2^-6, ties to an even m."""
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    grid = torch.tensor([m / 8 * 2.0**-6 for m in range(8)] + normal[:-1], dtype=torch.float64)
    assert grid[-1] == 448
    halves = (grid[1:] + grid[:-1]) / 2
    spread = torch.linspace(2**-9, 448, 20001, dtype=torch.float64)
    values = torch.cat([grid[1:], halves, 2.0 ** torch.linspace(-9, 8.8, 20001), spread]).float()
    above = torch.searchsorted(grid, values.double()).clamp(1, len(grid) - 1)
    low, high = values.double() - grid[above - 1], grid[above] - values.double()
    # Grid numbers alternate between even and odd m.
    upper = (high < low) | ((high == low) & (above % 2 == 0))
    expected = torch.where(upper, grid[above], grid[above - 1])
    assert torch.equal(values.to(torch.float8_e4m3fn).double(), expected)
