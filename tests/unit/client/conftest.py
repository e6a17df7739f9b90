"""A tiny byte-level model's files: real tokenizer, no weights needed."""

import pytest

from trimaran.bench.tiny_model import write_tiny_model
from trimaran.formats.model_source import open_model
from trimaran.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return open_model(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def tokenizer(source):
    return load_tokenizer(source.tokenizer)
