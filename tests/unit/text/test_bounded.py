"""Texts too long are refused without being tokenised whole; none that fits ever is."""

import pytest

from trimaran.errors import InvalidRequestError
from trimaran.text.bounded import refuse_too_long


class Counting:
    """A tokenizer that remembers how much it was given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.longest_token_bytes = tokenizer.longest_token_bytes
        self.chars = 0

    def encode(self, text, **options):
        self.chars += len(text)
        return self._tokenizer.encode(text, **options)


def test_the_longest_token(byte_level):
    sizes = [len(byte_level.token_bytes(i)) for i in range(byte_level.vocab_size)]
    assert byte_level.longest_token_bytes == max(sizes) > 1


@pytest.mark.parametrize("text", ["hello ", "x", "語", "\n", " "])
def test_what_fits_passes(byte_level, text):
    for count in (1, 10, 400):
        most = len(byte_level.encode(text * count, add_special_tokens=False))
        refuse_too_long(byte_level, text * count, most, param="prompt")


def test_what_cannot_fit_costs_little(byte_level):
    tokenizer = Counting(byte_level)
    for text, most_chars in (("q" * 10_000_000, 0), ("qz" * 3_000, 8 * 100)):
        tokenizer.chars = 0
        with pytest.raises(InvalidRequestError, match="more than the 100 tokens") as caught:
            refuse_too_long(tokenizer, text, 100, param="prompt")
        assert caught.value.param == "prompt"
        assert len(str(caught.value)) < 200
        assert tokenizer.chars <= most_chars
