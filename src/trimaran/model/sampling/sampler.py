"""One token for every sequence that samples in a step.

Owns: the order of the parts: what the model's logits say (log-probabilities), the features that
change them, greedy choice or draw. Called by ``worker/model_runner``.
"""

from dataclasses import dataclass

import numpy as np
import torch

from trimaran.messages import TokenLogprobs
from trimaran.model.sampling.batch import SamplingBatch
from trimaran.model.sampling.drawing import draw
from trimaran.model.sampling.logprobs import row_logprobs
from trimaran.model.sampling.rows import SampleRows
from trimaran.model.sampling.vocabulary_blocks import VocabularyBlocks, padded_logits


@dataclass(frozen=True)
class Sampled:
    """Aligned with the rows that were sampled."""

    token_ids: np.ndarray  # int64 [N]
    logprobs: list[TokenLogprobs | None] | None  # None: nobody asked


class Sampler:
    """``num_known_tokens``: ids from there on mean nothing to the tokenizer and never come."""

    def __init__(self, num_known_tokens: int) -> None:
        self._num_known_tokens = num_known_tokens

    def sample(self, logits: torch.Tensor, sampling: SampleRows, batch: SamplingBatch) -> Sampled:
        """Sample from logits fp32 [N, vocabulary], which are overwritten. N >= 1."""
        logits = padded_logits(logits, self._num_known_tokens)
        asking = np.flatnonzero(batch.num_logprobs[sampling.rows] >= 0)
        raw, raw_rows = None, asking
        if batch.changes_logits:
            if len(asking):
                raw = VocabularyBlocks(logits[torch.from_numpy(asking)])
                raw_rows = np.arange(len(asking))
            batch.change_logits(logits, sampling)
        blocks = VocabularyBlocks(logits)
        token_ids = blocks.argmax().numpy()
        drawn = np.flatnonzero(~batch.greedy[sampling.rows])
        if len(drawn):
            settings = batch.draw_settings(sampling).select(drawn)
            token_ids[drawn] = draw(blocks, drawn, settings)
        batch.append(sampling.rows, token_ids)
        if not len(asking):
            return Sampled(token_ids, None)
        counts = batch.num_logprobs[sampling.rows[asking]]
        columns = row_logprobs(raw or blocks, raw_rows, token_ids[asking], counts)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for i, row in enumerate(asking.tolist()):
            logprobs[row] = TokenLogprobs(
                [columns.token_ids[i]], [columns.logprobs[i]], [columns.ranks[i]]
            )
        return Sampled(token_ids, logprobs)

    def prompt_logprobs(
        self, logits: torch.Tensor, next_ids: np.ndarray, num_logprobs: int
    ) -> TokenLogprobs:
        """Of ``next_ids`` int64 [N], each after its row of logits [N, vocabulary]; N >= 1."""
        blocks = VocabularyBlocks(padded_logits(logits, self._num_known_tokens))
        rows = np.arange(len(next_ids))
        return row_logprobs(blocks, rows, next_ids, np.full(len(rows), num_logprobs))
