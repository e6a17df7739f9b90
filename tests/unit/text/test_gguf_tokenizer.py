"""GGUF vocabularies against SentencePiece, the trained tokenizer, and transformers' GGUF loader."""

import logging
import threading

import gguf
import pytest
from tests.unit.text import samples
from tests.unit.text.samples import STRINGS
from tokenizers import Tokenizer as LibraryTokenizer

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import TokenizerFiles
from trimaran.text.tokenizer import load_tokenizer


def plain_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def transformers_tokenizer(path, metadata, architecture):
    """What transformers makes of the same metadata, through a real file."""
    from transformers import AutoTokenizer

    writer = gguf.GGUFWriter(path / "model.gguf", architecture)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(path, gguf_file="model.gguf")


class TestSentencePiece:
    @pytest.mark.parametrize("text", STRINGS)
    def test_ids_are_those_of_sentencepiece(
        self, sentencepiece_tokenizer, sentencepiece_processor, sentencepiece_metadata, text
    ):
        if sentencepiece_metadata["tokenizer.ggml.add_space_prefix"] and text.startswith(
            (" ", "▁", "\n", "<table>", "</think>")
        ):
            # The documented difference: a text that begins with a space or with a user-defined
            # token gets no space before it. That is how it reads in the middle of a text.
            expected = sentencepiece_processor.encode("x\t" + text)
            expected = expected[len(sentencepiece_processor.encode("x\t")) :]
        else:
            expected = sentencepiece_processor.encode(text)
        assert plain_ids(sentencepiece_tokenizer, text) == expected

    def test_ids_are_those_of_transformers(
        self, sentencepiece_tokenizer, sentencepiece_metadata, tmp_path
    ):
        prefix = sentencepiece_metadata["tokenizer.ggml.add_space_prefix"]
        oracle = transformers_tokenizer(
            tmp_path, sentencepiece_metadata, "llama" if prefix else "gemma3"
        )
        for text in STRINGS:
            if not prefix and "   " in text:
                continue  # transformers merges these for Gemma; SentencePiece, above, matches them
            expected = oracle.encode(text, split_special_tokens=True)
            assert sentencepiece_tokenizer.encode(text) == expected, text
            expected = oracle.encode(text, add_special_tokens=False)
            allowed = sentencepiece_tokenizer.encode(
                text, allow_special=True, add_special_tokens=False
            )
            assert allowed == expected, text

    def test_byte_and_control_pieces_cannot_be_spelled(
        self, sentencepiece_tokenizer, sentencepiece_metadata
    ):
        types = sentencepiece_metadata["tokenizer.ggml.token_type"]
        for token, kind in zip(sentencepiece_metadata["tokenizer.ggml.tokens"], types, strict=True):
            if kind in (2, 3, 6):
                ids = plain_ids(sentencepiece_tokenizer, token)
                assert len(ids) > 1, token
                assert sentencepiece_tokenizer.decode(ids) == token
                assert all(types[index] not in (2, 3) for index in ids)

    def test_merges_of_ordinary_pieces_cannot_make_a_byte_or_control_piece(self):
        pieces = ["<unk>", "<0x41>", "ab", "<", "0", "x", "4", "1", ">", "a", "b"]
        types = [2, 6, 3] + [1] * 8
        pieces += ["<0", "<0x", "<0x4", "1>"]
        types += [1] * 4
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": [0.0] * 11 + [-1.0, -2.0, -3.0, -4.0],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": False,
        }
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        assert plain_ids(tokenizer, "<0x41>") == [pieces.index("<0x4"), pieces.index("1>")]
        assert plain_ids(tokenizer, "ab") == [pieces.index("a"), pieces.index("b")]
        assert plain_ids(tokenizer, "A") == [1]

    def test_an_end_token_is_special_whatever_its_type(self, sentencepiece_metadata):
        tokens = sentencepiece_metadata["tokenizer.ggml.tokens"]
        normal = tokens.index("er")
        metadata = sentencepiece_metadata | {"tokenizer.ggml.eos_token_id": normal}
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        assert normal in tokenizer.special_ids
        assert tokenizer.decode([normal]) == ""
        assert normal not in tokenizer.encode("xer")
        assert tokenizer.decode(tokenizer.encode("xer")) == "xer"

    def test_defaults_of_old_files(self, sentencepiece_metadata):
        """Files from before the flags: SentencePiece with a start token and a space prefix."""
        metadata = {
            key: value
            for key, value in sentencepiece_metadata.items()
            if not key.endswith(("add_bos_token", "add_space_prefix"))
        }
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1
        assert tokenizer.decode(tokenizer.encode("a")) == "a"
        assert tokenizer.token_bytes(tokenizer.encode("a")[1]) in (b" a", b" ")

    def test_end_token_is_added_where_the_file_says_so(self, sentencepiece_metadata):
        metadata = sentencepiece_metadata | {"tokenizer.ggml.add_eos_token": True}
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        assert tokenizer.encode("a")[-1] == tokenizer.eos_token_id == 2


