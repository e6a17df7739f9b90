"""The number of ids a tokenizer knows."""

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import TokenizerFiles
from trimaran.worker.vocabulary import num_known_tokens


def files_of(tokenizer: Tokenizer, folder) -> TokenizerFiles:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizerFiles(fingerprint="", tokenizer_json=str(path))


@pytest.mark.parametrize(
    "model",
    [
        BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]),
        Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0),
        WordLevel(vocab={"x": 0, "<unk>": 2}, unk_token="<unk>"),  # with a gap
    ],
    ids=lambda model: type(model).__name__,
)
def test_of_a_folder(model, tmp_path):
    tokenizer = Tokenizer(model)
    assert num_known_tokens(files_of(tokenizer, tmp_path), 128) == 3
    tokenizer.add_special_tokens([AddedToken("<eos>")])
    known = num_known_tokens(files_of(tokenizer, tmp_path), 128)
    assert known == tokenizer.token_to_id("<eos>") + 1
    assert num_known_tokens(files_of(tokenizer, tmp_path), 2) == 2  # never beyond the embedding


def test_of_a_gguf_file_and_of_none():
    gguf = TokenizerFiles(fingerprint="", gguf={"tokenizer.ggml.tokens": ["a"] * 100})
    assert num_known_tokens(gguf, 128) == 100
    assert num_known_tokens(TokenizerFiles(fingerprint=""), 128) == 128


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"vocab": 3}}'])
def test_damaged(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        num_known_tokens(TokenizerFiles(fingerprint="", tokenizer_json=str(path)), 10)
