"""A conversation as token ids, in which only the template can write special tokens.

Owns: the care that a message saying "<|im_end|>" stays text (SECURITY: users cannot forge turns).
The template is rendered with marks where messages spell special tokens; what the marks stand for is
then encoded as ordinary text, everything else with special tokens. Called by AsyncLLM and LLM.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.text.bounded import refuse_too_long
from trimaran.text.chat_template import ChatTemplate
from trimaran.text.tokenizer import Tokenizer

# Of a message, what a template compares with constants; never what a user writes freely.
_NAMES = ("role", "type")


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_special_tokens: bool = False,
    most_tokens: int | None = None,
    **options: Any,
) -> list[int]:
    """The prompt's ids. ``options`` are those of ``ChatTemplate.render``.

    ``add_special_tokens``: let the tokenizer put its start token before what the template wrote.
    Raises InvalidRequestError: the template refused the messages, or what it wrote surely has more
    than ``most_tokens``.
    """
    if most_tokens is not None:
        for message in messages:
            if isinstance(content := message.get("content"), str):
                refuse_too_long(tokenizer, content, most_tokens, param="messages")
    shield = _Shield(tokenizer)
    text = template.render([shield.cover(message) for message in messages], **options)
    if most_tokens is not None:
        refuse_too_long(tokenizer, text, most_tokens, param="messages")
    parts = shield.split(text)
    ids: list[int] = []
    for place, part in enumerate(parts):
        if part:
            ids += tokenizer.encode(
                part,
                add_special_tokens=add_special_tokens and place == 0,
                allow_special=place % 2 == 0,
            )
    return ids


class _Shield:
    """Replaces special tokens in messages by marks, and finds them again in the rendered text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = secrets.token_hex(8)  # so that nobody can write a mark himself
        self._covered: list[str] = []

    def cover(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, Mapping):
            return {k: v if k in _NAMES else self.cover(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover(item) for item in value]
        return value

    def _cover_text(self, text: str) -> str:
        ids = self._tokenizer.encode(text, add_special_tokens=False, allow_special=True)
        found = self._tokenizer.special_ids.intersection(ids)
        for token in sorted(map(self._tokenizer.token_text, found), key=len, reverse=True):
            if token and token in text:
                text = text.replace(token, f"\ue000{self._nonce}.{len(self._covered)}\ue001")
                self._covered.append(token)
        return text

    def split(self, text: str) -> list[str]:
        """Written by the template (even places) and spelled by a message (odd places)."""
        if not self._covered:
            return [text]
        parts = re.split(f"\ue000{self._nonce}\\.([0-9]+)\ue001", text)
        return [self._covered[int(p)] if i % 2 else p for i, p in enumerate(parts)]
