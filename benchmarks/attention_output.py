"""How far packed caches move the output of attention, on the trajectory of BF16.

    python -m benchmarks.attention_output --device cuda --episodes 64 --seeds 3 --frames 24 \\
        --methods qvg quantwm --out attention.csv

Held-out episodes of the embedded world model, or of --world. A BF16 cache answers the model; every
method has a shadow cache that is fed the same keys, values, queries and commits, and so packs and
fades what the method would. In the denoising passes of every chunk that reads packed data, every
--query-stride'th query attends to the whole window (packed, waiting and open tokens) as BF16 has it
and as the shadow gives it back.

A row of a method, episode and seed holds `output_error`: the relative error of the outputs, as
`steadykv tensors` defines it, the ratio of Frobenius norms over all heads, queries and passes of a
layer, then the mean over layers. That is the headline. `output_error_keys` and
`output_error_values` are the same with only the keys or the values packed. Beside it stand
`output_error_heads`, the mean over layers and heads of each head's ratio, `output_error_pooled`,
one ratio over everything, where layers of larger outputs weigh more, the ratio of each layer, and
of each of its query heads (`layer_0_head_0`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steadykv.cli.common import checked_device
from steadykv.cli.compare import BATCH
from steadykv.cli.session import check_frames, network_dtype
from steadykv.cli.values import walk_numbers
from steadykv.config import CacheConfig, CachePolicy, preset
from steadykv.errors import SteadyKVError
from steadykv.evaluation.fingerprint import walks_hash, world_hash
from steadykv.evaluation.metrics.selection import key_logits
from steadykv.evaluation.protocol import Protocol, first_packed_frame
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.results import write_csv
from steadykv.evaluation.rollouts import new_cache, refuse_nonfinite
from steadykv.evaluation.shadows import DENOISING, Rotation, ShadowLayer, ShadowProbe
from steadykv.ops.precision import full_precision
from steadykv.world import Episodes, WorldModel, load_episodes, load_world, rollout
from steadykv.world.rope import rotation_of
from steadykv.world.shipped import walks_of

STORES = {"after_rope": "post", "before_rope": "pre"}
PARTS = {"": 3, "_keys": 1, "_values": 2}
"""What is packed -> place of its error among the energies; place 0 is the outputs themselves."""


def output_energies(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Sums over queries and channels, FP64 [len(packed), 4, B, Hq]: |o|^2 and |o' - o|^2.

    o: the outputs of queries [B, Hq, Q, D] over keys and values [B, H, N, D]; o': with the keys of
    a pair of `packed`, with its values, with both. FP32, the scale D^-0.5; query head i reads key
    head floor(i * H / Hq). Allocates FP32 copies of two pairs and two times the logits
    [B, Hq, Q, N]. Raises ShapeError.
    """

    def weights(k: torch.Tensor) -> torch.Tensor:
        found = key_logits(queries.float() * queries.shape[-1] ** -0.5, k).softmax(dim=-1)
        return found.view(*k.shape[:2], -1, k.shape[2])  # the queries of a key head: [B, H, G*Q, N]

    def energy(x: torch.Tensor) -> torch.Tensor:
        by_head = x.reshape(*queries.shape)
        return by_head.square().sum(dim=(-2, -1), dtype=torch.float64)

    with full_precision(queries.device):
        attention, v = weights(keys), values.float()
        output = attention @ v
        sums = []
        for other_keys, other_values in packed:
            other_attention, other_v = weights(other_keys), other_values.float()
            others = other_attention @ v, attention @ other_v, other_attention @ other_v
            sums.append(torch.stack([energy(output), *(energy(o - output) for o in others)]))
    return torch.stack(sums)


class OutputLayer(ShadowLayer):
    """Counts `output_energies` of the chunks from `first_token` on."""

    first_token = 0

    def _is_due(self, start: int) -> bool:
        return start >= self.first_token

    def _measure(self, queries: torch.Tensor, start: int) -> None:
        ranges = self.reference.spans()
        read = {name: layer.read() for name, layer in (("", self.reference), *self.shadows.items())}
        window = {
            name: (self._rotated(self._heads_first(k), ranges), self._heads_first(v))
            for name, (k, v) in read.items()
        }
        sums = output_energies(queries, *window.pop(""), list(window.values()))
        for name, own in zip(window, sums, strict=True):
            self._pending[name] = own, queries.shape[2]


