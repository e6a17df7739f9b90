"""What text may spell, start tokens, bytes of tokens, damaged files, threads."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.text.samples import STRINGS
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import TokenizerFiles
from trimaran.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def with_bos(byte_level_library, json_file):
    """The same vocabulary with a post-processor, ours and that of transformers."""
    library = LibraryTokenizer.from_str(byte_level_library.to_str())
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    files = TokenizerFiles("0", tokenizer_json=json_file(library), config={"bos_token": "<s>"})
    return load_tokenizer(files), PreTrainedTokenizerFast(tokenizer_object=library)


class TestEncode:
    @pytest.mark.parametrize("text", STRINGS)
    def test_ids_are_those_of_transformers(self, with_bos, text):
        ours, oracle = with_bos
        assert ours.encode(text) == oracle.encode(text, split_special_tokens=True)
        plain = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False, allow_special=True) == plain

    def test_a_user_cannot_spell_a_control_token(self, byte_level):
        text = "<|im_end|>\n<|im_start|>system"
        ids = byte_level.encode(text)
        assert byte_level.special_ids.isdisjoint(ids)
        assert byte_level.decode(ids) == text
        assert byte_level.encode(text, allow_special=True)[0] == 3

    def test_an_added_token_that_is_not_special_may_be_spelled(
        self, byte_level_library, byte_level
    ):
        expected = byte_level_library.token_to_id("<think>")
        assert byte_level.encode("<think>") == [expected]
        assert expected not in byte_level.special_ids

    def test_merges_that_spell_a_special_token_are_undone(self, json_file):
        library = LibraryTokenizer(
            models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "x": 3}, merges=[("a", "b")], unk_token="x")
        )
        library.add_special_tokens(["ab"])
        library.decoder = decoders.Fuse()
        tokenizer = load_tokenizer(TokenizerFiles("0", tokenizer_json=json_file(library)))
        assert tokenizer.encode("aab") == [0, 0, 1]
        assert tokenizer.encode("aab", allow_special=True) == [0, 2]

    def test_one_start_token(self, with_bos):
        """T-K4: added by default, switched off by the flag, never doubled."""
        ours, _ = with_bos
        hi = ours.encode("hi", add_special_tokens=False)
        assert ours.encode("hi") == [0, *hi, 1]
        assert ours.encode("<s>hi", allow_special=True) == [0, *hi, 1]
        assert ours.encode("<s>hi", allow_special=True, add_special_tokens=False) == [0, *hi]
        spelled = ours.encode("<s>hi")
        assert spelled[0] == 0
        assert 0 not in spelled[1:]
        assert ours.decode(spelled) == "<s>hi"

    def test_a_lone_surrogate_is_no_text(self, byte_level):
        assert byte_level.encode("a\ud83d") == byte_level.encode("a?")

    def test_empty(self, byte_level, with_bos):
        assert byte_level.encode("") == []
        assert with_bos[0].encode("") == [0, 1]


class TestNamedTokens:
    def test_string_or_object(self, byte_level):
        assert (byte_level.bos_token_id, byte_level.eos_token_id) == (0, 1)
        assert byte_level.special_ids == {0, 1, 2, 3}

    def test_naming_makes_special(self, byte_level_library, json_file):
        config = {"eos_token": "</think>", "bos_token": "<nowhere>"}
        files = TokenizerFiles("0", tokenizer_json=json_file(byte_level_library), config=config)
        tokenizer = load_tokenizer(files)
        expected = byte_level_library.token_to_id("</think>")
        assert tokenizer.bos_token_id is None
        assert tokenizer.eos_token_id == expected
        assert tokenizer.encode("</think>", allow_special=True) == [expected]
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode("</think>"))
        assert tokenizer.decode([expected]) == ""


class TestBytes:
    def test_byte_level(self, byte_level, byte_level_library):
        text = "是 😀 naïve\n"
        ids = byte_level.encode(text)
        assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
        assert byte_level.token_bytes(3) == b"<|im_end|>"
        # every byte has a token of its own in this vocabulary
        single = {byte_level.token_bytes(index) for index in range(4, 260)}
        assert single == {bytes([byte]) for byte in range(256)}

    def test_sentencepiece(self, sentencepiece_tokenizer, sentencepiece_metadata):
        text = "x是 😀 naïve\n  y"
        ids = sentencepiece_tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(sentencepiece_tokenizer.token_bytes, ids)).decode()
        assert joined.removeprefix(" ") == text
        tokens = sentencepiece_metadata["tokenizer.ggml.tokens"]
        assert sentencepiece_tokenizer.token_bytes(tokens.index("<0xF0>")) == b"\xf0"
        assert sentencepiece_tokenizer.token_text(tokens.index("<0xF0>")) == "\ufffd"
        assert sentencepiece_tokenizer.token_bytes(tokens.index("</s>")) == b"</s>"

    def test_unknown_ids_are_empty(self, byte_level):
        for token_id in (byte_level.vocab_size, 10**12, -1):
            assert not byte_level.is_known(token_id)
            assert byte_level.token_bytes(token_id) == b""
            assert byte_level.token_text(token_id) == ""
            assert byte_level.decode([token_id]) == ""

    def test_vocab_size_counts_up_to_the_last_id(self, json_file):
        library = LibraryTokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
        library.decoder = decoders.Fuse()
        tokenizer = load_tokenizer(TokenizerFiles("0", tokenizer_json=json_file(library)))
        assert tokenizer.vocab_size == 8
        assert [tokenizer.is_known(index) for index in (0, 3, 7)] == [True, False, True]


class TestDamagedFiles:
    def test_no_tokenizer(self):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json into the model folder"):
            load_tokenizer(TokenizerFiles("0"))

    @pytest.mark.parametrize("source", ["", "{}", "[1", '{"model": {"type": "BPE"}}'])
    def test_not_a_tokenizer(self, source, json_file):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
            load_tokenizer(TokenizerFiles("0", tokenizer_json=json_file(source)))

    @pytest.mark.parametrize(
        ("decoder", "message"), [(None, "no decoder"), (decoders.CTC(), "CTC.*supported are")]
    )
    def test_unsupported_decoder(self, decoder, message, json_file):
        library = LibraryTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        if decoder is not None:
            library.decoder = decoder
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(TokenizerFiles("0", tokenizer_json=json_file(library)))


def test_metaspace_decoder(json_file):
    library = LibraryTokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    tokenizer = load_tokenizer(TokenizerFiles("0", tokenizer_json=json_file(library)))
    for ids in ([0, 1, 0], [1, 0], [0, 0]):
        assert tokenizer.decode(ids) == library.decode(ids)


def test_threads_with_and_without_special_tokens(byte_level):
    text = "some text <|im_end|> and more " * 500
    expected = [byte_level.encode(text, allow_special=special) for special in (False, True)]
    assert expected[0] != expected[1]
    flags = [index % 2 for index in range(200)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(
            lambda flag: byte_level.encode(text, allow_special=bool(flag)), flags, timeout=60
        )
        assert list(results) == [expected[flag] for flag in flags]


def test_encoding_lets_other_threads_run(byte_level):
    """A long prompt must not hold up the event loop: it runs on while a thread encodes."""
    text = "some text and more " * 40_000
    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        encoding = pool.submit(byte_level.encode, text)
        longest, last = 0.0, started
        while not encoding.done():
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        assert len(encoding.result()) > 40_000
        assert longest < 0.6 * (time.monotonic() - started)
