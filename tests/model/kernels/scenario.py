"""Paged batches as the model runner makes them, with NaN wherever a kernel must not look."""

from dataclasses import dataclass

import torch

from trimaran.model.kernels.base import AttentionMetadata


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 256
    block_size: int = 16
    window: int = 0
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Paged:
    """Requests over one cache. ``lengths`` holds (tokens of this step, context with them)."""

    shape: Shape
    lengths: list[tuple[int, int]]
    q: torch.Tensor
    cache: torch.Tensor
    metadata: AttentionMetadata
    keys: list[torch.Tensor]  # per request [context, KH, D]; NaN where no token may look
    values: list[torch.Tensor]

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5


def make_metadata(
    lengths: list[tuple[int, int]], table: torch.Tensor, block_size: int, window: int
) -> AttentionMetadata:
    slots = [
        int(table[r, at // block_size]) * block_size + at % block_size
        for r, (tokens, context) in enumerate(lengths)
        for at in range(context - tokens, context)
    ]
    return AttentionMetadata(
        query_start=torch.tensor([0] + [n for n, _ in lengths]).cumsum(0).int(),
        seq_lens=torch.tensor([context for _, context in lengths]).int(),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(tokens for tokens, _ in lengths),
        max_seq_len=max(context for _, context in lengths),
        window=window,
    )


def make_paged(shape: Shape, lengths: list[tuple[int, int]], seed: int = 0) -> Paged:
    """Random K, V and q; blocks scattered; blocks before the window and unwritten slots are NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = shape.block_size
    columns = max(-(-context // size) for _, context in lengths)
    blocks = torch.randperm(len(lengths) * columns, generator=generator).int() + 1
    table = blocks.view(len(lengths), columns).contiguous()
    cache = torch.full(
        (len(lengths) * columns + 1, 2, shape.kv_heads, size, shape.head_dim),
        float("nan"),
        dtype=shape.dtype,
    )
    kept: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for r, (tokens, context) in enumerate(lengths):
        first = max(0, context - tokens - shape.window + 1) if shape.window else 0
        first -= first % size
        for part in (0, 1):
            whole = torch.randn(context, shape.kv_heads, shape.head_dim, generator=generator)
            whole = whole.to(shape.dtype)
            whole[:first] = float("nan")
            kept[part].append(whole)
            for at in range(first, context, size):
                piece = whole[at : at + size]
                cache[int(table[r, at // size]), part, :, : len(piece)] = piece.transpose(0, 1)
    tokens = sum(n for n, _ in lengths)
    q = torch.randn(tokens, shape.heads, shape.head_dim, generator=generator).to(shape.dtype)
    metadata = make_metadata(lengths, table, size, shape.window)
    return Paged(shape, lengths, q, cache, metadata, *kept)
