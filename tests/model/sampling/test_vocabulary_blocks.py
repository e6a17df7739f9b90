"""Selections over blocks of the vocabulary against plain sorting."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.model.sampling.vocabulary_blocks import BLOCK, VocabularyBlocks, padded_logits


def logits_with_ties(seed: int, rows: int, width: int, levels: int) -> torch.Tensor:
    """Few different values, both zeros and -inf among them."""
    rng = np.random.default_rng(seed)
    values = np.concatenate([[-np.inf, -0.0, 0.0], rng.normal(size=levels)]).astype(np.float32)
    return torch.from_numpy(rng.choice(values, (rows, width)))


def by_sorting(row: np.ndarray) -> np.ndarray:
    """Ids, most likely first, the lower id among equals."""
    return np.lexsort((np.arange(len(row)), -row))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from([1, 7, BLOCK, 3 * BLOCK, 20 * BLOCK, 20 * BLOCK + 33]),
    levels=st.sampled_from([1, 3, 50, 4000]),
    count=st.sampled_from([1, 2, 5, 19, 20, 64, 10_000]),
)
def test_argmax_top_and_ranks(seed, width, levels, count):
    rows = 4
    original = logits_with_ties(seed, rows, width, levels)
    blocks = VocabularyBlocks(padded_logits(original.clone(), width))
    values, ids = blocks.top(torch.tensor([2, 0]), min(count, width))
    for got_values, got_ids, row in zip(values, ids, original[[2, 0]].numpy(), strict=True):
        expected = by_sorting(row)[:count]
        assert got_ids.tolist() == expected.tolist()
        assert got_values.tolist() == row[expected].tolist()
    assert blocks.argmax().tolist() == [by_sorting(row)[0] for row in original.numpy()]
    assert blocks.row_max.tolist() == original.amax(-1).tolist()
    thresholds = original[torch.tensor([3, 1]), torch.tensor([0, width // 2])]
    above = blocks.count_above(torch.tensor([3, 1]), thresholds)
    assert above.tolist() == [
        int((original[row] > threshold).sum())
        for row, threshold in zip((3, 1), thresholds, strict=True)
    ]


@pytest.mark.parametrize("width", [BLOCK, BLOCK + 1])
def test_unknown_ids_are_never_likely(width):
    logits = torch.arange(width, dtype=torch.float32).repeat(2, 1)
    blocks = VocabularyBlocks(padded_logits(logits, 50))
    assert blocks.argmax().tolist() == [49, 49]
    _, ids = blocks.top(torch.tensor([0]), 3)
    assert ids.tolist() == [[49, 48, 47]]
