"""Spans in a row: starts of k-means, statistics, storage, and what bad input gets."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from steadykv.cache.workspace import encode_workspace_nbytes
from steadykv.codecs import CODECS, Payload, QueryMoment, SpanKey, decode, encode
from steadykv.codecs.qvg import QVGCodec
from steadykv.config import METHODS, CodecConfig, preset
from steadykv.errors import ConfigError, PayloadError, ShapeError

from .codecs import DEVICES, sample_moment, sample_tokens, sqnr

QVG = CodecConfig("qvg", centroids=16)
QUANTWM = CodecConfig("quantwm", centroids=16)


def test_cold_start_draws_distinct_tokens_from_the_named_seed() -> None:
    x = sample_tokens(2, 3, 50, 32)
    key = SpanKey(layer=4, tensor="value", span=9)
    config = CodecConfig("qvg", centroids=16, iterations=0, seed=7)
    generator = torch.Generator().manual_seed(zlib.crc32(b"7/4/value/9/0"))
    chosen = torch.randperm(50, generator=generator)[:16]
    assert torch.equal(encode(x, config, span_key=key).centroids[:, :, 0], x[:, :, chosen])
    payloads = [
        encode(x, config, span_key=other)
        for other in (key, SpanKey(5, "value", 9), SpanKey(4, "key", 9), SpanKey(4, "value", 8))
    ]
    assert sum(payload == payloads[0] for payload in payloads) == 1
    assert encode(x, CodecConfig("qvg", centroids=16, iterations=0), span_key=key) != payloads[0]


def test_warm_start_uses_the_centroids_of_the_span_before() -> None:
    first, second = sample_tokens(tokens=80), sample_tokens(tokens=80, seed=3)
    before = encode(first, QVG)
    warm = encode(second, QVG, warm=before)
    assert warm == encode(second, QVG, initial_centroids=before.centroids)
    assert warm == encode(second, QVG, warm=before.centroids)
    assert warm != encode(second, QVG)


def test_warm_start_only_where_the_geometry_is_the_same() -> None:
    x = sample_tokens(tokens=80)
    cold = encode(x, QVG)
    for other in (sample_tokens(tokens=81), sample_tokens(tokens=80, head_dim=80)):
        assert encode(x, QVG, warm=encode(other, QVG)) == cold
    fewer = encode(sample_tokens(tokens=80), CodecConfig("qvg", centroids=8))
    assert encode(x, QVG, warm=fewer) == cold
    off = CodecConfig("qvg", centroids=16, warm_start=False)
    assert encode(x, off, warm=cold).tensors["ids"].equal(encode(x, off).tensors["ids"])
    with pytest.raises(ShapeError, match="initial_centroids"):
        encode(x, QVG, initial_centroids=fewer.centroids)


def test_more_centroids_than_tokens_or_than_a_byte_counts() -> None:
    x = sample_tokens(1, 1, 5, 32)
    few = encode(x, CodecConfig("qvg", centroids=64))
    assert few.centroids.shape == (1, 1, 1, 5, 32)
    assert sorted(few.tensors["ids"].flatten().tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(few.decode(), x)
    many = CodecConfig("quantwm", centroids=300)
    x = sample_tokens(1, 1, 400, 32)
    payload = encode(x, many)
    assert payload.tensors["ids"].dtype == torch.uint16
    assert payload.tensors["ids"].to(torch.int32).max() > 255
    assert payload.nbytes == many.payload_nbytes(1, 1, 400, 32, compensated=False)
    assert sqnr(x, payload.decode()) > 12


def test_flags_say_what_was_active() -> None:
    x = sample_tokens(2, 2)
    cold = encode(x, QUANTWM, stats=QueryMoment.empty(2, 2, 64))
    assert not cold.flags["weight_active"].any()
    assert not cold.flags["psac_active"].any()
    assert cold == encode(x, QUANTWM)
    stats = sample_moment(x)
    stats.count[0, 1] = 0
    mixed = encode(x, QUANTWM, stats=stats)
    for name in ("weight_active", "psac_active"):
        assert mixed.flags[name].tolist() == [[1, 0], [1, 1]]
    assert not mixed.tensors["basis"][0, 1].any()
    assert not mixed.tensors["coef_scales"][0, 1].any()
    rest = {k: t[0, 1] for k, t in mixed.tensors.items() if k in cold.tensors}
    for name, tensor in rest.items():
        alone = cold.tensors[name][0, 1]
        assert torch.equal(tensor[None].view(torch.uint8), alone[None].view(torch.uint8))


@pytest.mark.parametrize("where", ["diagonal", "elsewhere"])
def test_a_broken_moment_turns_psac_off_for_its_head_and_is_counted(where: str) -> None:
    x = sample_tokens(1, 2)
    stats = sample_moment(x)
    stats.moment[0, 1, 0, 0 if where == "diagonal" else 5] = torch.nan
    payload = encode(x, QUANTWM, stats=stats)
    assert payload.flags["psac_failed"].tolist() == [[0, 1]]
    assert payload.flags["psac_active"].tolist() == [[1, 0]]
    assert payload.decode().isfinite().all()
    assert sqnr(x, payload.decode()) > 12


def test_compensation_lowers_the_logit_error() -> None:
    """On queries like those of the statistics, but not the same ones."""
    x = sample_tokens(1, 2, 300, 64)
    stats = sample_moment(x, seed=1)
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(2, 4, 64, generator=generator)
    strength = torch.randn(1, 2, 500, 4, generator=torch.Generator().manual_seed(9))
    queries = strength * 3 @ directions
    configs = {
        "qvg": QVG,
        "qvg4": CodecConfig("qvg4", centroids=16),
        "without PSAC": CodecConfig("quantwm", centroids=16, rank=0),
        "quantwm": QUANTWM,
    }
    errors = {}
    for name, config in configs.items():
        difference = encode(x, config, stats=stats).decode().float() - x.float()
        errors[name] = float((queries @ difference.mT).square().mean())
    assert errors["qvg"] > errors["qvg4"] > errors["quantwm"]
    assert errors["quantwm"] < 0.1 * min(errors["qvg4"], errors["without PSAC"])


def sparse_payload(kept: int, tokens: int = 40) -> tuple[Payload, Payload]:
    """A span with coefficients in dense and in automatic layout; `kept` tokens have an error."""
    x = torch.zeros(1, 2, tokens, 64)
    x[:, :, :kept] = sample_tokens(1, 2, kept, 64).float()
    initial = torch.zeros(1, 2, 1, 2, 64)  # one centroid for the zeros, so that they stay exact
    initial[..., 1, :] = 3
    stats = sample_moment(x)
    return tuple(  # type: ignore[return-value]
        encode(
            x,
            CodecConfig("quantwm", centroids=2, iterations=0, candidates=1, coef_layout=layout),
            stats=stats,
            initial_centroids=initial,
        )
        for layout in ("dense", "auto")
    )


def test_automatic_layout_takes_the_smaller() -> None:
    dense, auto = sparse_payload(kept=12)
    kept = int((dense.tensors["coef_scales"] != 0).sum())
    assert 0 < kept <= 24
    part = auto.nbytes_by_part()
    assert part["coef_codes"] + part["coef_scales"] + part["row_index"] == kept * (8 + 2 + 2)
    assert part["row_offsets"] == 4 * 3
    assert auto.nbytes < dense.nbytes
    assert torch.equal(auto.decode(torch.float32), dense.decode(torch.float32))
    assert torch.equal(auto.decode(start=7, end=19), dense.decode()[:, :, 7:19])
    index, offsets = auto.tensors["row_index"].to(torch.int64), auto.tensors["row_offsets"].tolist()
    for head in range(2):
        mine = index[offsets[head] : offsets[head + 1]].tolist()
        assert mine == dense.tensors["coef_scales"][0, head].nonzero().flatten().tolist()
    full_dense, full_auto = sparse_payload(kept=40)
    assert full_auto.nbytes_by_part() == full_dense.nbytes_by_part()


def test_nothing_kept_stores_nothing() -> None:
    dense, auto = sparse_payload(kept=0)
    assert "basis" in dense.tensors
    assert not {"basis", "coef_codes", "coef_scales", "row_index"} & auto.tensors.keys()
    assert auto.nbytes == auto.config.payload_nbytes(*auto.shape, compensated=False)
    assert torch.equal(auto.decode(), dense.decode())


def test_sparse_payload_survives_a_file(tmp_path: Path) -> None:
    _, auto = sparse_payload(kept=12)
    auto.save(tmp_path / "p")
    assert Payload.load(tmp_path / "p") == auto


def test_payloads_move_and_compare() -> None:
    payload = encode(sample_tokens(), QUANTWM)
    assert payload.to("cpu") is payload
    assert payload.device == torch.device("cpu")
    assert decode(payload, torch.float32).equal(payload.decode(torch.float32))
    assert payload != "payload"
    for name in ("codes", "ids"):
        copy = Payload(payload.config, payload.shape, dict(payload.tensors), payload.flags)
        copy.tensors[name] = copy.tensors[name].clone()
        assert copy == payload
        copy.tensors[name].view(-1)[3] ^= 1
        assert copy != payload
    with pytest.raises(TypeError):
        hash(payload)


@pytest.mark.cuda
def test_payloads_move_to_the_gpu_and_back() -> None:
    x = sample_tokens()
    payload = encode(x, QUANTWM, stats=sample_moment(x))
    there = payload.to("cuda")
    assert there.device.type == "cuda"
    assert there.to("cpu") == payload == there
    torch.testing.assert_close(there.decode().cpu(), payload.decode(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_calls(device: str) -> None:
    good = sample_tokens(device=device)
    for bad in (good[0], good.double(), good.int(), good[..., :0]):
        with pytest.raises(ShapeError, match="expected"):
            encode(bad, QVG)
    payload = encode(good, QVG)
    for start, end in ((-1, 3), (5, 4), (0, 193), (200, None)):
        with pytest.raises(ShapeError, match="token range"):
            payload.decode(start=start, end=end)
    with pytest.raises(ShapeError, match="out is"):
        payload.decode(out=torch.empty(1, 2, 191, 64, device=device))


Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


CHANGES: dict[str, Change] = {
    "missing": lambda t, h: t.__delitem__("scale_base"),
    "unknown tensor": lambda t, h: t.update(extra=torch.zeros(1)),
    "unknown flag": lambda t, h: t.update({"flags/x": torch.zeros(1, 2)}),
    "bad flag": lambda t, h: t.update({"flags/nonfinite": torch.zeros(2, 2)}),
    "dtype": lambda t, h: t.update(codes=t["codes"].to(torch.int8)),
    "shape": lambda t, h: t.update(codes=t["codes"][:, :, 1:].clone()),
    "ids": lambda t, h: t["ids"].fill_(16),
    "row_index": lambda t, h: t["row_index"].view(torch.int16).fill_(1000),
    "row_offsets": lambda t, h: t["row_offsets"][1].fill_(1000),
    "ends": lambda t, h: t["row_offsets"][-1].sub_(1),
    "version": lambda t, h: h.update(version=2),
    "format": lambda t, h: h.update(format="other"),
    "config": lambda t, h: h["config"].update(bits=5),
    "no config": lambda t, h: h.__delitem__("config"),
    "header shape": lambda t, h: h.update(shape=[1, 2, -40, 64]),
    "short shape": lambda t, h: h.update(shape=[1, 2, 40]),
    "other shape": lambda t, h: h.update(shape=[2, 1, 40, 64]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_lie_are_refused(change: str, tmp_path: Path) -> None:
    _, payload = sparse_payload(kept=12)
    path = tmp_path / "p"
    payload.save(path)
    tensors, header = load_file(path), payload.header()
    CHANGES[change](tensors, header)
    save_file(tensors, path, metadata={"steadykv.payload": json.dumps(header)})
    with pytest.raises(PayloadError) as caught:
        Payload.load(path)
    assert "expected" in str(caught.value)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"not a payload at all")
    with pytest.raises(PayloadError, match="is not a payload file: Error while deserializing"):
        Payload.load(path)
    with pytest.raises(PayloadError, match="is not a payload file but a folder"):
        Payload.load(tmp_path)
    for metadata, words in (
        (None, "it has no header 'steadykv.payload'; expected what save wrote"),
        ({"steadykv.payload": "{"}, "its header is no JSON; expected what save wrote"),
        ({"steadykv.payload": "[]"}, "has a header of type list: expected an object"),
    ):
        save_file({"a": torch.zeros(1)}, path, metadata=metadata)
        with pytest.raises(PayloadError, match=words):
            Payload.load(path)
    with pytest.raises(FileNotFoundError):
        Payload.load(tmp_path / "absent")


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    payload = encode(sample_tokens(), QVG)
    payload.tensors["codes"] = payload.tensors["codes"].transpose(1, 2)  # cannot be written
    with pytest.raises(ValueError, match="contiguous"):
        payload.save(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_no_product_spans_batch_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batched product may pick its kernel by the batch size: decoding sees one row at a time."""
    x = sample_tokens(3, 2, 40, 64)
    payload = encode(x, CodecConfig("quantwm", centroids=8), stats=sample_moment(x))
    sizes, bmm = [], torch.bmm

    def recording(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        sizes.append(a.shape[0])
        return bmm(a, b, **options)

    monkeypatch.setattr(torch, "bmm", recording)
    payload.decode()
    assert sizes == [2, 2, 2]


def test_what_a_codec_is_stands_in_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new method is known by its attributes, not by its name."""

    class Curious(QVGCodec):
        needs_queries = True
        encode_copies = 100.0

    monkeypatch.setitem(METHODS, "curious", METHODS["qvg"])
    monkeypatch.setitem(CODECS, "curious", Curious)
    config, shape = CodecConfig("curious"), (1, 1, 64, 64)
    assert config.needs_queries
    assert not config.is_dense
    stated = encode_workspace_nbytes(config, shape, False, torch.device("cpu"))
    assert stated >= 100 * 4 * 64 * 64


def test_other_kinds_of_arguments_are_refused_in_one_line() -> None:
    x = sample_tokens(tokens=20)
    config = CodecConfig("quantwm", centroids=4)
    payload = encode(x, config)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "config is a str", lambda: encode(x, "qvg")),  # type: ignore[arg-type]
        (ConfigError, "config is a CacheConfig", lambda: encode(x, preset("qvg"))),  # type: ignore[arg-type]
        (ShapeError, "x is a ndarray", lambda: encode(x.float().numpy(), config)),  # type: ignore[arg-type]
        (ShapeError, "stats is a Tensor", lambda: encode(x, config, stats=x)),  # type: ignore[arg-type]
        (ShapeError, "warm is a str", lambda: encode(x, config, warm="x")),  # type: ignore[arg-type]
        (ShapeError, "dtype is torch.int8", lambda: payload.decode(torch.int8)),
        (ShapeError, "dtype is 'bf16'", lambda: payload.decode("bf16")),  # type: ignore[arg-type]
        (ShapeError, "dtype is torch.int8", lambda: payload.decode(out=x.to(torch.int8))),
        (ShapeError, "x is a meta tensor", lambda: encode(x.to("meta"), config)),
        (ShapeError, "x is in layout torch.sparse_coo", lambda: encode(x.to_sparse(), config)),
        (ShapeError, "device is torch.float16", lambda: payload.to(torch.float16)),  # type: ignore[arg-type]
        (ShapeError, "token range 1.5..20", lambda: payload.decode(start=1.5)),  # type: ignore[arg-type]
        (ShapeError, "token range 0..'3'", lambda: payload.decode(end="3")),  # type: ignore[arg-type]
        (ShapeError, "out is a list", lambda: payload.decode(out=[])),  # type: ignore[arg-type]
    ]
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words) as error:
            call()
        assert "expected" in str(error.value)
        assert "\n" not in str(error.value)
