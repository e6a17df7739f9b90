"""The persistent batch: what is known of every running sequence, and one step's model inputs.

Owns: rows (a sequence keeps its row from entering to leaving), known tokens, block tables, and the
vectorised building of a step's arrays. Knows nothing of sampling or of the model. Called by
``model_runner``.

Nothing here loops over tokens, and of a step's sequences only those that enter, leave or get a
block are touched in Python.
"""

from dataclasses import dataclass

import numpy as np
import torch

from trimaran.messages import KVCacheLayout, NewRequestData, SchedulerOutput
from trimaran.model.kernels.base import AttentionMetadata

_FIRST_COLUMNS = 1024  # tokens; more are added when a sequence needs them


@dataclass(frozen=True)
class StepInputs:
    """R sequences in the plan's order, T tokens one after another."""

    rows: np.ndarray  # int64 [R]: row of each sequence in the batch
    computed: np.ndarray  # int64 [R]: tokens whose KV is in place before the step
    query_start: np.ndarray  # int64 [R + 1]
    samples: np.ndarray  # bool [R]: the step reaches the end of the known tokens
    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    metadata: list[AttentionMetadata]  # per KV group


class InputBatch:
    """``max_num_seqs`` rows. A plan is applied first (``apply``), then built (``build``)."""

    def __init__(self, layout: KVCacheLayout, max_num_seqs: int) -> None:
        self._layout = layout
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._row_of: dict[str, int] = {}
        self._num_blocks = np.zeros((len(layout.groups), max_num_seqs), np.int64)
        self._tables = np.zeros(
            (len(layout.groups), max_num_seqs, self._blocks(_FIRST_COLUMNS)), np.int32
        )
        self.token_ids = np.zeros((max_num_seqs, _FIRST_COLUMNS), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)  # known: prompt and output
        self.prompt_lens = np.zeros(max_num_seqs, np.int64)
        self._request_ids: list[str] = []  # of the last plan, and their rows
        self._rows = np.zeros(0, np.int64)

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def leave(self, request_id: str) -> int:
        """Returns the row that is free now."""
        row = self._row_of.pop(request_id)
        self._free_rows.append(row)
        self._request_ids = []
        return row

    def enter(self, request: NewRequestData) -> int:
        """Returns the sequence's row."""
        row = self._row_of[request.request_id] = self._free_rows.pop()
        count = len(request.token_ids)
        self._reserve_tokens(count + 1)
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.prompt_lens[row] = request.prompt_len
        self._num_blocks[:, row] = 0
        self._append_blocks(row, request.block_ids)
        self._request_ids = []
        return row

    def append_blocks(self, plan: SchedulerOutput) -> None:
        """Add the plan's new blocks to the tables."""
        for request_id, blocks in zip(plan.request_ids, plan.new_block_ids, strict=True):
            if blocks is not None:
                self._append_blocks(self._row_of[request_id], blocks)

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each of these rows."""
        at = self.num_tokens[rows]
        self._reserve_tokens(int(at.max()) + 1)
        self.token_ids[rows, at] = token_ids
        self.num_tokens[rows] = at + 1

    def build(self, plan: SchedulerOutput) -> StepInputs:
        """The step's inputs; the plan has at least one sequence."""
        rows = self._rows_of_plan(plan.request_ids)
        computed = np.asarray(plan.num_computed_tokens, np.int64)
        scheduled = np.asarray(plan.num_scheduled_tokens, np.int64)
        seq_lens = computed + scheduled
        query_start = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(scheduled, out=query_start[1:])
        if query_start[-1] == len(rows):  # one token each
            positions, token_rows = computed, rows
        else:
            lane = np.repeat(np.arange(len(rows)), scheduled)
            positions = np.arange(query_start[-1]) + (computed - query_start[:-1])[lane]
            token_rows = rows[lane]
        block_index, offset = np.divmod(positions, self._layout.block_size)
        blocks = np.ascontiguousarray(self._tables[:, token_rows, block_index])
        slots = torch.from_numpy(blocks * np.int64(self._layout.block_size) + offset)
        tables = torch.from_numpy(self._step_tables(rows, int(seq_lens.max())))
        starts = torch.from_numpy(query_start.astype(np.int32))
        lengths = torch.from_numpy(seq_lens.astype(np.int32))
        longest_query, longest = int(scheduled.max()), int(seq_lens.max())
        return StepInputs(
            rows=rows,
            computed=computed,
            query_start=query_start,
            samples=seq_lens == self.num_tokens[rows],
            input_ids=torch.from_numpy(self.token_ids[token_rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            metadata=[
                AttentionMetadata(
                    query_start=starts,
                    seq_lens=lengths,
                    block_table=tables[index],
                    slot_mapping=slots[index],
                    max_query_len=longest_query,
                    max_seq_len=longest,
                    window=group.window,
                )
                for index, group in enumerate(self._layout.groups)
            ],
        )

    def _rows_of_plan(self, request_ids: list[str]) -> np.ndarray:
        if request_ids != self._request_ids:
            self._request_ids = list(request_ids)
            self._rows = np.array([self._row_of[i] for i in request_ids], np.int64)
        return self._rows

    def _step_tables(self, rows: np.ndarray, longest: int) -> np.ndarray:
        """int32 [groups, R, columns] in the plan's order."""
        return np.ascontiguousarray(self._tables[:, rows, : self._blocks(longest)])

    def _append_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        for group, blocks in enumerate(block_ids):
            if blocks:
                start = int(self._num_blocks[group, row])
                stop = start + len(blocks)
                if stop > self._tables.shape[2]:
                    self._tables = _widened(self._tables, stop)
                self._tables[group, row, start:stop] = blocks
                self._num_blocks[group, row] = stop

    def _reserve_tokens(self, count: int) -> None:
        if count > self.token_ids.shape[1]:
            self.token_ids = _widened(self.token_ids, count)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._layout.block_size)


def _widened(array: np.ndarray, columns: int) -> np.ndarray:
    """A copy with at least that many columns, at least doubled so that growing stays cheap."""
    wide = np.zeros((*array.shape[:-1], max(columns, 2 * array.shape[-1])), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide
