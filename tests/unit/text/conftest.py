"""Tokenizers for the text tests, each made once."""

import pytest
from tests.unit.text import samples

from trimaran.formats.architecture import TokenizerFiles
from trimaran.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def byte_level_library():
    return samples.train_byte_level()


@pytest.fixture(scope="session")
def json_file(tmp_path_factory):
    """Writes a tokenizer of the library, or any text, as a tokenizer.json; returns its path."""

    def write(content):
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        path.write_text(content if isinstance(content, str) else content.to_str(), "utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def byte_level(byte_level_library, json_file):
    """Loaded from a tokenizer.json."""
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    return load_tokenizer(
        TokenizerFiles("0", tokenizer_json=json_file(byte_level_library), config=config)
    )


@pytest.fixture(scope="session", params=[True, False], ids=["prefix", "no-prefix"])
def sentencepiece_processor(request):
    return samples.train_sentencepiece(add_space_prefix=request.param)


@pytest.fixture(scope="session")
def sentencepiece_metadata(sentencepiece_processor):
    prefix = sentencepiece_processor.encode("a", out_type=str) != ["a"]
    return samples.sentencepiece_metadata(sentencepiece_processor) | {
        "tokenizer.ggml.add_space_prefix": prefix
    }


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_metadata):
    """Built from GGUF metadata."""
    return load_tokenizer(TokenizerFiles("0", gguf=sentencepiece_metadata))


@pytest.fixture(scope="session", params=["byte-level", "sentencepiece"])
def any_tokenizer(request, byte_level):
    if request.param == "byte-level":
        return byte_level
    processor = samples.train_sentencepiece(add_space_prefix=True)
    return load_tokenizer(TokenizerFiles("0", gguf=samples.sentencepiece_metadata(processor)))