class TestByteLevel:
    @pytest.mark.parametrize(
        ("pre", "split", "nfc"),
        [
            ("gpt-2", samples.GPT2_SPLIT, False),
            ("default", samples.GPT2_SPLIT, False),
            ("llama-bpe", samples.LLAMA3_SPLIT, False),
            ("qwen2", samples.QWEN2_SPLIT, True),
        ],
    )
    def test_ids_are_those_of_the_original(self, pre, split, nfc, tmp_path):
        original = samples.train_byte_level(split, nfc=nfc)
        metadata = samples.byte_level_metadata(original, pre)
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        oracle = transformers_tokenizer(tmp_path, metadata, "llama")
        for text in STRINGS:
            allowed = tokenizer.encode(text, allow_special=True)
            assert allowed == original.encode(text).ids, text
            if not nfc or text.isascii():  # transformers does not normalise what comes from GGUF
                assert allowed == oracle.encode(text), text
                expected = oracle.encode(text, split_special_tokens=True)
                assert tokenizer.encode(text) == expected, text
        assert tokenizer.special_ids == {0, 1, 2, 3}

    @pytest.mark.parametrize(("pre", "merged"), [("tekken", False), ("llama-bpe", True)])
    def test_tekken_splits_by_case(self, byte_level_library, pre, merged):
        metadata = samples.byte_level_metadata(byte_level_library, pre)
        metadata["tokenizer.ggml.merges"] += ["q Q"]
        metadata["tokenizer.ggml.tokens"] += ["qQ"]
        metadata["tokenizer.ggml.token_type"] += [1]
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        added = len(metadata["tokenizer.ggml.tokens"]) - 1
        assert (added in plain_ids(tokenizer, "xqQ")) is merged

    @pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("gpt-2", False)])
    def test_llama3_takes_a_whole_word_without_merges(self, byte_level_library, pre, whole):
        metadata = samples.byte_level_metadata(byte_level_library, pre)
        metadata["tokenizer.ggml.tokens"] += ["qzqz"]
        metadata["tokenizer.ggml.token_type"] += [1]
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        assert (len(plain_ids(tokenizer, "qzqz")) == 1) is whole

    def test_start_token_of_llama3_is_the_default(self, byte_level_library):
        for pre, expected in (("llama-bpe", [0]), ("qwen2", [])):
            metadata = samples.byte_level_metadata(byte_level_library, pre)
            del metadata["tokenizer.ggml.add_bos_token"]
            assert load_tokenizer(TokenizerFiles("0", gguf=metadata)).encode("") == expected

    def test_padding_of_the_embedding_is_unknown(self, byte_level_library):
        metadata = samples.byte_level_metadata(byte_level_library, "gpt-2")
        size = len(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
        metadata["tokenizer.ggml.token_type"] += [5, 5]
        tokenizer = load_tokenizer(TokenizerFiles("0", gguf=metadata))
        assert tokenizer.vocab_size == size
        assert not tokenizer.is_known(size)
        assert tokenizer.decode([size, size + 1]) == ""


class TestCache:
    def test_the_second_load_reads_the_first_ones_file(self, sentencepiece_metadata, tmp_path):
        files = TokenizerFiles("ab12", gguf=sentencepiece_metadata)
        first = load_tokenizer(files, cache_dir=tmp_path / "new")
        (path,) = (tmp_path / "new").iterdir()
        assert "ab12" in path.name
        # A vocabulary with a marker shows which one is used.
        marked = LibraryTokenizer.from_file(str(path))
        marked.add_tokens(["<marker>"])
        marked.save(str(path))
        second = load_tokenizer(files, cache_dir=tmp_path / "new")
        assert second.vocab_size == first.vocab_size + 1
        for text in STRINGS:
            assert second.encode(text) == first.encode(text)
            assert second.decode(second.encode(text)) == first.decode(first.encode(text))

    def test_an_unreadable_file_is_replaced(self, sentencepiece_metadata, tmp_path, caplog):
        files = TokenizerFiles("ab12", gguf=sentencepiece_metadata)
        load_tokenizer(files, cache_dir=tmp_path)
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        path.write_bytes(whole[:1000])
        with caplog.at_level(logging.WARNING):
            tokenizer = load_tokenizer(files, cache_dir=tmp_path)
        assert "ignoring the cached tokenizer" in caplog.text
        assert tokenizer.decode(tokenizer.encode("Paris")) == "Paris"
        assert path.read_bytes() == whole

    def test_many_writers(self, sentencepiece_metadata, tmp_path):
        files = TokenizerFiles("ab12", gguf=sentencepiece_metadata)
        results = []
        threads = [
            threading.Thread(
                target=lambda: results.append(
                    load_tokenizer(files, cache_dir=tmp_path).encode("Paris")
                )
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert len(results) == 6
        assert all(ids == results[0] for ids in results)
        assert [path.suffix for path in tmp_path.iterdir()] == [".json"]

    def test_a_folder_that_cannot_be_made_costs_only_a_line(
        self, sentencepiece_metadata, tmp_path, caplog
    ):
        (tmp_path / "file").touch()
        files = TokenizerFiles("ab12", gguf=sentencepiece_metadata)
        with caplog.at_level(logging.WARNING):
            tokenizer = load_tokenizer(files, cache_dir=tmp_path / "file")
        assert "not cached" in caplog.text
        assert tokenizer.decode(tokenizer.encode("Paris")) == "Paris"

    def test_a_fingerprint_is_not_a_path(self, sentencepiece_metadata, tmp_path):
        files = TokenizerFiles("../evil", gguf=sentencepiece_metadata)
        load_tokenizer(files, cache_dir=tmp_path / "cache")
        assert list(tmp_path.rglob("*")) == []


class TestDamagedMetadata:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
            ({"model": None}, "tokenizer.ggml.model"),
            ({"tokens": []}, "0 tokens"),
            ({"tokens": [1, 2]}, "not text"),
            ({"tokens": "abc"}, "tokenizer.ggml.tokens is a str"),
            ({"scores": [0.0]}, "1 scores"),
            ({"token_type": [1]}, "1 types"),
            ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
            ({"add_bos_token": "yes"}, "add_bos_token is a str"),
        ],
    )
    def test_names_the_key(self, sentencepiece_metadata, change, message):
        change = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(TokenizerFiles("0", gguf=sentencepiece_metadata | change))

    def test_byte_level(self, byte_level_library):
        metadata = samples.byte_level_metadata(byte_level_library, "gpt-2")
        for change, message in (
            ({"tokenizer.ggml.pre": "martian"}, "'martian'.*llama-bpe"),
            ({"tokenizer.ggml.merges": ["never seen"]}, "cannot be built"),
            ({"tokenizer.ggml.merges": [3]}, "not text"),
        ):
            with pytest.raises(CheckpointError, match=message):
                load_tokenizer(TokenizerFiles("0", gguf=metadata | change))
