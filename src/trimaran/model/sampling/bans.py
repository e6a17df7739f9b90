"""Tokens that may not come at this point: the ends before min_tokens, the last of a bad word.

Owns: these two features. Called through ``batch``.
"""

import numpy as np
import torch

from trimaran.messages import NewRequestData
from trimaran.model.sampling.rows import SampleRows, ban, within


class MinTokens:
    """Nothing that would end the request before it has min_tokens output tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ends: dict[int, tuple[int, np.ndarray]] = {}  # min_tokens, ids

    def enter(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        if params.min_tokens > len(request.token_ids) - request.prompt_len:
            ends = list(params.stop_token_ids)
            if not params.ignore_eos:
                ends += request.eos_token_ids
            self._ends[row] = (params.min_tokens, within(ends, self._vocab_size))

    def leave(self, row: int) -> None:
        self._ends.pop(row, None)

    @property
    def num_rows(self) -> int:
        return len(self._ends)

    def apply(self, logits: torch.Tensor, sampling: SampleRows) -> None:
        outputs = (sampling.positions - sampling.prompt_lens).tolist()
        banned = []
        for i, (min_tokens, ids) in sampling.active(self._ends):
            if outputs[i] < min_tokens:
                banned.append((i, ids))
            else:  # never again: outputs only grow
                del self._ends[int(sampling.rows[i])]
        ban(logits, banned)


class BadWords:
    """No token that completes one of the sequences in prompt + output."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # By the last but one token of a word (None: it has one token): (beginning, last token).
        self._words: dict[int, dict[int | None, list[tuple[list[int], int]]]] = {}

    def enter(self, row: int, request: NewRequestData) -> None:
        words: dict[int | None, list[tuple[list[int], int]]] = {}
        for word in request.bad_words_token_ids:
            if word and 0 <= word[-1] < self._vocab_size:
                beginning, last = word[:-1], word[-1]
                words.setdefault(beginning[-1] if beginning else None, []).append((beginning, last))
        if words:
            self._words[row] = words

    def leave(self, row: int) -> None:
        self._words.pop(row, None)

    @property
    def num_rows(self) -> int:
        return len(self._words)

    def apply(self, logits: torch.Tensor, sampling: SampleRows) -> None:
        banned = []
        for i, words in sampling.active(self._words):
            known = sampling.token_ids[sampling.rows[i], : sampling.positions[i]]
            candidates = words.get(None, []) + words.get(int(known[-1]), [])
            ids = [
                last
                for beginning, last in candidates
                if not beginning or known[-len(beginning) :].tolist() == beginning
            ]
            banned.append((i, np.asarray(ids, np.int64)))
        ban(logits, banned)
