"""Whole sampling steps: mixed batches, statistics of draws, log-probabilities."""

import numpy as np
import pytest
import torch
from tests.model.sampling.harness import Sequences, request, sample

WIDTH = 400


def some_logits(rows: int, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.9},  # trap T-G4
        {"temperature": 5.0, "top_k": 1},
        {"temperature": 5.0, "top_p": 0.0},
        {"temperature": 5.0, "min_p": 1.0},
        {"temperature": 1e-9},
    ],
    ids=str,
)
def test_settings_that_mean_the_most_likely_token(settings):
    logits = some_logits(8)
    requests = [request(seed=seed, **settings) for seed in range(8)]
    assert sample(requests, logits) == logits.argmax(-1).tolist()


def test_off_values_of_top_k():
    """Trap T-G6: 0, -1 and more than the vocabulary switch it off."""
    logits = some_logits(1).repeat(4, 1)
    requests = [request(seed=9, temperature=2.0, top_k=k) for k in (0, -1, WIDTH, WIDTH + 5)]
    assert len(set(sample(requests, logits))) == 1


@pytest.mark.parametrize("settings", [{}, {"top_k": 20}, {"top_p": 0.88}], ids=str)
def test_draws_over_seeds_follow_the_distribution(settings):
    """Chi-square over 4000 fixed seeds; the 1e-5 quantile for the degrees of freedom at hand."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 1.5, 0.2, -0.5]])
    count = 4000
    tokens = sample([request(seed=s, **settings) for s in range(count)], logits.repeat(count, 1))
    cells = np.bincount(tokens, minlength=8)
    shares = logits.double().softmax(-1)[0].numpy()
    if "top_p" in settings:  # all but the three least likely
        assert shares[[0, 1, 5, 2, 6]].sum() > 0.88 > shares[[0, 1, 5, 2]].sum()
        shares[[3, 4, 7]] = 0.0
        shares /= shares.sum()
    expected = shares * count
    assert not cells[expected == 0].any()
    used = expected > 0
    statistic = ((cells[used] - expected[used]) ** 2 / expected[used]).sum()
    assert statistic < 35.0  # 7 degrees of freedom: 34.7


def test_a_draw_depends_on_seed_choice_and_position_only():
    logits = some_logits(1)
    sequences = Sequences([request(seed=11, temperature=1.5)], WIDTH)
    stream = [int(sequences.step(logits).token_ids[0]) for _ in range(30)]
    assert len(set(stream)) > 5
    # Resumed after 10 tokens (whatever they were), and again from the start.
    resumed = Sequences([request(output=[0] * 10, seed=11, temperature=1.5)], WIDTH)
    assert [int(resumed.step(logits).token_ids[0]) for _ in range(20)] == stream[10:]
    for other in ({"seed": 12}, {"seed": 11, "choice": 1}, {"seed": -11}):
        different = Sequences([request(temperature=1.5, **other)], WIDTH)
        assert [int(different.step(logits).token_ids[0]) for _ in range(30)] != stream


def test_global_random_state_is_neither_used_nor_changed():
    """Trap T-D4."""
    torch.manual_seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = sample([request(seed=3), request(seed=4, top_p=0.9)], some_logits(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(2)
    assert sample([request(seed=3), request(seed=4, top_p=0.9)], some_logits(2)) == first


@pytest.mark.parametrize("width", [WIDTH, 1024])
def test_logprobs_are_the_models_own(width):
    """Before bias, penalty and temperature; trap T-B12: the same for every count."""
    logits = some_logits(4, width=width)
    bias = {3: 100.0}
    requests = [
        request(temperature=0.0, logprobs=0, logit_bias=bias),
        request(temperature=0.0),
        request(temperature=0.7, seed=5, logprobs=7, presence_penalty=1.0),
        request(temperature=0.0, logprobs=20, logit_bias=bias),
    ]
    sampled = Sequences(requests, width).step(logits)
    reference = torch.log_softmax(logits.double(), -1).numpy()
    assert sampled.logprobs[1] is None
    for row, count in ((0, 0), (2, 7), (3, 20)):
        got, token = sampled.logprobs[row], int(sampled.token_ids[row])
        order = np.argsort(-reference[row], kind="stable")
        assert got.token_ids == [[token, *order[:count].tolist()]]
        np.testing.assert_allclose(got.logprobs[0], reference[row][got.token_ids[0]], atol=1e-5)
        assert got.ranks == [order.tolist().index(token) + 1]


def test_prompt_logprobs():
    logits = some_logits(5)
    next_ids = np.array([3, 399, 0, 7, 7])
    sequences = Sequences([request()], WIDTH)
    got = sequences.sampler.prompt_logprobs(logits.clone(), next_ids, 2)
    reference = torch.log_softmax(logits.double(), -1)
    best = reference.topk(2)
    for row, token in enumerate(next_ids.tolist()):
        assert got.token_ids[row] == [token, *best.indices[row].tolist()]
        expected = [float(reference[row, token]), *best.values[row].tolist()]
        np.testing.assert_allclose(got.logprobs[row], expected, atol=1e-5)
        assert got.ranks[row] == 1 + int((reference[row] > reference[row, token]).sum())


def test_a_broken_models_nan_stays_in_the_vocabulary():
    """No request may take the engine with it, whatever comes out of the model."""
    logits = torch.full((4, WIDTH), float("nan"))
    requests = [
        request(seed=1, **kind) for kind in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1})
    ]
    with np.errstate(all="ignore"):
        tokens = sample(requests, logits)
    assert all(0 <= token < 512 for token in tokens)
