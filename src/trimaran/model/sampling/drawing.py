"""Temperature, min_p, top_k, top_p and the draw, for rows that are not greedy.

Owns: the distribution a row is drawn from and inverse-CDF sampling in it. Knows nothing of
requests: gets logits, settings as columns, and one uniform number per row. Called by ``sampler``.

Weights are exp((logit - row maximum) / temperature): the largest is 1, so nothing overflows and
min_p compares with them directly. In order of likelihood min_p, top_k and top_p each keep a prefix.
The way is chosen by a row's own settings and logits alone:
- top_k: only its k candidates are looked at;
- min_p: a few candidates, if they reach down to min_p;
- else: block sums over the whole vocabulary, then one block; tokens stand in order of id;
- top_p: as before, and the token is drawn again while those more likely than it have top_p already
  (rejection: what is accepted has the distribution cut at top_p). That looks only at blocks with a
  more likely token, and nothing is sorted. Who is out of luck gets the cut itself.
"""

from dataclasses import dataclass

import numpy as np
import torch

from trimaran.model.sampling.draws import further
from trimaran.model.sampling.vocabulary_blocks import BLOCK, VocabularyBlocks

# Candidates per row: the smallest number that is enough.
_TOP_K_SIZES = (64, 1024, 16384)  # then the whole vocabulary
_MIN_P_CANDIDATES = 64
_TOP_P_ATTEMPTS = 8
# Rows are weighed in pieces of this many tokens, so that a piece stays in the cache.
_PIECE_TOKENS = 1 << 20


@dataclass(frozen=True)
class DrawSettings:
    """Columns over n rows. Off: top_k = vocabulary or more, top_p 1, min_p 0."""

    temperature: np.ndarray  # float32, above 0
    top_k: np.ndarray  # int64, at least 1
    top_p: np.ndarray  # float64
    min_p: np.ndarray  # float32
    uniform: np.ndarray  # float64 in [0, 1)

    def select(self, index: np.ndarray | slice) -> "DrawSettings":
        return DrawSettings(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.uniform[index],
        )


def draw(blocks: VocabularyBlocks, rows: np.ndarray, settings: DrawSettings) -> np.ndarray:
    """One token id per row: int64 [n]. ``rows`` int64 [n], ascending, are rows of the logits."""
    vocabulary = blocks.logits.shape[1]
    drawn = np.empty(len(rows), np.int64)
    bounded = settings.top_k < vocabulary
    smallest = 0
    for size in (*_TOP_K_SIZES, vocabulary):
        lanes = np.flatnonzero(bounded & (smallest < settings.top_k) & (settings.top_k <= size))
        if len(lanes):
            drawn[lanes], _ = _draw_from_candidates(
                blocks, rows[lanes], settings.select(lanes), size
            )
        smallest = size
    unsettled = ~bounded
    lanes = np.flatnonzero(unsettled & (settings.min_p > 0.0))
    if len(lanes):
        drawn[lanes], whole = _draw_from_candidates(
            blocks, rows[lanes], settings.select(lanes), _MIN_P_CANDIDATES
        )
        unsettled[lanes] = ~whole
    nucleus = settings.top_p < 1.0
    for lanes, draw_lanes in (
        (np.flatnonzero(unsettled & nucleus), _draw_nucleus),
        (np.flatnonzero(unsettled & ~nucleus), _draw_plain),
    ):
        if len(lanes):
            drawn[lanes] = draw_lanes(blocks, rows[lanes], settings.select(lanes))
    return drawn


