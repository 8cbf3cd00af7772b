"""What the comparison with the public release is made of, where that is not installed."""

from __future__ import annotations

import pytest
import torch

from steadykv import ops
from steadykv.codecs import Payload, encode
from steadykv.config import preset

from .codecs import sample_tokens
from .oracle import agreement, encode_like_release, per_element, reordered


def test_reordered_bytes_have_the_first_code_in_the_high_bits() -> None:
    ours = ops.pack(torch.tensor([[2, 0, 1, 2, 0, 0, 0, 1]], dtype=torch.uint8), 2)
    assert ours.tolist() == [[0b10_01_00_10, 0b01_00_00_00]]
    theirs = reordered(ours, 2)
    assert theirs.tolist() == [[0b10_00_01_10, 0b00_00_00_01]]
    assert torch.equal(reordered(theirs, 2), ours)


@pytest.mark.parametrize("name", ["qvg", "qvg_pro"])
@pytest.mark.parametrize("goes_out", [True, False])
def test_the_switch_rounds_residuals_to_bf16_and_ties_as_it_is_told(
    name: str, goes_out: bool
) -> None:
    x = sample_tokens(2, 2, 150, 128)
    before = x.clone()
    given = encode(x, preset(name, centroids=16).keys)
    switched = encode_like_release(x, given, torch.full((127,), goes_out))
    residual = x
    for stage in range(given.config.stages):
        ids = given.tensors["ids"][:, :, stage, :, None].long().expand_as(x)
        residual = residual - given.tensors["centroids"][:, :, stage].gather(2, ids)  # in BF16
    steps = residual.double() / per_element(switched.tensors["scale"].double(), x)
    ties = (steps.abs() == 0.5).sum()
    assert ties > 50
    whole = steps.sign() * (steps.abs() + 0.5).floor() if goes_out else steps.round()
    codes = ops.unpack(switched.tensors["codes"], 2, 128)
    assert torch.equal(codes, whole.clamp(-1, 1).add(1).byte())
    for tensor in ("ids", "centroids"):
        assert torch.equal(switched.tensors[tensor], given.tensors[tensor])
    assert torch.equal(x, before)
    # Without the switch a little of that is different, or it would switch nothing.
    assert 0.8 < agreement(given, switched).both < 0.9999


def test_agreement_counts_elements_and_leaves_out_scales_of_zero() -> None:
    ours = encode(sample_tokens(1, 1, 10, 128), preset("qvg", centroids=2).keys)
    tensors = {name: tensor.clone() for name, tensor in ours.tensors.items()}
    theirs = Payload(ours.config, ours.shape, tensors, ours.flags)
    assert agreement(ours, theirs) == (1, 1, 1, 0)
    tensors["codes"][0, 0, 3, 0] ^= 0b11  # one channel
    tensors["scale"].view(torch.uint8)[0, 0, 4, 1] ^= 1  # one group of 64
    tensors["scale"].view(torch.uint8)[0, 0, 5, 0] = 0
    tensors["codes"][0, 0, 5, :16] ^= 0b11  # all of the group without a scale
    counted = 10 * 128 - 64
    expected = (1 - 1 / counted, 1 - 64 / counted, 1 - 65 / counted, 1 / 20)
    assert agreement(ours, theirs) == pytest.approx(expected)
