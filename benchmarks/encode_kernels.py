"""GPU time of each kernel of an encode, by torch's profiler: what is left when the host is fast.

    python -m benchmarks.encode_kernels --methods qvg quantwm steady

Keys and values of one layer of LongCat, [1, 32, 29640, 128], around 256 means. Needs a GPU.
For times of whole calls beside each other, see `benchmarks.costs`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from steadykv.codecs import QueryMoment, encode
from steadykv.config import CodecConfig, parse_method

from .costs import QUERIES, SHAPES
from .layer_work import sample, sample_moment

HEADS, TOKENS, WIDTH = SHAPES["longcat"]
CALLS = 3


def kernel_times(x: Tensor, config: CodecConfig, moment: QueryMoment) -> dict[str, float]:
    """Milliseconds of each kernel in one encode, mean of three after two to warm up."""
    stats = moment if config.needs_queries else None
    for _ in range(2):
        encode(x, config, stats=stats)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            encode(x, config, stats=stats)
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]] += event.device_time / 1e3 / CALLS
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["qvg", "quantwm", "steady"])
    given = parser.parse_args()
    rng = torch.Generator("cuda").manual_seed(0)
    k, v = (sample(HEADS, TOKENS, WIDTH, rng) for _ in range(2))
    moment = sample_moment(1, HEADS, QUERIES, WIDTH, rng)
    for method in given.methods:
        config = parse_method(method)
        for name, x, codec in (("keys", k, config.keys), ("values", v, config.values)):
            times = kernel_times(x, codec, moment)
            print(f"{method} {name}: {sum(times.values()):.3f} ms")
            for kernel, ms in sorted(times.items(), key=lambda item: -item[1]):
                print(f"  {ms:.4f}  {kernel}")


if __name__ == "__main__":
    main()