def block_masses(
    blocks: VocabularyBlocks, rows: np.ndarray, temperature: np.ndarray, min_p: np.ndarray
) -> np.ndarray:
    """Sums of weights per block of the vocabulary: float64 [n, B]."""
    vocabulary = blocks.logits.shape[1]
    masses = np.empty((len(rows), vocabulary // BLOCK))
    step = max(1, _PIECE_TOKENS // vocabulary)
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        index = torch.from_numpy(rows[piece])
        first, last = int(rows[piece][0]), int(rows[piece][-1])
        is_range = last - first == len(index) - 1  # then no copy; rows are in ascending order
        logits = blocks.logits[first : last + 1] if is_range else blocks.logits[index]
        weights = _weights(logits, blocks.row_max[index], temperature[piece], min_p[piece])
        # Sums over a short last dimension, many at once: each is formed by one thread in one
        # order. (A sum over whole rows is split among threads when there is one row.)
        masses[piece] = weights.unflatten(-1, (-1, BLOCK)).sum(-1).numpy()
    return masses


def _weights(
    logits: torch.Tensor, row_max: torch.Tensor, temperature: np.ndarray, min_p: np.ndarray
) -> torch.Tensor:
    """fp32 [n, m] from logits [n, m]; 0 below min_p."""
    weights = logits - row_max.unsqueeze(1)
    if (temperature != 1.0).any():
        weights.div_(torch.from_numpy(temperature).unsqueeze(1))
    # exp, not exp2 or softmax: its vector and remainder code agree bit for bit, so a weight does
    # not depend on where in the batch its row lies (tests/model/sampling/test_invariance.py).
    weights.exp_()
    if min_p.any():
        weights.masked_fill_(weights < torch.from_numpy(min_p).unsqueeze(1), 0.0)
    return weights


def _draw_from_candidates(
    blocks: VocabularyBlocks, rows: np.ndarray, settings: DrawSettings, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws among the ``count`` most likely tokens, and whether min_p or top_k cut before them."""
    index = torch.from_numpy(rows)
    logits, ids = blocks.top(index, count)
    weights = (
        _weights(logits, blocks.row_max[index], settings.temperature, settings.min_p)
        .double()
        .numpy()
    )
    weights[np.arange(weights.shape[1]) >= settings.top_k[:, np.newaxis]] = 0.0
    cumulative = weights.cumsum(axis=1)
    limit = settings.top_p * cumulative[:, -1]
    # A token is kept if those before it have not reached top_p; the first one always is.
    kept = np.empty(weights.shape, bool)
    kept[:, 0] = True
    np.less(cumulative[:, :-1], limit[:, np.newaxis], out=kept[:, 1:])
    kept_count = kept.sum(axis=1)
    kept_mass = cumulative[np.arange(len(rows)), kept_count - 1]
    chosen = _first_above(cumulative, settings.uniform, kept_mass, kept_count)
    tokens = np.take_along_axis(ids.numpy(), chosen[:, np.newaxis], axis=1)[:, 0]
    return tokens, weights[:, -1] == 0.0


def _draw_nucleus(blocks: VocabularyBlocks, rows: np.ndarray, settings: DrawSettings) -> np.ndarray:
    masses = block_masses(blocks, rows, settings.temperature, settings.min_p)
    top_p = np.maximum(settings.top_p, np.finfo(np.float64).tiny)  # 0 keeps one token
    limit = top_p * masses.sum(axis=1)
    drawn = np.empty(len(rows), np.int64)
    lanes = np.arange(len(rows))
    for attempt in range(_TOP_P_ATTEMPTS):
        some = settings.select(lanes)
        uniform = further(some.uniform, attempt) if attempt else some.uniform
        tokens = _draw_by_mass(blocks, rows[lanes], some, masses[lanes], uniform)
        drawn[lanes] = tokens
        lanes = lanes[_mass_before(blocks, rows[lanes], some, tokens) >= limit[lanes]]
        if not len(lanes):
            break
    for i in lanes:
        index = torch.from_numpy(rows[i : i + 1])
        one = settings.select(slice(i, i + 1))
        weights = _weights(blocks.logits[index], blocks.row_max[index], one.temperature, one.min_p)
        cumulative = _cut_nucleus(weights.numpy()[0], top_p[i]).cumsum(dtype=np.float64)
        cumulative = cumulative[np.newaxis]
        uniform = further(one.uniform, _TOP_P_ATTEMPTS)
        drawn[i] = _first_above(cumulative, uniform, cumulative[:, -1], cumulative.size)[0]
    return drawn


def _mass_before(
    blocks: VocabularyBlocks, rows: np.ndarray, settings: DrawSettings, tokens: np.ndarray
) -> np.ndarray:
    """Weight of all that is more likely than ``tokens`` [n], or as likely with a lower id."""
    index, ids = torch.from_numpy(rows), torch.from_numpy(tokens)
    thresholds = blocks.logits[index, ids]
    lanes, which = blocks.reaching(index, thresholds)
    logits = blocks.block(index[lanes], which)
    at = which.unsqueeze(1) * BLOCK + torch.arange(BLOCK)
    bar = thresholds[lanes].unsqueeze(1)
    earlier = (logits > bar) | ((logits == bar) & (at < ids[lanes].unsqueeze(1)))
    lane = lanes.numpy()
    weights = _weights(
        logits, blocks.row_max[index[lanes]], settings.temperature[lane], settings.min_p[lane]
    )
    return np.bincount(lane, weights=(weights * earlier).sum(-1).numpy(), minlength=len(rows))


def _cut_nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Zero, in place, the weights outside top_p; fp32 [V], not negative."""
    # The bit pattern of a float that is not negative grows with it: its upper bits are a histogram
    # bucket, and only the bucket in which top_p is reached needs sorting.
    bucket = weights.view(np.int32) >> 17
    mass = np.bincount(bucket, weights=weights)
    before = mass[::-1].cumsum()[::-1] - mass  # in the buckets above
    limit = top_p * mass.sum()
    lowest = int(np.argmax(before < limit))
    members = np.flatnonzero(bucket == lowest)
    members = members[np.argsort(-weights[members], kind="stable")]
    reached = weights[members].cumsum(dtype=np.float64) - weights[members] + before[lowest]
    weights[bucket < lowest] = 0.0
    weights[members[reached >= limit]] = 0.0
    return weights


def _draw_plain(blocks: VocabularyBlocks, rows: np.ndarray, settings: DrawSettings) -> np.ndarray:
    masses = block_masses(blocks, rows, settings.temperature, settings.min_p)
    return _draw_by_mass(blocks, rows, settings, masses, settings.uniform)


def _draw_by_mass(
    blocks: VocabularyBlocks,
    rows: np.ndarray,
    settings: DrawSettings,
    masses: np.ndarray,
    uniform: np.ndarray,
) -> np.ndarray:
    """A block by its mass, then a token in it."""
    cumulative = masses.cumsum(axis=1)
    block = _first_above(cumulative, uniform, cumulative[:, -1], masses.shape[1])
    lane = np.arange(len(rows))
    before = cumulative[lane, block] - masses[lane, block]
    inside = (uniform * cumulative[:, -1] - before) / masses[lane, block]
    index = torch.from_numpy(rows)
    weights = _weights(
        blocks.block(index, torch.from_numpy(block)),
        blocks.row_max[index],
        settings.temperature,
        settings.min_p,
    )
    cumulative = weights.double().numpy().cumsum(axis=1)
    share = np.clip(inside, 0.0, 1.0)  # the sums were rounded
    return block * BLOCK + _first_above(cumulative, share, cumulative[:, -1], BLOCK)


def _first_above(
    cumulative: np.ndarray, share: np.ndarray, total: np.ndarray, count: np.ndarray | int
) -> np.ndarray:
    """First column whose cumulative weight exceeds share * total: never one of weight 0."""
    target = np.minimum(share * total, np.nextafter(total, 0.0))[:, np.newaxis]
    # Columns at and beyond ``count`` do not belong; NaN (a broken model) must not leave the range.
    below = (cumulative <= target) & (np.arange(cumulative.shape[1]) < np.reshape(count, (-1, 1)))
    return np.minimum(below.sum(axis=1), np.subtract(count, 1))
