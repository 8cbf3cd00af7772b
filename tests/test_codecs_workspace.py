"""What encoding and decoding allocate at once, and that passes change no byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from steadykv.codecs.base import WORKSPACE_BYTES

from .codecs import CASES, CodecCase, sample_tokens

every_codec = pytest.mark.parametrize("case", CASES, ids=str)


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest storage that any operation returns, `known` ones apart."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known, self.nbytes = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, Tensor) and item.untyped_storage().data_ptr() != self.known:
                self.nbytes = max(self.nbytes, item.untyped_storage().nbytes())
        return result


@every_codec
def test_workspace_is_bounded(case: CodecCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary exceeds one FP32 pass of tokens, or one block; and passes change no byte."""
    x = sample_tokens(2, 4, 512, 64)
    whole = case.encode(x)
    one_head = 4 * 512 * 64
    one_pass = (4 if case.pools_heads else 3) * one_head  # whole batch rows where heads are pooled
    assert one_head * 8 < WORKSPACE_BYTES
    monkeypatch.setattr("steadykv.codecs.encoder.WORKSPACE_BYTES", 3 * one_head)
    monkeypatch.setattr("steadykv.reference.blocks.CPU_BLOCK_BYTES", one_head)
    monkeypatch.setattr("steadykv.reference.decode.BLOCK_BYTES", 3 * one_head)
    stats = case.stats(x)
    with LargestTensor(x) as seen:
        payload = case.encode(x, stats)
    assert 0 < seen.nbytes <= max(one_pass, payload.nbytes)
    out = torch.empty_like(x)
    with LargestTensor(out) as seen:
        payload.decode(out=out)
    assert 0 < seen.nbytes <= max(3 * one_head, payload.nbytes)
    assert payload == whole
    assert torch.equal(out, whole.decode())


@pytest.mark.cuda
@every_codec
def test_passes_change_no_byte_on_cuda(case: CodecCase, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample_tokens(2, 4, 512, 64, device="cuda")
    stats = case.stats(x)
    whole = case.encode(x, stats)
    monkeypatch.setattr("steadykv.codecs.encoder.GPU_WORKSPACE_BYTES", 3 * 4 * 512 * 64)
    assert case.encode(x, stats) == whole
