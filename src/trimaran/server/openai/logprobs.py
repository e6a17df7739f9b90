"""Log-probabilities in the formats of the OpenAI API.

Owns: how a token is written, which may be half a character, and where it stands in the text. Does
not compute anything: values come with the outputs.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from trimaran.client.outputs import PositionLogprobs, TokenLogprob
from trimaran.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity


def token_text(data: bytes) -> str:
    """The token as text; part of a character as ``bytes:\\xf0\\x9f``, as OpenAI writes it."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(positions: Sequence[PositionLogprobs], num_top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of chat completions."""
    return {
        "content": [
            {**_chat_token(one.chosen), "top_logprobs": [_chat_token(t) for t in one.top[:num_top]]}
            for one in positions
        ],
        "refusal": None,
    }


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token_text(token.bytes),
        "logprob": max(token.logprob, LOWEST),
        "bytes": list(token.bytes),
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` extension: per position {token id: …}, null for the first."""
    return [
        None
        if one is None
        else {
            str(token.token_id): {
                "logprob": max(token.logprob, LOWEST),
                "rank": token.rank,
                "decoded_token": token_text(token.bytes),
            }
            for token in (*one.top, one.chosen)
        }
        for one in positions
    ]


class LegacyLogprobs:
    """``choices[].logprobs`` of completions, for one choice; remembers where the text stands."""

    def __init__(self, tokenizer: Tokenizer, *, num_top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._offset = 0
        # Counts whole characters, so that the parts of one all stand where it begins.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def align(self, token_ids: Sequence[int], text: str) -> None:
        """``text`` is what is shown of the first tokens: it may lack a leading space of theirs."""
        data = b"".join(
            self._tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if token_id not in self._hidden
        )
        self._offset = len(text) - len(data.decode("utf-8", "replace"))

    def entries(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, Any]:
        """Columns with one entry per token; None where nothing predicts it (the first)."""
        tokens, offsets, chosen, tops = [], [], [], []
        for token_id, position in zip(token_ids, positions, strict=True):
            data = self._tokenizer.token_bytes(token_id)
            tokens.append(token_text(data))
            offsets.append(max(self._offset, 0))
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(data))
            chosen.append(None if position is None else max(position.chosen.logprob, LOWEST))
            tops.append(None if position is None else self._top(position))
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """By text; the chosen token first, so that another of the same text never replaces it."""
        top: dict[str, float] = {}
        for token in (position.chosen, *position.top[: self._num_top]):
            top.setdefault(token_text(token.bytes), max(token.logprob, LOWEST))
        return top
