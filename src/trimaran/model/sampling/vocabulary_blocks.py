"""Logits seen as blocks of the vocabulary, so that few passes read all of it.

Owns: maxima per block, and what follows from them exactly without sorting or scanning the
vocabulary again: argmax, the k most likely tokens, ranks. Knows nothing of requests. Called by the
other modules of this package.

Everything here compares and selects, so results are exact and the same for a row in any batch.
Equal logits (common in bf16) are ordered by token id, which makes the k most likely tokens a prefix
of the k + 1 most likely.
"""

import torch
import torch.nn.functional as F

BLOCK = 128  # tokens
_ID_MASK = 0xFFFF_FFFF
NEVER = float("-inf")  # the logit of what may not be sampled whatever a request asks


def padded_logits(logits: torch.Tensor, num_known_tokens: int) -> torch.Tensor:
    """fp32 [R, V] made a whole number of blocks wide; ids from num_known_tokens on are NEVER.

    Changes ``logits`` in place where no padding is needed.
    """
    logits = logits.contiguous()
    if remainder := logits.shape[1] % BLOCK:
        logits = F.pad(logits, (0, BLOCK - remainder), value=NEVER)
    logits[:, num_known_tokens:] = NEVER
    return logits


class VocabularyBlocks:
    """``logits`` [R, a multiple of BLOCK], as they are now: make a new one after changing them."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self._blocks = logits.unflatten(-1, (-1, BLOCK))  # [R, B, BLOCK]
        self._block_max = self._blocks.amax(-1)  # [R, B]
        self.row_max = self._block_max.amax(-1)  # [R]

    def argmax(self) -> torch.Tensor:
        """int64 [R]; the lowest id among equals."""
        block = self._block_max.argmax(-1)
        rows = torch.arange(len(block), device=block.device)
        return block * BLOCK + self._blocks[rows, block].argmax(-1)

    def block(self, rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Logits [n, BLOCK] of block ``blocks[i]`` of row ``rows[i]``."""
        return self._blocks[rows, blocks]

    def top(self, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``count`` most likely tokens of each row: logits and ids, [n, count], in order."""
        count = min(count, self.logits.shape[1])
        if count < self._block_max.shape[1]:
            # The count most likely tokens lie in the count blocks with the highest maxima: each
            # other block has count blocks before it that hold a token before all of its own.
            _, blocks = _largest(_keys(self._block_max[rows]), count)
            candidates = self._blocks[rows.unsqueeze(1), blocks]  # [n, count, BLOCK]
            offsets = torch.arange(BLOCK, device=rows.device)
            ids = (blocks.unsqueeze(-1) * BLOCK + offsets).flatten(1)
            _, best = _largest(_keys(candidates.flatten(1), ids), count)
        else:
            _, best = _largest(_keys(self.logits[rows]), count)
        return self.logits[rows.unsqueeze(1), best], best

    def reaching(
        self, rows: torch.Tensor, thresholds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in ``rows`` and blocks, int64 [m], ascending: those that hold a logit as high as
        the row's threshold."""
        found = self._block_max[rows] >= thresholds.unsqueeze(1)
        place, block = found.nonzero(as_tuple=True)
        return place, block

    def count_above(self, rows: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
        """How many logits of each row exceed its threshold: int64 [n]."""
        place, block = self.reaching(rows, thresholds)
        above = (self._blocks[rows[place], block] > thresholds[place].unsqueeze(1)).sum(-1)
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device).index_add_(
            0, place, above
        )


def _keys(values: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """int64 keys that order like (value, then lowest id), all different. ids default to columns."""
    if ids is None:
        ids = torch.arange(values.shape[-1], device=values.device)
    bits = (values + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered = bits ^ ((bits >> 31) & 0x7FFF_FFFF)  # order of floats as order of integers
    return (ordered.to(torch.int64) << 32) + (_ID_MASK - ids)


def _largest(keys: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = keys.topk(count, sorted=True).values
    return keys, _ID_MASK - (keys & _ID_MASK)
