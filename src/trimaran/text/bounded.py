"""Tokenising with a bound on the result, so that a text too long costs little to refuse.

Owns: the two ways to know early that a text has too many tokens: by its length alone (no token is
longer than the longest one), and by the tokens of its beginning. Called by AsyncLLM, LLMEngine.
"""

from trimaran.errors import InvalidRequestError
from trimaran.text.tokenizer import Tokenizer

# Ordinary text has 2 to 6 characters a token. What is denser than this is tokenised whole.
_CHARS_PER_TOKEN = 8
# A normaliser may compose characters: so many of the text become one of the tokens'.
_COMPOSED_CHARS = 4
# A cut may split the word it falls into.
_CUT_TOKENS = 16


def refuse_too_long(tokenizer: Tokenizer, text: str, most_tokens: int, *, param: str) -> None:
    """Raises InvalidRequestError if ``text`` surely has more than ``most_tokens`` tokens.

    Texts that pass may still turn out to be a little too long.
    """
    if len(text) <= _CHARS_PER_TOKEN * most_tokens:
        return
    too_long = f"the text of {len(text)} characters has more than the {most_tokens} tokens allowed"
    if len(text) > most_tokens * tokenizer.longest_token_bytes * _COMPOSED_CHARS:
        raise InvalidRequestError(too_long, param=param)
    beginning = text[: _CHARS_PER_TOKEN * most_tokens]
    if len(tokenizer.encode(beginning, add_special_tokens=False)) > most_tokens + _CUT_TOKENS:
        raise InvalidRequestError(too_long, param=param)
