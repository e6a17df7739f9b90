"""What a request asks of sampling and stopping, with closed ranges.

Owns: the fields, their defaults and their checks. ``verify`` is called by the front end before a
request is submitted, and by the engine, which does not trust the wire; everything behind it trusts
the values. Checks that need the model (vocabulary size) are in ``verify_for_model``.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from trimaran.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 4096
MAX_LIST_ITEMS = 4096
# Logits are divided by it, as float32: what is nearer to 0 would make infinities of them.
MIN_REPETITION_PENALTY = 1e-6
MAX_SEED = (1 << 63) - 1


class RequestOutputKind(IntEnum):
    """What a stream's items hold: all so far, only what is new, or one item at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Sampling and stopping of one request. Draws depend only on (seed, choice index, position)."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None  # None: none; k: the sampled token and the k most likely
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def verify(self) -> None:
        """Raise InvalidRequestError naming the first field outside its range."""
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, (1 << 31) - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, (1 << 31) - 1)
        _integer("min_tokens", self.min_tokens, 0, (1 << 31) - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._verify_lists()

    def _verify_lists(self) -> None:
        _count("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}",
                    param="stop",
                )
            verify_text("stop", text)
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize", param="stop")
        _count("stop_token_ids", self.stop_token_ids, MAX_LIST_ITEMS)
        _count("bad_words", self.bad_words, MAX_STOP_STRINGS)
        for word in self.bad_words:
            if not word.strip():
                raise InvalidRequestError("a bad word may not be empty", param="bad_words")
            if len(word) > MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"a bad word has at most {MAX_STOP_STRING_CHARS} characters", param="bad_words"
                )
            verify_text("bad_words", word)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids may not be empty", param="allowed_token_ids"
                )
            _count("allowed_token_ids", self.allowed_token_ids, 1 << 20)
        for token_id, bias in (self.logit_bias or {}).items():
            _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        _count("logit_bias", list(self.logit_bias or ()), MAX_LIST_ITEMS)

    def verify_for_model(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for token ids the model does not have."""
        for field, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{field}: token id {token_id} is outside the vocabulary"
                        f" (0 to {vocab_size - 1})",
                        param=field,
                    )


def verify_text(name: str, text: str) -> None:
    """Raise InvalidRequestError: it holds half a surrogate pair (JSON can), which no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} is not valid Unicode: {error}", param=name) from error


def _number(name: str, value: float, low: float, high: float, param: str | None = None) -> float:
    # Written as "not inside" so that NaN, for which every comparison is false, is refused too.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and low <= value <= high)
    ):
        raise InvalidRequestError(
            f"{name} must be a number from {low:g} to {high:g}, got {_shown(value)}",
            param=param or name,
        )
    return value


def _integer(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} must be an integer from {low} to {high}, got {_shown(value)}", param=name
        )
    return value


def _count(name: str, items: Sequence[object], most: int) -> None:
    if len(items) > most:
        raise InvalidRequestError(
            f"{name} has {len(items)} entries, at most {most} are accepted", param=name
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
