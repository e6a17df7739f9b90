"""Drives a model over a paged KV cache, as the worker does: for tests of whole models.

Blocks are handed out in scrambled order, apart for each layer type; every slot that no token has
written holds NaN, and table entries wholly before a sliding window point at such a block, so that
a read of what is not there shows.
"""

from collections.abc import Mapping, Sequence

import torch

from trimaran.model.kernels.base import AttentionMetadata
from trimaran.model.models.decoder import CausalLM


class PagedRun:
    """``num_requests`` sequences of at most ``max_len`` tokens."""

    def __init__(
        self,
        model: CausalLM,
        *,
        dtype: torch.dtype,
        num_requests: int = 1,
        max_len: int = 512,
        block_size: int = 16,
    ) -> None:
        shape = model.architecture
        self.model = model
        self.lengths = [0] * num_requests
        self._block_size = block_size
        blocks = -(-max_len // block_size)
        num_blocks = 1 + blocks * num_requests
        generator = torch.Generator().manual_seed(7)
        self._tables = {
            kind: (torch.randperm(num_blocks - 1, generator=generator) + 1)
            .view(num_requests, blocks)
            .int()
            for kind in sorted(set(shape.layer_types))
        }
        self._caches = [
            torch.full(
                (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim),
                float("nan"),
                dtype=dtype,
            )
            for _ in range(shape.num_layers)
        ]

    def step(self, chunks: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
        """request -> its next tokens. Returns each one's fp32 logits [n, vocab_size]."""
        tokens = torch.tensor([token for chunk in chunks.values() for token in chunk])
        positions = torch.cat(
            [self.lengths[r] + torch.arange(len(chunk)) for r, chunk in chunks.items()]
        )
        kinds = {kind: self._metadata(kind, chunks, positions) for kind in self._tables}
        metadata = [kinds[kind] for kind in self.model.architecture.layer_types]
        with torch.inference_mode():
            hidden = self.model.forward(tokens, positions, self._caches, metadata)
            logits = self.model.logits(hidden).clone()  # its memory is reused
        for request, chunk in chunks.items():
            self.lengths[request] += len(chunk)
        return list(logits.split([len(chunk) for chunk in chunks.values()]))

    def _metadata(
        self, kind: str, chunks: Mapping[int, Sequence[int]], positions: torch.Tensor
    ) -> AttentionMetadata:
        size = self._block_size
        window = self.model.architecture.sliding_window if kind == "sliding" else 0
        counts = torch.tensor([len(chunk) for chunk in chunks.values()])
        rows = torch.tensor(list(chunks))
        table = self._tables[kind][rows]
        starts = torch.tensor([self.lengths[request] for request in chunks])
        owners = torch.repeat_interleave(torch.arange(len(chunks)), counts)
        slots = table[owners, positions // size].long() * size + positions % size
        if window:
            for row, start in zip(table, starts.tolist(), strict=True):
                row[: max(0, start - window + 1) // size] = 0
        return AttentionMetadata(
            query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
            seq_lens=(starts + counts).int(),
            block_table=table,
            slot_mapping=slots,
            max_query_len=int(counts.max()),
            max_seq_len=int((starts + counts).max()),
            window=window,
        )
