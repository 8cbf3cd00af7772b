"""The public release of Quant VideoGen as an oracle, and a switch that has ours round as it does.

`INSTALL` leaves out its dependencies, because it pins a torch of its own; Triton, which it needs,
comes with a CUDA build of torch. Its kernels run on CUDA alone. Only what packs and unpacks is used
here: centroids and ids are given.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from steadykv import ops
from steadykv.codecs import Payload
from steadykv.codecs.base import HeadInputs
from steadykv.codecs.qvg import QVGCodec
from steadykv.config import CodecConfig

INSTALL = "pip install --no-deps quant-videogen==0.1.0 einops termcolor loguru"
PACKAGE = "quant_videogen"
KERNELS = {
    "smooth": "_minus_centroid_kernel",
    "quant_pack": "_quant_pack_kernel",
    "accumulate": "_nstage_accum_kernel",
}


class Release:
    """The release's encoder and decoder, with our payloads for what they store.

    Only the order of codes differs: the release has the first one in the high bits of a byte.
    Raises ImportError where the release, or what it needs, is not installed.
    """

    def __init__(self) -> None:
        parts = {name: import_module(f"{PACKAGE}.real.{name}") for name in KERNELS}
        for name, kernel in KERNELS.items():
            # Tiles change the time and not the numbers, and to try them all takes minutes.
            tuner = getattr(parts[name], kernel)
            tuner.configs = tuner.configs[:1]
        self._subtract = parts["smooth"].minus_centroid
        self._quantize = parts["quant_pack"].quant_pack
        self._accumulate = parts["accumulate"].nstage_accum

    def encode(self, x: Tensor, given: Payload) -> Payload:
        """What the release makes of x, BF16 [B, H, S, D], with the centroids and ids of `given`."""
        centroids, ids = given.tensors["centroids"], given.tensors["ids"]
        residual = x
        for stage in range(given.config.stages):
            residual = self._subtract(residual, ids[:, :, stage], centroids[:, :, stage])
        tensors = self._rounded(residual, given.config)
        tensors.update(ids=ids, centroids=centroids)
        return Payload(given.config, given.shape, tensors, given.flags)

    def decode(self, payload: Payload, dtype: torch.dtype) -> Tensor:
        """What the release reads from a payload: [B, H, S, D]."""
        tensors, config = payload.tensors, payload.config
        return self._accumulate(
            list(tensors["centroids"].unbind(2)),
            list(tensors["ids"].unbind(2)),
            reordered(tensors["codes"], config.bits),
            tensors["scale"],
            config.group_size,
            config.bits,
            PACK_INPUT_INT8=True,
            CLUSTER_ID_INT8=True,
            output_dtype=dtype,
        )

    def ties_go_out(self, device: torch.device) -> Tensor:
        """By E4M3 scale: whether half of it becomes a whole step and not zero, bool [127].

        The release rounds halves away from zero, but its quotient is the approximate one of the
        GPU, up to two units in the last place off, and may fall below one half.
        """
        scale = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        x = (scale.float() / 2)[:, None].repeat(1, 64)
        x[:, 0] *= 2
        tensors = self._rounded(x[None, None], CodecConfig("qvg"))
        assert torch.equal(tensors["scale"].flatten().view(torch.uint8), scale.view(torch.uint8))
        return ops.unpack(tensors["codes"], 2, 64)[0, 0, :, 1] == 2

    def _rounded(self, residual: Tensor, config: CodecConfig) -> dict[str, Tensor]:
        codes, scale, _ = self._quantize(
            residual,
            config.group_size,
            config.bits,
            torch.float8_e4m3fn,
            pack_output_int8=True,
        )
        return {"codes": reordered(codes, config.bits), "scale": scale.contiguous()}


def reordered(packed: Tensor, bits: int) -> Tensor:
    """Bytes of the release as ours, and back."""
    per_byte = 8 // bits
    codes = ops.unpack(packed.contiguous(), bits, packed.shape[-1] * per_byte)
    return ops.pack(codes.unflatten(-1, (-1, per_byte)).flip(-1).flatten(-2), bits)


class _ReleaseRounding(QVGCodec):
    """Our encoder at 2 bits with given centroids and ids, BF16 residuals, and halves going out.

    Ties are not rounded here: they are moved a little, so that the grid under test decides.
    """

    def __init__(self, given: Payload, ties_go_out: Tensor) -> None:
        super().__init__(given.config)
        self.given = {k: t.flatten(0, 1) for k, t in given.tensors.items()}
        self.ties_go_out = ties_go_out

    def cluster(
        self, x: Tensor, inputs: HeadInputs, stage: int, with_ids: bool = True
    ) -> tuple[Tensor | None, Tensor, dict[str, Tensor], Tensor | int]:
        x.copy_(x.bfloat16())  # the tensor that the centroids will be subtracted from
        centroids = self.given["centroids"][:, stage]
        return self.given["ids"][:, stage].long(), centroids, {"centroids": centroids}, 0

    def round(self, residual: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        residual = residual.bfloat16().float()
        scale = super().round(residual)[0]["scale"]
        goes_out = self.ties_go_out[scale.view(torch.uint8).long()]
        steps, goes_out = (per_element(t, residual) for t in (scale.float(), goes_out))
        is_tie = residual.abs() * 2 == steps
        return super().round(torch.where(is_tie & goes_out, residual * (1 + 2**-10), residual))


def encode_like_release(x: Tensor, given: Payload, ties_go_out: Tensor) -> Payload:
    """Our codes and scales of x, BF16 [B, H, S, D], with the switch on."""
    codec = _ReleaseRounding(given, ties_go_out)
    with ops.full_precision(x.device):
        encoded = codec.encode(x.flatten(0, 1).float(), HeadInputs())
    tensors = {k: t.unflatten(0, given.shape[:2]) for k, t in encoded.tensors.items()}
    return Payload(given.config, given.shape, tensors, given.flags)


def per_element(groups: Tensor, x: Tensor) -> Tensor:
    """[..., G] for every channel of x [..., D], D a multiple of G."""
    return groups.repeat_interleave(x.shape[-1] // groups.shape[-1], -1)


class Agreement(NamedTuple):
    """Shares of elements with equal codes, with equal scales, and with both.

    zero_groups: share of groups to which the release gives a scale of zero, where it divides by it
    and codes mean nothing. They are left out of the rest; ours has the smallest scale there.
    """

    codes: float
    scales: float
    both: float
    zero_groups: float


def agreement(ours: Payload, theirs: Payload) -> Agreement:
    """Compares two payloads of one span element by element."""
    length, bits = ours.shape[3], ours.config.bits
    codes, others = (ops.unpack(p.tensors["codes"], bits, length) for p in (ours, theirs))
    has_codes = codes == others
    scales = [p.tensors["scale"].view(torch.uint8) for p in (ours, theirs)]
    is_zero = scales[1] == 0
    has_scales = per_element(scales[0] == scales[1], codes)
    counted = per_element(~is_zero, codes)
    shares = [
        float(equal[counted].double().mean())
        for equal in (has_codes, has_scales, has_codes & has_scales)
    ]
    return Agreement(*shares, zero_groups=float(is_zero.double().mean()))
