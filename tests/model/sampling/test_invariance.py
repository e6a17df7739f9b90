"""A row's result is bit-identical whatever other rows are in the batch, on any thread count."""

import numpy as np
import pytest
import torch
from tests.model.sampling.harness import Sequences, request

from trimaran.model.sampling.drawing import block_masses
from trimaran.model.sampling.vocabulary_blocks import VocabularyBlocks, padded_logits

KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "logprobs": 3},
    {"temperature": 1.0, "top_k": 10},
    {"temperature": 1.0, "top_k": 900, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.95, "logprobs": 0},
    {"temperature": 4.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logprobs": 20},
    {"temperature": 1.2, "logit_bias": {5: 3.0}, "min_tokens": 3, "eos": [7]},
]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1003, 32_000, 151_936])
def test_alone_and_in_batches(width, threads):
    """Log-probabilities are compared too: a last bit would show there long before in a token."""
    rows = [request([1, 2], [3, 3], seed=i, **kind) for i, kind in enumerate(KINDS * 2)]
    generator = torch.Generator().manual_seed(width)
    # bf16 values: many equal logits, as real models have
    logits = (torch.randn(len(rows), width, generator=generator) * 3).bfloat16().float()
    together = Sequences(rows, width).step(logits)
    for part in (range(1), range(5, 8), range(0, 20, 3), range(3, 20)):
        some = Sequences([rows[i] for i in part], width).step(logits[list(part)])
        assert some.token_ids.tolist() == [int(together.token_ids[i]) for i in part]
        if some.logprobs is not None:
            assert some.logprobs == [together.logprobs[i] for i in part]


@pytest.mark.parametrize("width", [128, 1003, 151_936])
def test_masses_bit_for_bit(width, threads):
    logits = torch.randn(9, width, generator=torch.Generator().manual_seed(3)) * 5
    blocks = VocabularyBlocks(padded_logits(logits, width))
    temperature = np.linspace(0.5, 2.0, 9, dtype=np.float32)
    min_p = np.array([0, 0, 0.1, 0, 0.01, 0, 0, 0, 0], np.float32)
    whole = block_masses(blocks, np.arange(9), temperature, min_p)
    for rows in ([0], [8], [2, 3], [1, 4, 7]):
        part = block_masses(blocks, np.array(rows), temperature[rows], min_p[rows])
        assert np.array_equal(part, whole[rows])
