"""The uniform numbers behind every draw: spread evenly, and a function of their three arguments."""

import numpy as np
import pytest

from trimaran.model.sampling.draws import uniforms


def columns(seed, choice, position):
    seed, choice, position = np.broadcast_arrays(seed, choice, position)
    return tuple(np.atleast_1d(column).astype(np.uint64) for column in (seed, choice, position))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((11, 0, np.arange(40_000)), id="positions of one sequence"),
        pytest.param((np.arange(40_000), 0, 5), id="neighbouring seeds"),
        pytest.param((3, np.arange(40_000), 5), id="choices"),
        pytest.param((np.arange(40_000) << 44, 1, 9), id="seeds that differ in high bits"),
    ],
)
def test_even_in_every_direction(arguments):
    """Chi-square over 100 cells: 99 degrees of freedom, 1e-4 quantile 159; pairs likewise."""
    values = uniforms(*columns(*arguments))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    for cells in (
        np.bincount((values * 100).astype(int), minlength=100),
        np.bincount((values[:-1] * 10).astype(int) * 10 + (values[1:] * 10).astype(int)),
    ):
        expected = cells.sum() / 100
        assert len(cells) == 100
        assert ((cells - expected) ** 2 / expected).sum() < 159


def test_pure_and_sensitive_to_each_argument():
    base = columns(7, 1, 100)
    assert uniforms(*base) == uniforms(*base)
    others = {float(uniforms(*columns(*a))[0]) for a in ((8, 1, 100), (7, 0, 100), (7, 1, 101))}
    others |= {float(uniforms(*columns(1, 7, 100))[0]), float(uniforms(*base)[0])}
    assert len(others) == 5


def test_the_function_never_changes():
    """Replays cross versions: the same seed must give the same text after an upgrade."""
    top = (1 << 64) - 1
    expected = [splitmix_chain(*a) for a in ((0, 0, 0), (11, 0, 42), (top, 3, 7))]
    seeds = np.array([0, 11, top], np.uint64)
    got = uniforms(seeds, np.array([0, 0, 3], np.uint64), np.array([0, 42, 7], np.uint64))
    assert got.tolist() == expected


def splitmix_chain(seed: int, choice: int, position: int) -> float:
    """SplitMix64 in Python integers, as its authors give it."""
    mask = (1 << 64) - 1

    def following(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return (following(following(following(seed) ^ choice) ^ position) >> 11) / 2**53
