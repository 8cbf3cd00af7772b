"""The processes of a run, one a GPU, and the mean of their gradients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Process:
    """This process among the `count` that torchrun started."""

    rank: int
    count: int
    device: str


def start_process(device: str) -> Process:
    """Join the other processes, if there are any; "cuda" becomes this process's own device."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if count > 1:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        dist.all_reduce(torch.zeros(1, device="cuda"))  # connect now, not in the first timed step
    return Process(rank, count, f"cuda:{rank}" if device == "cuda" else device)


def average_gradients(parameters: Sequence[torch.Tensor], processes: int) -> None:
    """Mean of the gradients over all processes, as one message."""
    if processes == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(piece.view_as(p))
