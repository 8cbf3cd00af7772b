"""Every kernel once, small and odd, for a memory checker to watch.

    compute-sanitizer --tool memcheck python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.sanitize --methods qvg

Encodes, decodes whole and in parts, observes queries and attends, with each method, in both
layouts, on lengths and head dims that are no powers of two. Needs a GPU; says which kernels it
launched.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from steadykv import KVCache
from steadykv.config import METHODS, PRESETS, preset
from steadykv.kernels.launch import Launch
from steadykv.ops.attention import BUDGETS

HEADS, FRAME = 3, 80
NAMES = tuple(name for name in PRESETS if "calibrated" not in name)


def run(method: str, layout: str, head_dim: int, batch: int) -> None:
    """Two spans and an open chunk; read and attended to in both memory modes."""
    config = preset(method, window_frames=7, sink_frames=1)
    if "centroids" in {*METHODS[config.keys.method], *METHODS[config.values.method]}:
        config = config.replace(centroids=8)  # of fewer tokens, more would not be worth packing
    cache = KVCache(1, HEADS, head_dim, FRAME, config, layout=layout, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    layer = cache[0]
    for chunk in range(4):
        size = (batch, 2 * FRAME + 7, HEADS, head_dim)
        k, v, q = (torch.randn(size, device="cuda", generator=generator) for _ in range(3))
        k, v, q = (x if layout == "BSHD" else x.transpose(1, 2) for x in (k, v, q))
        k, v, q = k.bfloat16(), v.bfloat16(), q.bfloat16()
        layer.write(k, v, chunk * (2 * FRAME + 7))
        layer.observe_queries(q)
        layer.read()
        layer.read_tensor("key", [(layer.spans()[-1][0] + 3, layer.spans()[-1][1] - 5)])
        for memory in ("default", "small"):
            layer.attend(q, memory=memory)
    cache.commit()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=NAMES)
    given = parser.parse_args()
    BUDGETS["small"] = 1 << 17  # cuts even these windows into pieces
    launched: set[str] = set()
    original = Launch.__call__

    def launch_and_note(self: Launch, *args: Any) -> None:
        launched.add(self.kernel.__name__)
        original(self, *args)

    Launch.__call__ = launch_and_note  # type: ignore[method-assign]
    for method in given.methods:
        for layout, head_dim, batch in (("BSHD", 128, 1), ("BHSD", 64, 2), ("BSHD", 80, 1)):
            run(method, layout, head_dim, batch)
        print(f"{method}: ok", flush=True)
    print("kernels:", ", ".join(sorted(launched)))


if __name__ == "__main__":
    main()
