"""A stream is the whole text: any vocabulary, any tokens, any cuts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.text.samples import STRINGS

from trimaran.text.detokenizer import IncrementalDetokenizer

BYTE_LEVEL_IDS = st.integers(0, 425)
SENTENCEPIECE_IDS = st.integers(0, 605)


def cut(ids, cuts):
    """``ids`` in pushes of the given lengths, and the rest."""
    for length in cuts:
        yield ids[:length]
        ids = ids[length:]
    yield ids


def stream(tokenizer, prompt, output, cuts, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    texts = [detokenizer.push(ids) for ids in cut(output, cuts)]
    texts.append(detokenizer.finish())
    assert detokenizer.finish() == ""
    return texts


def ids_of(tokenizer, data):
    """The byte tokens of ``data``."""
    known = {tokenizer.token_bytes(index): index for index in range(270)}
    return [known[bytes([byte])] for byte in data]


@settings(deadline=None, max_examples=400)
@given(
    ids=st.lists(BYTE_LEVEL_IDS),
    cuts=st.lists(st.integers(0, 4)),
    skip_special_tokens=st.booleans(),
)
def test_byte_level_is_the_librarys_decode(
    byte_level, byte_level_library, ids, cuts, skip_special_tokens
):
    expected = byte_level_library.decode(ids, skip_special_tokens=skip_special_tokens)
    assert byte_level.decode(ids, skip_special_tokens=skip_special_tokens) == expected
    texts = stream(byte_level, [], ids, cuts, skip_special_tokens=skip_special_tokens)
    assert "".join(texts) == expected


@settings(deadline=None, max_examples=400)
@given(ids=st.lists(SENTENCEPIECE_IDS), cuts=st.lists(st.integers(0, 4)))
def test_sentencepiece_is_sentencepieces_decode(
    sentencepiece_tokenizer, sentencepiece_processor, ids, cuts
):
    size = sentencepiece_processor.get_piece_size()
    # SentencePiece writes " ⁇ " for an unknown piece; it is a special token here.
    # Nor the byte token of a space: at the start, the tokenizers library and we strip it like any
    # space, and SentencePiece keeps it.
    left_out = (sentencepiece_processor.unk_id(), sentencepiece_processor.piece_to_id("<0x20>"))
    ids = [index for index in ids if index < size and index not in left_out]
    # Special tokens are left out first, as the tokenizers library does: bytes on both sides join.
    visible = [index for index in ids if not sentencepiece_processor.is_control(index)]
    expected = sentencepiece_processor.decode(visible)
    assert sentencepiece_tokenizer.decode(ids) == expected
    assert "".join(stream(sentencepiece_tokenizer, [], ids, cuts)) == expected


@settings(deadline=None, max_examples=400)
@given(
    prompt=st.lists(SENTENCEPIECE_IDS, max_size=8),
    output=st.lists(SENTENCEPIECE_IDS, max_size=8),
    cuts=st.lists(st.integers(0, 3)),
    skip_special_tokens=st.booleans(),
)
def test_text_continues_the_prompt(
    sentencepiece_tokenizer, prompt, output, cuts, skip_special_tokens
):
    """T-C7, the unfinished last character of a prompt included."""
    options = {"skip_special_tokens": skip_special_tokens}
    whole = sentencepiece_tokenizer.decode(prompt + output, **options)
    text = "".join(stream(sentencepiece_tokenizer, prompt, output, cuts, **options))
    assert whole.endswith(text)
    before = whole[: len(whole) - len(text)]
    alone = sentencepiece_tokenizer.decode(prompt, **options)
    assert alone.startswith(before)
    assert set(alone[len(before) :]) <= {"\ufffd"}
    assert len(alone) - len(before) <= 3


@pytest.mark.parametrize("text", STRINGS)
def test_there_and_back(byte_level, sentencepiece_tokenizer, text):
    for tokenizer in (byte_level, sentencepiece_tokenizer):
        ids = tokenizer.encode(text)
        # What is not true of SentencePiece: ▁ is a space, and the first space may be its own.
        expected = text.replace("▁", " ") if tokenizer is sentencepiece_tokenizer else text
        decoded = tokenizer.decode(ids)
        assert decoded in (expected, expected.removeprefix(" "))
        assert "".join(stream(tokenizer, [], ids, [1] * len(ids))) == decoded


class TestCharacters:
    @pytest.fixture
    def tokenizer(self, any_tokenizer):
        return any_tokenizer

    def test_an_emoji_comes_with_its_last_byte(self, tokenizer):
        ids = ids_of(tokenizer, "😊".encode())
        assert stream(tokenizer, [], ids, [1, 1, 1, 1]) == ["", "", "", "😊", "", ""]
        assert stream(tokenizer, [], ids, [2, 1]) == ["", "", "😊", ""]

    def test_every_character_is_sent_as_soon_as_it_is_whole(self, tokenizer):
        ids = ids_of(tokenizer, "B 中x".encode())
        texts = stream(tokenizer, [], ids, [1] * len(ids))
        assert texts == ["B", " ", "", "", "中", "x", "", ""]

    def test_a_cut_emoji_is_flushed_once(self, tokenizer):
        ids = ids_of(tokenizer, b"a" + "😊".encode()[:3])
        texts = stream(tokenizer, [], ids, [1, 1, 1, 1])
        assert texts[:-1] == ["a", "", "", "", ""]
        assert texts[-1] == tokenizer.decode(ids)[1:] != ""

    def test_broken_bytes_do_not_hold_up_what_follows(self, tokenizer):
        ids = ids_of(tokenizer, "😊".encode()[:2] + b"ab")
        detokenizer = IncrementalDetokenizer(tokenizer, [])
        detokenizer.push(ids[:2])
        assert detokenizer.push(ids[2:3]).endswith("\ufffda")
        assert detokenizer.push(ids[3:]) == "b"

    def test_a_prompt_may_end_within_a_character(self, tokenizer):
        ids = ids_of(tokenizer, "ab😊c".encode())
        assert "".join(stream(tokenizer, ids[:4], ids[4:], [])) == "😊c"

    def test_unknown_ids_are_silent(self, tokenizer):
        ids = ids_of(tokenizer, b"ab")
        ids.insert(1, tokenizer.vocab_size + 5)
        assert "".join(stream(tokenizer, [], ids, [1, 1])) == "ab"


def test_the_first_space_is_only_dropped_at_the_very_beginning(
    sentencepiece_tokenizer, sentencepiece_processor, sentencepiece_metadata
):
    """A chat's text begins with its first word; a completion goes on after the prompt's last."""
    tokenizer = sentencepiece_tokenizer
    first = "c d" if sentencepiece_metadata["tokenizer.ggml.add_space_prefix"] else " c d"
    words = [sentencepiece_processor.piece_to_id(piece) for piece in ("▁c", "▁d")]
    assert sentencepiece_processor.unk_id() not in words
    assert "".join(stream(tokenizer, [], words, [1])) == first
    assert "".join(stream(tokenizer, [1], words, [1])) == first
    assert "".join(stream(tokenizer, [1, words[0]], words, [1])) == " c d"
