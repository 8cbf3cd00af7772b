"""What one training step computes.

Teacher forcing over [history | noisy chunks] under a block-causal mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_mask,
    flex_attention,
)

from steadykv.world.config import WorldConfig
from steadykv.world.model import Table, WorldModel, rotate

# (batch, head, query, key) indices -> whether the query sees the key
Visible = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def visibility(
    config: WorldConfig, frames: int, device: str, windows: Sequence[int] = ()
) -> Visible:
    """Tokens are [history of all chunks | noisy version of all chunks], `frames` frames each.

    A history chunk sees itself and the chunks before it in the window and the sink; a noisy chunk
    sees itself and the *history* of those: exactly what the passes of a rollout see through a
    cache. The window counts the sink, as the cache's policy does. `windows` are those of the rows,
    in frames; without them every row has the model's own.
    """
    half = frames * config.frame_tokens
    chunk_tokens = config.chunk_frames * config.frame_tokens
    sink = config.sink_frames // config.chunk_frames
    frames_of = torch.tensor(windows or (config.window_frames,), device=device)
    recent_of = frames_of // config.chunk_frames - sink

    def visible(
        row: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        recent = recent_of[row] if windows else recent_of[0]
        query_noisy, key_noisy = query >= half, key >= half
        query_chunk, key_chunk = (query % half) // chunk_tokens, (key % half) // chunk_tokens
        distance = query_chunk - key_chunk
        past = ~key_noisy & (distance > 0) & ((distance < recent) | (key_chunk < sink))
        own = (query_noisy == key_noisy) & (distance == 0)
        return past | own

    return visible


BLOCK = 128  # tokens of a block of the sparse mask, both ways


def block_mask(visible: Visible, rows: int, length: int, device: str) -> BlockMask:
    """The blocks of the mask [rows, 1, length, length] that are seen in part or whole.

    A band of queries at a time: 123 frames have a mask of 26,568 x 26,568, which
    `create_block_mask` holds at once unless compiled, and compiled it does not take lengths that
    are no whole number of blocks.
    """
    count = -(-length // BLOCK)
    row = torch.arange(rows, device=device)[:, None, None]
    key, head = torch.arange(length, device=device), torch.zeros((), dtype=torch.long)
    some = torch.empty(rows, 1, count, count, dtype=torch.bool, device=device)
    whole = torch.empty_like(some)
    for block in range(count):
        query = torch.arange(block * BLOCK, min(length, (block + 1) * BLOCK), device=device)
        seen = visible(row, head, query[:, None], key)
        seen = F.pad(seen, (0, count * BLOCK - length, 0, BLOCK - len(query)))
        seen = seen.view(rows, BLOCK, count, BLOCK)
        some[:, 0, block] = seen.any(dim=3).any(dim=1)
        whole[:, 0, block] = seen.all(dim=3).all(dim=1)

    def listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1).int(), order.int()

    return BlockMask.from_kv_blocks(
        *listed(some & ~whole),
        *listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


class ForcedAttention:
    """`attend` of the model for one training step.

    Rotary embedding, then masked attention over both halves. Block-sparse on CUDA; on the CPU,
    where that has no backward pass, a dense mask (small shapes only).
    """

    def __init__(self, config: WorldConfig, frames: int, device: str, windows: Sequence[int] = ()):
        length = 2 * frames * config.frame_tokens
        visible = visibility(config, frames, device, windows)
        rows = len(windows) or 1  # one mask serves all rows that share a window
        self.block_mask: BlockMask | None = None
        self.dense_mask: torch.Tensor | None = None
        if device.startswith("cuda"):
            self.block_mask = block_mask(visible, rows, length, device)
        else:
            self.dense_mask = create_mask(visible, rows, None, length, length, device=device)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Table
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (*rotate(q, k, table), v))
        if self.block_mask is not None:
            out = flex_attention(q, k, v, block_mask=self.block_mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.dense_mask)
        return out.transpose(1, 2)


def predict(
    model: WorldModel,
    history: torch.Tensor,
    history_times: torch.Tensor,
    noisy: torch.Tensor,
    times: torch.Tensor,
    actions: torch.Tensor,
    poses: torch.Tensor,
    attend: ForcedAttention,
    table: Table,
) -> torch.Tensor:
    """Clean latents [B,F,P,C] predicted for `noisy`, given `history`.

    Times [B,F], actions [B,F] and poses [B,F,3] are those of both.
    """
    frames = noisy.shape[1]
    out = model(
        torch.cat((history, noisy), 1),
        torch.cat((history_times, times), 1),
        torch.cat((actions, actions), 1),
        attend,
        table,
        model.sight(torch.cat((poses, poses), 1)),
    )
    return out[:, frames:]


def flow_loss(
    prediction: torch.Tensor,
    clean: torch.Tensor,
    times: torch.Tensor,
    first_chunk: int,
    weight_floor: float,
) -> torch.Tensor:
    """Velocity error of a prediction of clean latents: |x^ - x|^2 / max(1 - t, weight_floor)^2.

    The first chunk has no history and is never generated in use: it counts a tenth.
    """
    error = (prediction - clean).square().mean(dim=(2, 3))
    weight = (1 - times).clamp_min(weight_floor).pow(-2)
    weight = torch.cat((weight[:, :first_chunk] * 0.1, weight[:, first_chunk:]), 1)
    return (weight * error).mean()


def draw_times(
    config: WorldConfig,
    batch: int,
    frames: int,
    grid_share: float,
    shift: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Flow times [B,F], one a chunk.

    Logit-normal around `shift`, a share of them at the times the sampler will ask for.
    """
    chunks, device = frames // config.chunk_frames, generator.device
    free = torch.sigmoid(torch.randn(batch, chunks, generator=generator, device=device) + shift)
    grid = torch.tensor(config.noise_levels, device=device)
    pick = torch.randint(len(grid), (batch, chunks), generator=generator, device=device)
    on_grid = torch.rand(batch, chunks, generator=generator, device=device) < grid_share
    return torch.where(on_grid, grid[pick], free).repeat_interleave(config.chunk_frames, 1)


def draw_history_times(
    config: WorldConfig,
    batch: int,
    frames: int,
    most: float,
    clean_share: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Flow times of the history [B,F], one a chunk.

    A share of the rows is clean; the others have noise up to `most`, power 1.5.
    """
    chunks, device = frames // config.chunk_frames, generator.device
    noise = most * torch.rand(batch, chunks, generator=generator, device=device).pow(1.5)
    clean = torch.rand(batch, 1, generator=generator, device=device) < clean_share
    return (1 - noise.masked_fill(clean, 0.0)).repeat_interleave(config.chunk_frames, 1)


def faded(
    latents: torch.Tensor, chunk_frames: int, share: float, generator: torch.Generator
) -> torch.Tensor:
    """Latents [B,F,P,C] of which a `share` of the rows have chunks that lost some of their detail.

    What a rollout does to its own history little by little: the k-th component shrinks by
    1 + (k / cut)^2, with a cut for each chunk, log-uniform from 4 up to where nothing is lost. The
    model then learns to bring the detail back.
    """
    batch, frames, _, channels = latents.shape
    device = latents.device
    draw = torch.rand(batch, frames // chunk_frames, generator=generator, device=device)
    cut = 4 * (16 * channels / 4) ** draw
    soft = torch.rand(batch, 1, generator=generator, device=device) < share
    cut = torch.where(soft, cut, torch.inf).repeat_interleave(chunk_frames, 1)
    component = torch.arange(channels, device=device)
    return latents / (1 + (component / cut[..., None, None]) ** 2)
