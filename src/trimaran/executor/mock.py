"""An executor without a model: tokens that look random and can be foretold.

Owns: a fake model whose next token is a pure function of the last token, its position and the
request's seed, choice and prompt_embeds. So a lost, doubled or reordered token, or a damaged byte,
changes everything behind it, while batching, chunking, preemption and resuming change nothing: a
disturbed run is compared with an undisturbed one token by token. Used by process, load and chaos
tests; chosen with ``--distributed-executor-backend mock``. Torch-free.

It honours what tests need to force an end: logit_bias (the highest positive bias wins), min_tokens,
and never draws an EOS or stop token by chance. Other sampling parameters do not matter to it.
"""

import math
import time
import zlib
from collections.abc import Callable
from typing import Literal

from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.config import EngineConfig
from trimaran.errors import ConflictError
from trimaran.executor.base import ProgressCallback, UnitCallback
from trimaran.ipc.codec import Frame
from trimaran.messages import (
    AWAKE,
    KVCacheConfig,
    ModelFacts,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)
from trimaran.scheduling.kv_layout import make_kv_cache_layout

# Wide enough for any tokenizer's prompts; what is drawn lies where vocabularies keep plain text.
VOCAB_SIZE = 262_144
FIRST_TOKEN = 1_000
NUM_TOKENS = 31_000
MAX_MODEL_LEN = 32_768
KV_BYTES = 64 << 20
_WEIGHT_BYTES = 1 << 20
_MASK = (1 << 64) - 1
# A slow step is busy, not hung: it shows that it goes on as often as this.
_UNIT_S = 0.1


def mock_token(last_token: int, position: int, salt: int) -> int:
    """The token at ``position`` (prompt included) behind ``last_token``; ``salt`` is the stream."""
    mixed = ((last_token << 32 | position) ^ salt) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK
    return FIRST_TOKEN + (mixed >> 32) % NUM_TOKENS


def mock_salt(seed: int, choice_index: int = 0, prompt_embeds: Frame = b"") -> int:
    """Of one stream: with embeddings, every one of their bytes matters to every token."""
    checksum = zlib.crc32(prompt_embeds) * 0x9FB21C651E98DF25
    return (seed * 0xD6E8FEB86659FD93 + choice_index + checksum) & _MASK


class _Row:
    __slots__ = ("ending_ids", "forced", "min_len", "params", "prompt_len", "salt", "tokens")

    def __init__(self, data: NewRequestData) -> None:
        params = data.sampling_params
        self.params = params
        self.tokens = list(data.token_ids)
        self.prompt_len = data.prompt_len
        embeds = b"" if data.prompt_embeds is None else data.prompt_embeds.data.data
        self.salt = mock_salt(params.seed or 0, data.choice_index, embeds)
        self.ending_ids = frozenset(data.eos_token_ids).union(params.stop_token_ids)
        self.min_len = data.prompt_len + params.min_tokens
        bias = max((params.logit_bias or {}).items(), key=lambda item: item[1], default=(0, 0.0))
        self.forced = bias[0] if bias[1] > 0 else None

    def draw(self) -> int:
        tokens = self.tokens
        position = len(tokens)
        token = self.forced
        if token is None or (position < self.min_len and token in self.ending_ids):
            token = mock_token(tokens[-1], position, self.salt)
            while token in self.ending_ids:
                token = FIRST_TOKEN + (token - FIRST_TOKEN + 1) % NUM_TOKENS
        tokens.append(token)
        return token


class MockExecutor:
    """``sleep`` and ``clock`` may be replaced by tests; a step takes mock_step_s seconds."""

    def __init__(
        self,
        config: EngineConfig,
        on_unit: UnitCallback = lambda _: None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._step_s = config.executor.mock_step_s
        self._on_unit = on_unit
        self._sleep = sleep
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._sleep_level = AWAKE
        self._facts = ModelFacts(
            layout=make_kv_cache_layout(
                [("full", 0), ("sliding", 64)],
                block_size=config.cache.block_size,
                bytes_per_layer_token=64,
            ),
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            weight_bytes=_WEIGHT_BYTES,
            available_kv_bytes=KV_BYTES,
            num_threads=1,
            kernels="mock",
        )

    def load(self, on_progress: ProgressCallback) -> ModelFacts:
        on_progress("loading", 1.0, f"{_WEIGHT_BYTES} of {_WEIGHT_BYTES} bytes")
        return self._facts

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Nothing to allocate: no keys, no values."""

    def warm_up(self, on_progress: ProgressCallback) -> None:
        on_progress("warming up", 1.0, "")

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert self._sleep_level == AWAKE, f"a plan while asleep at level {self._sleep_level}"
        deadline = self._clock.monotonic() + self._step_s
        rows = self._rows
        for request_id in plan.left_request_ids:
            del rows[request_id]
        for data in plan.new_requests:
            rows[data.request_id] = _Row(data)
        sampled: list[list[int]] = []
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[str, TokenLogprobs] = {}
        for index, (request_id, computed, scheduled) in enumerate(
            zip(plan.request_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        ):
            row = rows[request_id]
            if row.params.prompt_logprobs is not None and computed + 1 < row.prompt_len:
                targets = row.tokens[computed + 1 : min(computed + 1 + scheduled, row.prompt_len)]
                prompt_logprobs[request_id] = _logprobs(targets, row.params.prompt_logprobs)
            if computed + scheduled < len(row.tokens):
                sampled.append([])
                continue
            token = row.draw()
            sampled.append([token])
            if row.params.logprobs is not None:
                logprobs[index] = _logprobs([token], row.params.logprobs)
        self._wait(deadline, plan.total_num_scheduled_tokens)
        return ModelRunnerOutput(
            sampled_token_ids=sampled,
            logprobs=[logprobs.get(i) for i in range(len(sampled))] if logprobs else None,
            prompt_logprobs=prompt_logprobs,
        )

    def sleep(self, level: int) -> None:
        assert not self._rows, f"asleep with {len(self._rows)} requests in the batch"
        self._sleep_level = level

    def wake_up(self, on_progress: ProgressCallback) -> None:
        if self._sleep_level == 2:
            self.load(on_progress)
        self._sleep_level = AWAKE

    def profile(self, action: Literal["start", "stop"]) -> str:
        raise ConflictError("the mock executor computes nothing that could be profiled")

    def shutdown(self) -> None:
        self._rows.clear()

    def _wait(self, deadline: float, num_tokens: int) -> None:
        while self._step_s and (remaining_s := deadline - self._clock.monotonic()) > 0.0:
            self._sleep(min(remaining_s, _UNIT_S))
            self._on_unit(num_tokens)


def _logprobs(tokens: list[int], count: int) -> TokenLogprobs:
    """Each token as the most likely one, its successors behind it: 1/2, 1/4, 1/8 …"""
    ranked = [-math.log(2) * (rank + 1) for rank in range(count)]
    return TokenLogprobs(
        token_ids=[[token, *((token + k) % VOCAB_SIZE for k in range(count))] for token in tokens],
        logprobs=[[-math.log(2), *ranked] for _ in tokens],
        ranks=[1] * len(tokens),
    )
