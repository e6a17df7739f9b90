"""The sampling settings of the persistent batch, one row per sequence.

Owns: the columns of settings and the features that change logits, updated when a sequence enters or
leaves. Knows nothing of logits' origin. Filled by ``worker/model_runner``, read by ``sampler``.
"""

import numpy as np
import torch

from trimaran.messages import NewRequestData
from trimaran.model.sampling.bans import BadWords, MinTokens
from trimaran.model.sampling.biases import AllowedTokens, LogitBias
from trimaran.model.sampling.drawing import DrawSettings
from trimaran.model.sampling.draws import uniforms
from trimaran.model.sampling.penalties import Penalties
from trimaran.model.sampling.rows import LogitsFeature, SampleRows

# Below this a draw is the most likely token; dividing by less only meets the limits of fp32.
_GREEDY_BELOW = 1e-5


class SamplingBatch:
    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.greedy = np.ones(max_num_seqs, bool)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)  # -1: none
        self._no_top_k = np.iinfo(np.int64).max
        self._vocab_size = vocab_size
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._top_k = np.full(max_num_seqs, self._no_top_k)
        self._top_p = np.ones(max_num_seqs)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice = np.zeros(max_num_seqs, np.uint64)
        # In the order of their effect.
        self._penalties = Penalties(vocab_size)
        self._features: tuple[LogitsFeature, ...] = (
            LogitBias(vocab_size),
            self._penalties,
            AllowedTokens(vocab_size),
            MinTokens(vocab_size),
            BadWords(vocab_size),
        )

    def enter(self, row: int, request: NewRequestData) -> None:
        """``request.sampling_params.seed`` is set (by the front end)."""
        params = request.sampling_params
        assert params.seed is not None, f"request {request.request_id} has no seed"
        self.greedy[row] = (
            params.greedy or params.temperature < _GREEDY_BELOW or params.top_p == 0.0
        )
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._temperature[row] = max(params.temperature, _GREEDY_BELOW)
        is_bounded = 0 < params.top_k < self._vocab_size
        self._top_k[row] = params.top_k if is_bounded else self._no_top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._choice[row] = request.choice_index
        for feature in self._features:
            feature.enter(row, request)

    def leave(self, row: int) -> None:
        for feature in self._features:
            feature.leave(row)

    @property
    def changes_logits(self) -> bool:
        """Whether any row uses any of the features."""
        return any(feature.num_rows for feature in self._features)

    def change_logits(self, logits: torch.Tensor, sampling: SampleRows) -> None:
        """Apply the features in place."""
        for feature in self._features:
            feature.apply(logits, sampling)

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """These tokens were sampled in these rows."""
        self._penalties.append(rows.tolist(), token_ids.tolist())

    def draw_settings(self, sampling: SampleRows) -> DrawSettings:
        rows = sampling.rows
        return DrawSettings(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            uniform=uniforms(
                self._seed[rows], self._choice[rows], sampling.positions.astype(np.uint64)
            ),
        )
