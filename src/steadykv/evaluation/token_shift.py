"""Token shift on the BF16 trajectory: which cached token a query selects under each method.

A `ShiftProbe` stands where the model expects its cache. It answers from a BF16 cache, so the
trajectory is the BF16 one, and feeds the same keys, commits and queries to one shadow cache per
key codec. At every measured pass it compares, for a sample of queries, the best packed key under
BF16 with the best one as each shadow holds it (QuantWM, arXiv 2609.26425, tables 3-4 and figure 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from steadykv.cache import KVCache
from steadykv.codecs import Calibration
from steadykv.config import CacheConfig, CodecConfig, preset
from steadykv.errors import ConfigError
from steadykv.evaluation.protocol import ShiftOptions
from steadykv.evaluation.results import SCHEMA_VERSION
from steadykv.evaluation.shadows import CLEAN, DENOISING, Rotation, ShadowProbe
from steadykv.evaluation.shift_example import ExampleRecorder
from steadykv.evaluation.shift_layer import ProbeLayer

CONTRAST_BY_DEFAULT = {"moving": "qvg", "steady": "quantwm"}


@dataclass(frozen=True)
class MethodShift:
    """Shift of one method: averages over layers, query heads, sampled queries and passes.

    top1: share of queries whose best packed key changed, one number per rollout of the batch,
        denoising passes only. top5: 1 - overlap of the five best, likewise.
    clean_top1: top1 over the clean passes that commit a chunk.
    top1_by_layer, top1_by_head, top1_by_step: top1 by layer, by query head (of all layers) and by
        denoising step, averaged over rollouts and everything else; empty where nothing was seen.
    is_packed: whether the keys are packed at all; if not, no selection can change.
    queries: compared selections per rollout (layers x heads x queries x passes) in top1 and top5;
        with 0 (nothing was packed in the window, or keys are dense) the shift is 0.
    """

    top1: list[float]
    top5: list[float]
    clean_top1: list[float]
    top1_by_layer: list[float]
    queries: int
    is_packed: bool = True
    top1_by_head: list[float] = field(default_factory=list)
    top1_by_step: list[float] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """False where keys are packed and no query has met one: that is not a shift of 0."""
        return self.queries > 0 or not self.is_packed


@dataclass(frozen=True)
class TokenShift:
    """Shift of every method and one chosen example (see `ExampleRecorder.describe`), or None."""

    methods: dict[str, MethodShift]
    example: dict[str, Any] | None
    options: ShiftOptions

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


class ShiftProbe(ShadowProbe[ProbeLayer]):
    """A cache for the model to use; `result()` gives every method's shift afterwards.

    methods: name -> configuration. Methods with the same key codec and policy share one shadow, and
        shadows keep values dense, since only keys take part. Dense keys need no shadow: shift 0.
    reference: policy of the BF16 cache that answers (its window must be the methods').
    patch_columns: patches in a row of a frame, to place tokens in the picture.
    example_rows: rollouts of the batch among which the shown query is chosen; 0 records none.
    layout, dtype, device, calibration: as of `KVCache`; the last for shadows that ask for one.
    rotation: the rotary embedding of a host that stores keys before it (see `ProbeLayer`).

    Nothing is copied to the host before `result()`. Beside the caches, decoded keys of the packed
    tokens stay in BF16 (2 bytes x batch x heads x tokens x head_dim per layer and shadow), so that
    a span is decoded once and not at every pass.
    Raises ConfigError for contrast methods that are unknown or whose keys are dense.
    """

    def __init__(
        self,
        methods: Mapping[str, CacheConfig],
        options: ShiftOptions,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        frame_tokens: int,
        patch_columns: int,
        example_rows: int = 1,
        reference: CacheConfig | None = None,
        layout: str = "BSHD",
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        calibration: Calibration | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        def cache(config: CacheConfig) -> KVCache:
            return KVCache(
                num_layers=num_layers,
                num_heads=num_heads,
                head_dim=head_dim,
                frame_tokens=frame_tokens,
                config=config,
                layout=layout,
                dtype=dtype,
                device=device,
                calibration=calibration if config.needs_calibration else None,
            )

        self.options = options
        answering = cache(preset("bf16") if reference is None else reference)
        shadows: dict[str, KVCache] = {}
        self.shadow_of: dict[str, str | None] = {}
        by_codec: dict[Any, str] = {}
        for method, config in methods.items():
            if config.keys.is_dense:
                self.shadow_of[method] = None
                continue
            shadow = by_codec.setdefault((config.keys, config.policy), method)
            self.shadow_of[method] = shadow
            if shadow == method:
                shadows[method] = cache(config.replace(values=CodecConfig("bf16")))
        self._recorder = None
        if example_rows > 0 and shadows:
            self._recorder = ExampleRecorder(
                shadows=tuple(shadows),
                moving=self._contrast("moving"),
                steady=self._contrast("steady") if len(shadows) > 1 else None,
                frame_tokens=frame_tokens,
                patch_columns=patch_columns,
                rows=example_rows,
            )
        layers = [
            ProbeLayer(
                index,
                answering[index],
                {name: shadow[index] for name, shadow in shadows.items()},
                options,
                token_dim=1 if layout == "BSHD" else 2,
                recorder=self._recorder,
                rotation=rotation,
            )
            for index in range(num_layers)
        ]
        super().__init__(answering, shadows, layers)

    def _contrast(self, name: str) -> tuple[str, str]:
        """(method, its shadow) of the option ``name``: "moving" or "steady"."""
        packed = {method: shadow for method, shadow in self.shadow_of.items() if shadow}
        default = CONTRAST_BY_DEFAULT[name]
        if default not in packed:
            default = list(packed)[0 if name == "moving" else -1]
        method = getattr(self.options, name) or default
        if method not in packed:
            raise ConfigError(
                f"ShiftOptions.{name} is {method!r}; expected a method with packed keys: "
                f"{', '.join(packed)}"
            )
        return method, packed[method]

    # --- results ----------------------------------------------------------------------------

    def result(self) -> TokenShift:
        """Shift of every method. Copies the counts to the host, once."""
        for layer in self._layers:
            layer.close_pass(DENOISING)
        measured = [layer.counts for layer in self._layers if layer.counts is not None]
        # [layer, shadow, kind of pass, measure, batch, query head]
        counts = torch.stack(measured).cpu() if measured else None
        methods = {}
        for method, shadow in self.shadow_of.items():
            if shadow is None or counts is None:
                nothing = [0.0] * self._layers[0].rollouts
                methods[method] = MethodShift(
                    nothing, nothing, nothing, [0.0] * len(self), 0, is_packed=shadow is not None
                )
            else:
                place = list(self.shadows).index(shadow)
                methods[method] = self._shift(shadow, counts[:, place])
        example = None if self._recorder is None else self._recorder.describe(self.shadow_of)
        return TokenShift(methods, example, self.options)

    def _shift(self, shadow: str, counts: torch.Tensor) -> MethodShift:
        """From counts [layer, kind of pass, measure, batch, query head] of one shadow."""
        heads = counts.shape[-1]
        by_layer = torch.tensor([layer.queries[shadow] for layer in self._layers])  # [layer, kind]
        total = (by_layer * heads).double()
        summed = counts.sum(dim=-1)  # [layer, kind, measure, batch]
        mean = summed.sum(dim=0) / total.sum(dim=0)[:, None, None].clamp(min=1)
        layers = summed[:, DENOISING, 0].mean(dim=-1) / total[:, DENOISING].clamp(min=1)
        queries = max(1, int(by_layer[:, DENOISING].sum()))
        by_head = counts[:, DENOISING, 0].mean(dim=1).sum(dim=0) / queries
        return MethodShift(
            top1=mean[DENOISING, 0].tolist(),
            top5=mean[DENOISING, 1].tolist(),
            clean_top1=mean[CLEAN, 0].tolist(),
            top1_by_layer=layers.tolist(),
            queries=int(total[:, DENOISING].sum()),
            top1_by_head=by_head.tolist(),
            top1_by_step=self._by_step(shadow, heads),
        )

    def _by_step(self, shadow: str, heads: int) -> list[float]:
        """top1 of each denoising step, 0 for one in which nothing was compared."""
        steps = {step for layer in self._layers for name, step in layer.by_step if name == shadow}
        shares = []
        for step in range(max(steps, default=-1) + 1):
            found = [layer.by_step[shadow, step] for layer in self._layers
                     if (shadow, step) in layer.by_step]  # fmt: skip
            moved = sum(float(counted) for counted, _ in found)
            compared = sum(queries for _, queries in found)
            rollouts = self._layers[0].rollouts
            shares.append(moved / max(1, compared * heads * rollouts))
        return shares


def describe_shift(
    found: TokenShift,
    episodes: Sequence[str],
    seeds: Sequence[int],
    frames: int,
    *,
    is_reference: bool,
) -> dict[str, Any]:
    """What ``token_shift.json`` holds. is_reference: the probed rollout equals the reference."""
    example = found.example
    if example is not None:
        place = example["row"]
        example |= {"episode": episodes[place], "seed": seeds[place]}
    return {
        "version": SCHEMA_VERSION,
        **found.to_dict(),
        "example": example,
        "frames": frames,
        "episodes": list(episodes),
        "seeds": list(seeds),
        # False would mean that the probe saw another trajectory than the reference took.
        "trajectory_is_reference": is_reference,
    }
