"""logit_bias and allowed_token_ids: fixed changes that a request asks for.

Owns: these two features. Called through ``batch``.
"""

import numpy as np
import torch

from trimaran.messages import NewRequestData
from trimaran.model.sampling.rows import SampleRows, flat_index, within
from trimaran.model.sampling.vocabulary_blocks import NEVER


class LogitBias:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # ids, values

    def enter(self, row: int, request: NewRequestData) -> None:
        if bias := request.sampling_params.logit_bias:
            ids = within(list(bias), self._vocab_size)
            values = np.asarray([bias[token_id] for token_id in ids.tolist()], np.float32)
            self._biases[row] = (ids, values)

    def leave(self, row: int) -> None:
        self._biases.pop(row, None)

    @property
    def num_rows(self) -> int:
        return len(self._biases)

    def apply(self, logits: torch.Tensor, sampling: SampleRows) -> None:
        active = sampling.active(self._biases)
        if not active:
            return
        index = flat_index(logits.shape[1], [(i, ids) for i, (ids, _) in active])
        values = torch.from_numpy(np.concatenate([values for _, (_, values) in active]))
        logits.view(-1)[index] += values


class AllowedTokens:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._allowed: dict[int, torch.Tensor] = {}

    def enter(self, row: int, request: NewRequestData) -> None:
        allowed = request.sampling_params.allowed_token_ids
        if allowed is not None:
            self._allowed[row] = torch.from_numpy(within(allowed, self._vocab_size))

    def leave(self, row: int) -> None:
        self._allowed.pop(row, None)

    @property
    def num_rows(self) -> int:
        return len(self._allowed)

    def apply(self, logits: torch.Tensor, sampling: SampleRows) -> None:
        for i, ids in sampling.active(self._allowed):
            kept = logits[i, ids]
            logits[i] = NEVER
            logits[i, ids] = kept
