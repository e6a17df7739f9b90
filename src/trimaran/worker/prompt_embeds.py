"""Prompts that are embeddings: their rows, from a request's entering to its leaving.

Owns: the rows as they lie in the memory they came in, and which of them a step computes. Knows
nothing of what the model does with them. Called by ``model_runner``.
"""

from typing import Any

import numpy as np
import torch

from trimaran.messages import NewRequestData, SchedulerOutput
from trimaran.model.models.decoder import GivenEmbeddings

# numpy has no bfloat16: its bits, which torch then takes for what they are.
_STORED: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2")}


class PromptEmbeds:
    """Costs nothing while no request brings any."""

    def __init__(self) -> None:
        self._rows: dict[str, np.ndarray] = {}  # request id -> [prompt_len, hidden_size]

    def enter(self, request: NewRequestData) -> None:
        embeds = request.prompt_embeds
        if embeds is not None:
            rows = np.frombuffer(embeds.data.data, _STORED[embeds.dtype])
            self._rows[request.request_id] = rows.reshape(embeds.shape)

    def leave(self, request_id: str) -> None:
        """The request may not have brought any."""
        self._rows.pop(request_id, None)

    def of_step(self, plan: SchedulerOutput, query_start: np.ndarray) -> GivenEmbeddings | None:
        """Rows of the prompt tokens that this step computes; query_start int64 [R + 1]."""
        if not self._rows:
            return None
        places, parts = [], []
        for index, request_id in enumerate(plan.request_ids):
            rows = self._rows.get(request_id)
            if rows is None:
                continue
            first = plan.num_computed_tokens[index]
            part = rows[first : first + plan.num_scheduled_tokens[index]]
            if len(part):
                places.append(np.arange(len(part)) + query_start[index])
                parts.append(_tensor(part))
        if not parts:
            return None
        return GivenEmbeddings(torch.from_numpy(np.concatenate(places)), torch.cat(parts))


def _tensor(rows: np.ndarray) -> torch.Tensor:
    copy = torch.from_numpy(rows.copy())  # torch takes no memory that it may not write to
    return copy.view(torch.bfloat16) if rows.dtype == _STORED["bfloat16"] else copy
