"""The sequences that sample in a step, as columns, and sparse changes to their logits.

Owns: ``SampleRows``, the ``LogitsFeature`` interface, and how a feature reaches single logits of
many rows at once. Built by ``worker/model_runner``; read by every feature of this package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from trimaran.messages import NewRequestData

State = TypeVar("State")

# The logit of a token that may not come now: below all others, yet above NEVER, so that a request
# whose settings exclude one another (allowed_token_ids [eos] with min_tokens 4) still gets a token.
BANNED = -1e30


@dataclass(frozen=True)
class SampleRows:
    """N sequences, in the order of the logits' rows."""

    rows: np.ndarray  # int64 [N]: row in the persistent batch
    positions: np.ndarray  # int64 [N]: known tokens so far, the position of the token to come
    prompt_lens: np.ndarray  # int64 [N]
    token_ids: np.ndarray  # int32 [batch rows, capacity]: known tokens of the whole batch

    def piece(self, part: slice) -> "SampleRows":
        return SampleRows(
            self.rows[part], self.positions[part], self.prompt_lens[part], self.token_ids
        )

    def active(self, states: Mapping[int, State]) -> list[tuple[int, State]]:
        """(row of the logits, state) of the sequences that have a state."""
        if not states:
            return []
        return [(i, states[row]) for i, row in enumerate(self.rows.tolist()) if row in states]


class LogitsFeature(Protocol):
    """One way to change logits before the draw; costs nothing while no row uses it."""

    def enter(self, row: int, request: NewRequestData) -> None: ...

    def leave(self, row: int) -> None:
        """The row may not have used the feature."""
        ...

    @property
    def num_rows(self) -> int:
        """That use it."""
        ...

    def apply(self, logits: torch.Tensor, sampling: SampleRows) -> None:
        """Change logits fp32 [N, width], which are contiguous, in place."""
        ...


def flat_index(width: int, ids_of_rows: list[tuple[int, np.ndarray]]) -> torch.Tensor:
    """Indices into logits.view(-1) of the ids of each (row, int64 ids)."""
    return torch.from_numpy(np.concatenate([row * width + ids for row, ids in ids_of_rows]))


def within(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int64, unique, without ids the model does not have (a tokenizer may know more)."""
    array = np.unique(np.asarray(ids, np.int64))
    return array[(array >= 0) & (array < vocab_size)]


def ban(logits: torch.Tensor, ids_of_rows: list[tuple[int, np.ndarray]]) -> None:
    """Lower these logits to BANNED, in place."""
    if ids_of_rows:
        flat = logits.view(-1)
        index = flat_index(logits.shape[1], ids_of_rows)
        flat[index] = flat[index].clamp_(max=BANNED)
