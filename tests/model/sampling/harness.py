"""Samples rows of logits for a list of requests, as the model runner does."""

from collections.abc import Sequence

import numpy as np
import torch

from trimaran.messages import NewRequestData
from trimaran.model.sampling.batch import SamplingBatch
from trimaran.model.sampling.rows import SampleRows
from trimaran.model.sampling.sampler import Sampled, Sampler
from trimaran.sampling_params import SamplingParams


def request(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    *,
    eos: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    choice: int = 0,
    seed: int = 0,
    **params,
) -> NewRequestData:
    return NewRequestData(
        request_id="",
        token_ids=[*prompt, *output],
        prompt_len=len(prompt),
        sampling_params=SamplingParams(seed=seed, **params),
        eos_token_ids=list(eos),
        block_ids=[],
        choice_index=choice,
        bad_words_token_ids=[list(word) for word in bad_words],
    )


class Sequences:
    """Requests in rows of their own (the last one in row 0), sampled step by step."""

    def __init__(
        self, requests: Sequence[NewRequestData], vocab_size: int, known: int | None = None
    ) -> None:
        count = len(requests)
        self.rows = np.arange(count)[::-1].copy()
        self.token_ids = np.zeros((count, 512), np.int32)
        self.num_tokens = np.zeros(count, np.int64)
        self.prompt_lens = np.zeros(count, np.int64)
        self.batch = SamplingBatch(count, vocab_size)
        self.sampler = Sampler(vocab_size if known is None else known)
        for row, each in zip(self.rows, requests, strict=True):
            self.batch.enter(int(row), each)
            self.token_ids[row, : len(each.token_ids)] = each.token_ids
            self.num_tokens[row] = len(each.token_ids)
            self.prompt_lens[row] = each.prompt_len

    def columns(self) -> SampleRows:
        rows = self.rows
        return SampleRows(rows, self.num_tokens[rows], self.prompt_lens[rows], self.token_ids)

    def step(self, logits: torch.Tensor) -> Sampled:
        """``logits``: one row per request, in their order; left as it is."""
        sampled = self.sampler.sample(logits.clone(), self.columns(), self.batch)
        self.token_ids[self.rows, self.num_tokens[self.rows]] = sampled.token_ids
        self.num_tokens[self.rows] += 1
        return sampled

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """What the features make of the logits."""
        logits = logits.clone()
        self.batch.change_logits(logits, self.columns())
        return logits


def sample(requests: Sequence[NewRequestData], logits: torch.Tensor) -> list[int]:
    return Sequences(requests, logits.shape[1]).step(logits).token_ids.tolist()