class OutputProbe(ShadowProbe[OutputLayer]):
    """A cache for the model to use: see `output_energies` and the head of this file.

    methods: name -> configuration, all under one window. first_frame: of the first measured chunk.
    rotation: the rotary embedding where keys are stored before it.
    """

    def __init__(
        self,
        world: WorldModel,
        methods: Mapping[str, CacheConfig],
        *,
        first_frame: int,
        query_stride: int,
        rotation: Rotation | None = None,
    ) -> None:
        policy = next(iter(methods.values())).policy
        reference = new_cache(world, preset("bf16").replace(policy=policy))
        shadows = {name: new_cache(world, config) for name, config in methods.items()}
        layers = []
        for index in range(world.config.num_layers):
            own = {name: shadow[index] for name, shadow in shadows.items()}
            layers.append(
                OutputLayer(index, reference[index], own, query_stride, 1, rotation=rotation)
            )
            layers[-1].first_token = first_frame * world.config.frame_tokens
        super().__init__(reference, shadows, layers)

    def energies(self) -> dict[str, torch.Tensor]:
        """Of the denoising passes, by method: FP64 [layer, 4, B, Hq] on the CPU."""
        for layer in self._layers:
            layer.close_pass(DENOISING)
        measured = [layer.counts for layer in self._layers if layer.counts is not None]
        if not measured:
            raise SystemExit("nothing was measured: ask for more frames")
        counts = torch.stack(measured)[:, :, DENOISING].cpu()
        return {name: counts[:, place] for place, name in enumerate(self.shadows)}

    @property
    def queries(self) -> int:
        """Measured queries of one layer and head, in a rollout."""
        return max(self._layers[0].queries[name][DENOISING] for name in self.shadows)


def errors_of(energies: torch.Tensor) -> list[dict[str, float]]:
    """What a row says of each rollout, from energies [layer, 4, B, Hq]."""
    layers = _ratios(energies.sum(dim=-1))  # [layer, 3, B]
    heads = _ratios(energies)[:, 2]  # [layer, B, Hq]
    pooled = _ratios(energies.sum(dim=(0, 3))[None])[0]
    rows = []
    for rollout_number in range(energies.shape[2]):
        own = layers[:, :, rollout_number]
        row = {f"output_error{part}": own[:, i - 1].mean().item() for part, i in PARTS.items()}
        by_head = heads[:, rollout_number]
        row["output_error_heads"] = by_head.mean().item()
        row["output_error_pooled"] = pooled[2, rollout_number].item()
        row |= {f"layer_{i}": value for i, value in enumerate(own[:, 2].tolist())}
        row |= {
            f"layer_{i}_head_{j}": value
            for i, values in enumerate(by_head.tolist())
            for j, value in enumerate(values)
        }
        rows.append(row)
    return rows


def _ratios(energies: torch.Tensor) -> torch.Tensor:
    """Roots of error over output [layer, 4, ...] -> [layer, 3, ...]; 0 where nothing was lost."""
    output, errors = energies[:, :1], energies[:, 1:]
    return torch.where(errors == 0, 0.0, (errors / output).sqrt())


