"""The distribution that is drawn from, against transformers' logits warpers.

A grid of uniform numbers through the inverse CDF shows the whole distribution: no luck involved.
"""

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trimaran.model.sampling.drawing import DrawSettings, draw
from trimaran.model.sampling.vocabulary_blocks import VocabularyBlocks, padded_logits

GRID = 1024


def drawn_shares(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Share of each token over an even grid of GRID uniform numbers; logits [V]."""
    width = len(logits)
    blocks = VocabularyBlocks(padded_logits(logits.unsqueeze(0).clone(), width))
    settings = DrawSettings(
        temperature=np.full(GRID, temperature, np.float32),
        top_k=np.full(GRID, top_k or np.iinfo(np.int64).max),
        top_p=np.full(GRID, top_p),
        min_p=np.full(GRID, min_p, np.float32),
        uniform=(np.arange(GRID) + 0.5) / GRID,
    )
    tokens = draw(blocks, np.zeros(GRID, np.int64), settings)
    return np.bincount(tokens, minlength=width) / GRID


def expected_shares(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    warpers = [TemperatureLogitsWarper(temperature)]
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    scores = logits.unsqueeze(0).double()
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0].numpy()


SETTINGS = [
    # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (2.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 100, 1.0, 0.0),
    (1.3, 1500, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (0.4, 0, 0.9, 0.0),
    (1.5, 0, 0.99, 0.0),  # more than the candidates
    (5.0, 0, 0.3, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 0.8, 0.05),
    (1.0, 40, 0.8, 0.0),
    (1.0, 40, 1.0, 0.05),
    (1.2, 60, 0.9, 0.02),
]


@pytest.mark.parametrize("width", [50, 2048, 5003])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_against_transformers(setting, width):
    temperature, top_k, top_p, min_p = setting
    setting = (temperature, min(top_k, width - 1), top_p, min_p)
    logits = torch.randn(width, generator=torch.Generator().manual_seed(width)) * 3
    drawn, expected = drawn_shares(logits, *setting), expected_shares(logits, *setting)
    assert not drawn[expected == 0].any(), "a token outside the kept set"
    # Inverse CDF on a grid: each share is exact to a cell at either end.
    assert np.abs(drawn - expected).max() <= 1.01 / GRID


@pytest.mark.parametrize("min_p", [0.0, 0.999])
def test_extreme_logits_stay_finite(min_p):
    logits = torch.tensor([1e30, 1e30, -1e30, float("-inf"), 0.0, 3e38, 3e38])
    shares = drawn_shares(logits, 1e-5, 0, 1.0, min_p)
    assert shares.tolist() == [0, 0, 0, 0, 0, 0.5, 0.5]


def test_top_p_zero_keeps_the_most_likely():
    logits = torch.tensor([0.0, 1.0, 0.9])
    assert drawn_shares(logits, 1.0, 0, 0.0, 0.0).tolist() == [0, 1, 0]


def test_equal_logits_at_the_border_of_top_k_keep_the_lower_ids():
    assert drawn_shares(torch.zeros(300), 1.0, 2, 1.0, 0.0)[:3].tolist() == [0.5, 0.5, 0]
    flat = drawn_shares(torch.zeros(1024), 1.0, 0, 0.5, 0.0)
    assert flat.tolist() == [2 / GRID] * 512 + [0] * 512
