"""Repetition, frequency and presence penalties, over sparse counts kept per sequence.

Owns: which tokens a sequence has seen and how often it has put them out, updated token by token.
Semantics as in vLLM: repetition_penalty over prompt and output (a positive logit is divided by it,
another multiplied), then frequency_penalty times the count in the output, then presence_penalty
once per token in the output. One of the features of ``batch``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from trimaran.messages import NewRequestData
from trimaran.model.sampling.rows import SampleRows, flat_index


class _SeenTokens:
    """Distinct tokens of a sequence and their counts in its output."""

    def __init__(self, request: NewRequestData, vocab_size: int) -> None:
        params = request.sampling_params
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        tokens = np.asarray(request.token_ids, np.int64)
        output, output_counts = np.unique(tokens[request.prompt_len :], return_counts=True)
        # The prompt matters to repetition_penalty only, and only if it has tokens of its own.
        counts_prompt = self.repetition != 1.0 and request.prompt_embeds is None
        seen = np.unique(tokens) if counts_prompt else output
        counts = np.zeros(len(seen), np.float32)
        counts[np.searchsorted(seen, output)] = output_counts
        fits = seen < vocab_size
        self._ids, self._counts = seen[fits], counts[fits]
        self._place = {token: i for i, token in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._place)]

    def append(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                room = max(64, place)
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
            self._ids[place] = token_id
        self._counts[place] += 1.0


class Penalties:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen: dict[int, _SeenTokens] = {}

    def enter(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        if (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        ):
            self._seen[row] = _SeenTokens(request, self._vocab_size)

    def leave(self, row: int) -> None:
        self._seen.pop(row, None)

    @property
    def num_rows(self) -> int:
        return len(self._seen)

    def append(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """These tokens were sampled in these rows."""
        if not self._seen:
            return
        for row, token_id in zip(rows, token_ids, strict=True):
            if row in self._seen:
                self._seen[row].append(token_id)

    def apply(self, logits: torch.Tensor, sampling: SampleRows) -> None:
        active = sampling.active(self._seen)
        if not active:
            return
        sizes = [len(seen.ids) for _, seen in active]

        def column(values: list[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.asarray(values, np.float32), sizes))

        repetition = column([seen.repetition for _, seen in active])
        frequency = column([seen.frequency for _, seen in active])
        presence = column([seen.presence for _, seen in active])
        counts = torch.from_numpy(np.concatenate([seen.counts for _, seen in active]))
        index = flat_index(logits.shape[1], [(i, seen.ids) for i, seen in active])
        flat = logits.view(-1)
        values = flat[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0)
        flat[index] = values
