"""Token ids to vectors. Owns the lookup table; a tied head packs its own copy. Called by models."""

import torch
import torch.nn.functional as F


class Embedding:
    """``scale`` multiplies the vectors, itself rounded to their type first (as Gemma was trained:
    sqrt(640) is 25.25 in bfloat16)."""

    def __init__(self, table: torch.Tensor, scale: float) -> None:
        self.table = table  # [vocab_size, hidden_size]
        self._scale = None if scale == 1 else torch.tensor(scale, dtype=table.dtype)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> a new tensor [T, hidden_size]"""
        vectors = F.embedding(input_ids, self.table)
        return vectors if self._scale is None else vectors * self._scale
