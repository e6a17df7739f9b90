"""Random numbers that are a function, not a stream.

Owns: one uniform number per (seed, choice index, position), by a counter-based hash, so that
batching, preemption and replay cannot change a draw and no global generator is touched. Called by
``sampler``. The mixing function is SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable
pseudorandom number generators, 2014).
"""

import numpy as np

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


def _fraction(state: np.ndarray) -> np.ndarray:
    return (state >> np.uint64(11)) * 2.0**-53


def uniforms(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1) from three uint64 [N]; wraps modulo 2**64."""
    state = _mix(seeds + np.uint64(_GOLDEN))
    state = _mix((state ^ choices) + np.uint64(_GOLDEN))
    state = _mix((state ^ positions) + np.uint64(_GOLDEN))
    return _fraction(state)


def further(uniform: np.ndarray, index: int) -> np.ndarray:
    """The index-th further number that belongs to each of ``uniforms``' results; index >= 1."""
    state = (uniform * 2.0**53).astype(np.uint64)
    return _fraction(_mix(state + np.uint64(_GOLDEN * index & _MASK)))