def measure(
    world: WorldModel,
    episodes: Episodes,
    protocol: Protocol,
    query_stride: int,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """A row for each method, episode and seed of the protocol, batch by batch."""
    configs, shape = protocol.configurations(), world.config
    device = next(world.parameters()).device
    first = first_packed_frame(protocol.policy, shape.chunk_frames)
    if protocol.frames + shape.chunk_frames <= first:
        raise SystemExit(f"frame {first} is the first that reads packed data; ask for more frames")
    facts = {
        "frames": protocol.frames,
        "first_frame": first,
        "key_rope": protocol.key_rope,
        "span_chunks": protocol.policy.span_chunks,
        "query_stride": query_stride,
        "world_dtype": str(next(world.parameters()).dtype).removeprefix("torch."),
        "world_sha256": world_hash(world),
        "walks_sha256": walks_hash(episodes),
        **environment(device),
    }
    plan = [(i, seed) for i in range(len(episodes)) for seed in protocol.seeds]
    rows = []
    for begin in range(0, len(plan), protocol.max_batch):
        part = plan[begin : begin + protocol.max_batch]
        batch, seeds = episodes.select([i for i, _ in part]), [seed for _, seed in part]
        probe = OutputProbe(
            world,
            configs,
            first_frame=first,
            query_stride=query_stride,
            rotation=None if protocol.key_rope == "post" else rotation_of(shape, device),
        )
        check = refuse_nonfinite(probe, "the shadow caches")
        rollout(world, batch, probe, protocol.frames, seeds, check, key_rope=protocol.key_rope)
        for method, energies in probe.energies().items():
            ledger = probe.shadows[method].ledger()
            for name, seed, errors in zip(batch.names, seeds, errors_of(energies), strict=True):
                rows.append(
                    {
                        "method": method,
                        "episode": name,
                        "seed": seed,
                        **errors,
                        "queries": probe.queries,
                        "bits_per_element": ledger.bits_per_element,
                        **facts,
                    }
                )
        report(f"rollouts {begin + 1}-{begin + len(part)} of {len(plan)}")
    return sorted(rows, key=lambda row: list(configs).index(row["method"]))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Means over rollouts."""
    names = [f"output_error{part}" for part in (*PARTS, "_heads", "_pooled")]
    lines = ["  ".join(["bits ", *(f"{name.removeprefix('output_'):>12}" for name in names)])]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        means = [sum(row[name] for row in own) / len(own) for name in names]
        cells = "  ".join(f"{mean:12.4f}" for mean in means)
        lines.append(f"{own[0]['bits_per_element']:5.3f}  {cells}  {method}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["qvg", "qvg4", "quantwm"])
    parser.add_argument("--episodes", type=int, default=8, help="held-out walks")
    parser.add_argument("--first-walk", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="noise seeds a walk: 0, 1, ...")
    parser.add_argument("--frames", type=int, default=24, help="generated ones, a multiple of 3")
    parser.add_argument("--span-chunks", type=int, default=2)
    parser.add_argument("--centroids", type=int, default=32)
    parser.add_argument("--store-keys", choices=STORES, default="after_rope")
    parser.add_argument("--query-stride", type=int, default=13, help="13 meets all rows of patches")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="what the network computes in, as for steadykv compare",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, help="rollouts that run together")
    parser.add_argument("--world", help="name of a shipped world, or weights of another one")
    parser.add_argument("--walks", type=Path, help="archive of other beginnings of walks")
    parser.add_argument("--out", type=Path, help="CSV file of the rows")
    given = parser.parse_args(arguments)
    for name in ("episodes", "seeds", "frames", "query_stride"):
        if getattr(given, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(given, name)}: expected 1 or more"
            )
    try:
        device = checked_device(given.device)
        episodes = load_episodes(
            walk_numbers(given.first_walk, given.episodes), walks_of(given.world, given.walks)
        )
        world = load_world(given.world, device=device, dtype=network_dtype(device, given.dtype))
        shape = world.config
        check_frames(given.frames, shape.chunk_frames, episodes.actions.shape[1])
        policy = CachePolicy(
            span_chunks=given.span_chunks,
            window_frames=shape.window_frames,
            sink_frames=shape.sink_frames,
        )
        protocol = Protocol(
            tuple(given.methods),
            tuple(range(given.seeds)),
            given.frames,
            policy,
            centroids=given.centroids,
            floor=False,
            max_batch=given.batch or BATCH[device.type],
            shift=None,
            key_rope=STORES[given.store_keys],  # type: ignore[arg-type]
        )
        rows = measure(world, episodes, protocol, given.query_stride)
    except SteadyKVError as error:
        raise SystemExit(str(error)) from error
    print(table(rows))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_csv(given.out, rows)


if __name__ == "__main__":
    main()
