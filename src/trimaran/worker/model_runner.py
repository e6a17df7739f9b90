"""From a plan to tokens: batch, forward pass, logits where they are needed, sampling.

Owns: the order of a step and the batch that persists between steps. Knows nothing of files, of
sizing memory or of why a plan looks as it does. Called by ``worker``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from trimaran.messages import (
    KVCacheLayout,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from trimaran.model.models.decoder import CausalLM
from trimaran.model.sampling.batch import SamplingBatch
from trimaran.model.sampling.rows import SampleRows
from trimaran.model.sampling.sampler import Sampler
from trimaran.worker.input_batch import InputBatch, StepInputs
from trimaran.worker.prompt_embeds import PromptEmbeds

# Logits are made in pieces of at most this size: 256 sequences of a large vocabulary would need
# 256 MiB at once.
_LOGITS_BYTES = 64 << 20


class ModelRunner:
    """``kv_caches``: one per layer. ``num_known_tokens``: ids beyond mean nothing, never come.

    ``on_unit`` is called after every layer and every piece of the head: executor.base.UnitCallback.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[torch.Tensor],
        layout: KVCacheLayout,
        *,
        max_num_seqs: int,
        num_known_tokens: int,
        on_unit: Callable[[int], None] = lambda _: None,
    ) -> None:
        vocab_size = model.architecture.vocab_size
        self._model = model
        self._on_unit = on_unit
        self._kv_caches = kv_caches
        self._group_of_layer = [layout.place_of_layer(i)[0] for i in range(len(kv_caches))]
        self._batch = InputBatch(layout, max_num_seqs)
        self._settings = SamplingBatch(max_num_seqs, vocab_size)
        self._sampler = Sampler(num_known_tokens)
        self._rows_per_piece = max(1, _LOGITS_BYTES // (4 * vocab_size))
        self._prompt_embeds = PromptEmbeds()
        self._prompt_logprobs_of: dict[str, int] = {}  # request id -> how many

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; see ``Executor.execute``."""
        self._apply(plan)
        if not plan.request_ids:
            return ModelRunnerOutput(sampled_token_ids=[])
        step = self._batch.build(plan)
        with torch.inference_mode():
            hidden = self._model.forward(
                step.input_ids,
                step.positions,
                self._kv_caches,
                [step.metadata[group] for group in self._group_of_layer],
                self._prompt_embeds.of_step(plan, step.query_start),
                on_layer=partial(self._on_unit, len(step.input_ids)),
            )
            prompt_logprobs = self._prompt_logprobs(plan, step, hidden)
            output = self._sample(step, hidden, prompt_logprobs)
            output.errors = _not_finite(plan, step, hidden)
            return output

    def _apply(self, plan: SchedulerOutput) -> None:
        for request_id in plan.left_request_ids:
            self._settings.leave(self._batch.leave(request_id))
            self._prompt_embeds.leave(request_id)
            self._prompt_logprobs_of.pop(request_id, None)
        for request in plan.new_requests:
            self._settings.enter(self._batch.enter(request), request)
            self._prompt_embeds.enter(request)
            if request.sampling_params.prompt_logprobs is not None:
                count = request.sampling_params.prompt_logprobs
                self._prompt_logprobs_of[request.request_id] = count
        self._batch.append_blocks(plan)

    def _sample(
        self, step: StepInputs, hidden: torch.Tensor, prompt_logprobs: dict[str, TokenLogprobs]
    ) -> ModelRunnerOutput:
        sampling = np.flatnonzero(step.samples)
        sampled: list[list[int]] = [[] for _ in step.rows]
        logprobs: list[TokenLogprobs | None] = [None] * len(step.rows)
        rows = step.rows[sampling]
        columns = SampleRows(
            rows, self._batch.num_tokens[rows], self._batch.prompt_lens[rows], self._batch.token_ids
        )
        last = step.query_start[sampling + 1] - 1  # the last token of each
        for piece in self._pieces(len(sampling)):
            logits = self._model.logits(_rows_of(hidden, last[piece]))
            result = self._sampler.sample(logits, columns.piece(piece), self._settings)
            self._batch.append_tokens(rows[piece], result.token_ids)
            for index, token_id in zip(
                sampling[piece].tolist(), result.token_ids.tolist(), strict=True
            ):
                sampled[index] = [token_id]
            if result.logprobs is not None:
                for index, row_logprobs in zip(
                    sampling[piece].tolist(), result.logprobs, strict=True
                ):
                    logprobs[index] = row_logprobs
            self._on_unit(len(hidden))
        return ModelRunnerOutput(
            sampled_token_ids=sampled,
            logprobs=logprobs if any(row is not None for row in logprobs) else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_logprobs(
        self, plan: SchedulerOutput, step: StepInputs, hidden: torch.Tensor
    ) -> dict[str, TokenLogprobs]:
        """Of the prompt tokens that follow the tokens of this step."""
        found: dict[str, TokenLogprobs] = {}
        if not self._prompt_logprobs_of:
            return found
        for index, request_id in enumerate(plan.request_ids):
            if request_id not in self._prompt_logprobs_of:
                continue
            row, first = step.rows[index], int(step.computed[index]) + 1
            stop = min(first + plan.num_scheduled_tokens[index], int(self._batch.prompt_lens[row]))
            next_ids = self._batch.token_ids[row, first:stop].astype(np.int64)
            places = step.query_start[index] + np.arange(len(next_ids))
            columns = TokenLogprobs([], [], [])
            for piece in self._pieces(len(next_ids)):
                logits = self._model.logits(_rows_of(hidden, places[piece]))
                part = self._sampler.prompt_logprobs(
                    logits, next_ids[piece], self._prompt_logprobs_of[request_id]
                )
                columns.token_ids += part.token_ids
                columns.logprobs += part.logprobs
                columns.ranks += part.ranks
                self._on_unit(len(hidden))
            if len(next_ids):
                found[request_id] = columns
        return found

    def _pieces(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._rows_per_piece):
            yield slice(start, min(start + self._rows_per_piece, count))


def _rows_of(hidden: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """Rows at ``places``, ascending; no copy where that is all of them."""
    return hidden if len(places) == len(hidden) else hidden[torch.from_numpy(places)]


def _not_finite(plan: SchedulerOutput, step: StepInputs, hidden: torch.Tensor) -> dict[str, str]:
    """Requests whose last hidden state holds NaN or infinities: no token follows from it."""
    last = torch.from_numpy(step.query_start[1:] - 1)
    broken = ~torch.isfinite(hidden[last]).all(-1)
    if not bool(broken.any()):
        return {}
    text = "the model computed values that are not numbers: its weights may be damaged"
    return {plan.request_ids[index]: text for index in broken.nonzero().flatten().tolist()}
