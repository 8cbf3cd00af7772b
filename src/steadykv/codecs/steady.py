"""`steady`: quantwm whose rounding leaves the errors that PSAC will store anyway.

Rounded one by one, the channels of a key pass their error on, so that the error which remains after
PSAC lies where queries are weak. Costs nothing in the payload. Values use `qvg4`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .base import HeadInputs
from .quantwm import QuantWMCodec

__all__ = ["SteadyCodec"]


class SteadyCodec(QuantWMCodec):
    """k-means, QSAC, grid `affine_zero` with feedback rounding, PSAC.

    Payload: that of quantwm, tensor for tensor; a decoder needs to know nothing of the feedback.
    A head is rounded plainly, as by quantwm, where it has no queries or a moment of zero (flag
    `feedback_active` 0), and where its moment cannot be factorised (flag `feedback_failed` 1).
    Error of a number before PSAC, for a group r of what the centroids leave: feedback may carry it
    anywhere, but it ends on the grid, which reaches half a step beyond the group. So at most
    (1 + 1/(2·(2^bits - 1)))·(max(r, 0) - min(r, 0)) + 2^bits·(`scale_base` + 2^-17); the rest as
    quantwm, and all of it where a head is rounded plainly.
    """

    title = "Steady"
    encode_blocks = 2.7
    kernel_copies = 2.1
    flags = (*QuantWMCodec.flags, "feedback_active", "feedback_failed")

    def round_keys(
        self,
        x: Tensor,
        centroids: Tensor,
        ids: Tensor,
        inputs: HeadInputs,
        subspace: tuple[Tensor, Tensor] | None,
        flags: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], Tensor]:
        """See `QuantWMCodec.round_keys`."""
        config, moment, count = self.config, inputs.moment, inputs.count
        if moment is None or count is None:
            return self.round(x, centroids, ids)
        if subspace is None:
            subspace = moment[:, :, :0], moment[:, :0, 0]
        # Without its eigenvectors nothing can be subtracted, and feedback by all of M does harm.
        failed = flags.get("psac_failed")
        usable = count if failed is None else torch.where(failed.view(torch.bool), 0, count)
        order, factor, flags["feedback_active"], lost = ops.feedback_factor(
            moment, usable, *subspace, config.damping
        )
        flags["feedback_failed"] = lost if failed is None else lost | failed
        return ops.feedback_quantize_clustered(
            x,
            centroids,
            ids,
            order,
            factor,
            config.bits,
            config.group_size,
            include_zero=config.include_zero,
        )
