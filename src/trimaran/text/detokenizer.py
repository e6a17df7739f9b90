"""Text of a growing list of tokens, as far as it is certain.

Owns: the few bytes of a character that is not complete yet. Knows nothing of stop strings or
requests; ``client/output_processor`` has one per choice.

The rule: the joined text is ``decode(prompt + output)`` without ``decode(prompt)``, so that prompt
and text read on; the bytes of a character that the prompt leaves unfinished count as output. A chat
passes an empty prompt: its text is ``decode(output)``, without the space that SentencePiece has
before a first word.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from trimaran.text.tokenizer import Tokenizer, TokenTexts

_LONGEST_UNFINISHED = 3  # bytes of a UTF-8 character that lacks its last


class IncrementalDetokenizer:
    """Never takes back or repeats a character, whatever the tokens' bytes are cut into."""

    __slots__ = ("_pending", "_strip", "_texts")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._texts = tokenizer.token_texts(skip_special_tokens=skip_special_tokens)
        self._pending = _unfinished(self._texts, prompt_token_ids)
        self._strip = tokenizer.spelling.strip_start
        if self._strip and any(self._texts.bytes_of(token_id) for token_id in prompt_token_ids):
            self._strip = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` make certain; "" while a character is not complete."""
        text, self._pending = self._texts.decode(ids, self._pending, final=False)
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        """What a cut character leaves, as U+FFFD. Once: a second call returns ""."""
        text, self._pending = self._texts.decode((), self._pending)
        return self._stripped(text) if self._strip else text

    def _stripped(self, text: str) -> str:
        """Take the spaces that begin the whole text, up to as many as the decoder strips."""
        kept = text[: self._strip].lstrip(" ") + text[self._strip :]
        self._strip = 0 if kept else self._strip - len(text)
        return kept


def _unfinished(texts: TokenTexts, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end that are the beginning of a character, usually none."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = texts.bytes_of(token_id) + tail
        if len(tail) >= _LONGEST_UNFINISHED:
            break
    tail = tail[-_LONGEST_UNFINISHED:]
    _, used = utf_8_decode(tail, "replace", False)
    return tail[used:]
