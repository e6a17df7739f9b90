"""The distribution that is drawn from, against transformers' logits warpers.

A grid of uniform numbers through the inverse CDF shows the whole distribution: no luck involved.
Only top_p without a bound by other settings rejects draws, and is judged by chi-square (over fixed
numbers, so that a run is like every other).
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
from trimaran.model.sampling.draws import uniforms
from trimaran.model.sampling.vocabulary_blocks import VocabularyBlocks, padded_logits

GRID = 1024


def drawn_shares(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Share of each token over an even grid of GRID uniform numbers; logits [V]."""
    counts = drawn_counts(
        logits, (temperature, top_k, top_p, min_p), (np.arange(GRID) + 0.5) / GRID
    )
    return counts / GRID


def drawn_counts(
    logits: torch.Tensor, setting: tuple[float, int, float, float], uniform: np.ndarray
) -> np.ndarray:
    temperature, top_k, top_p, min_p = setting
    width, count = len(logits), len(uniform)
    blocks = VocabularyBlocks(padded_logits(logits.unsqueeze(0).clone(), width))
    settings = DrawSettings(
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k or np.iinfo(np.int64).max),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p, np.float32),
        uniform=uniform,
    )
    return np.bincount(draw(blocks, np.zeros(count, np.int64), settings), minlength=width)


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


@pytest.mark.parametrize("attempts", [8, 0], ids=["rejection", "cut"])
@pytest.mark.parametrize("width", [50, 5003])
@pytest.mark.parametrize(
    "setting", [(1.0, 0, 0.5, 0.0), (0.4, 0, 0.9, 0.0), (1.5, 0, 0.99, 0.0), (5.0, 0, 0.3, 1e-4)]
)
def test_top_p_against_transformers(setting, width, attempts, monkeypatch):
    monkeypatch.setattr("trimaran.model.sampling.drawing._TOP_P_ATTEMPTS", attempts)
    logits = torch.randn(width, generator=torch.Generator().manual_seed(width)) * 3
    count = 3000 if attempts else 500
    numbers = np.arange(count, dtype=np.uint64)
    drawn = drawn_counts(logits, setting, uniforms(numbers, numbers * 0, numbers * 0))
    expected = expected_shares(logits, *setting) * count
    assert not drawn[expected == 0].any(), "a token outside the kept set"
    # Cells of at least 5, in order of likelihood.
    order = np.argsort(-expected)
    cell = (expected[order].cumsum() / 5).astype(int)
    _, cell = np.unique(cell, return_inverse=True)
    got, wanted = (np.bincount(cell, weights=x[order]) for x in (drawn, expected))
    wanted_some = wanted > 1
    got, wanted = got[wanted_some], wanted[wanted_some]
    freedom = len(wanted) - 1
    # Mean and variance of chi-square are n and 2 n; five deviations above is never by chance.
    assert ((got - wanted) ** 2 / wanted).sum() < freedom + 5 * np.sqrt(2 * freedom) + 5


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
    assert np.flatnonzero(flat).max() == 511


def test_top_p_that_is_reached_exactly_keeps_no_more():
    assert drawn_shares(torch.zeros(8), 1.0, 4, 0.5, 0.0).tolist() == [0.5, 0.5] + [0] * 6
