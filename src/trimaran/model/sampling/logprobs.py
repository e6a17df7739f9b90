"""Log-probabilities of the model itself: before bias, penalties and temperature.

Owns: normalisation, the k most likely tokens and ranks, for sampled tokens and prompt tokens alike.
Called by ``sampler`` and, for prompts, by ``worker/model_runner``.
"""

import numpy as np
import torch

from trimaran.messages import TokenLogprobs
from trimaran.model.sampling.drawing import block_masses
from trimaran.model.sampling.vocabulary_blocks import VocabularyBlocks


def row_logprobs(
    blocks: VocabularyBlocks, rows: np.ndarray, chosen: np.ndarray, counts: np.ndarray
) -> TokenLogprobs:
    """Of ``chosen[i]`` in row ``rows[i]`` of the logits, with the ``counts[i]`` most likely.

    All int64 [n], n >= 1. A rank is 1 + the number of tokens that are more likely.
    """
    index, chosen_ids = torch.from_numpy(rows), torch.from_numpy(chosen)
    n = len(rows)
    masses = block_masses(blocks, rows, np.ones(n, np.float32), np.zeros(n, np.float32))
    log_normaliser = blocks.row_max[index].double().numpy() + np.log(masses.sum(axis=1))
    chosen_logits = blocks.logits[index, chosen_ids]
    ranks = blocks.count_above(index, chosen_logits) + 1
    ids, logits = chosen[:, np.newaxis], chosen_logits.unsqueeze(1)
    if most := int(counts.max()):
        top_logits, top_ids = blocks.top(index, most)
        ids = np.concatenate([ids, top_ids.numpy()], axis=1)
        logits = torch.cat([logits, top_logits], dim=1)
    values = logits.double().numpy() - log_normaliser[:, np.newaxis]
    ends = (counts + 1).tolist()
    return TokenLogprobs(
        token_ids=[row[:end] for row, end in zip(ids.tolist(), ends, strict=True)],
        logprobs=[row[:end] for row, end in zip(values.tolist(), ends, strict=True)],
        ranks=ranks.tolist(),
    )
