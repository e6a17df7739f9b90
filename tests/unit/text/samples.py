"""Strings on which tokenizers disagree, and tiny vocabularies trained on the spot."""

import io
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The capital of France is Paris, and the capital of Norway is Oslo.",
    "def add(a, b):\n    return a + b\n\n\nclass Thing(object):\n\tpass\n",
    "In 1984 there were 12345 people; in 2024 there were 67890 of them.",
    "Der Fluß fließt über die Straße. L'été, c'est déjà fini? Привет, мир!",
    "I don't know what they're doing, we'll see. It's what you'd expect, isn't it?",
    "日本語のテキスト。中文文本在这里。한국어 텍스트입니다.",
    "a  b   c    d     e\n\n\n\tf\r\ng  \n h",
    "😀😃😄 and 👩‍👩‍👧 with 🇳🇴",
] * 4
STRINGS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\r\n", " \n ", "  \n\n  x",
    "The capital of France is", " The capital of France is", "  two leading spaces",
    "trailing  ", "a b", "a  b", "a   b", "a    b", "x\ty", "x\t\ty", "x\n\ny",
    "1", "12", "123", "1234", "12345", "3.14159", "1,000,000", "2024-01-31", "0x1F", "１２３",
    "don't", "DON'T", "they're", "we'LL see", "I'd've", "it’s",
    "Straße", "été", "e\u0301te\u0301", "naïve", "Привет, мир!", "日本語", "中文 文本", "한국어",
    "😀", "👩‍👩‍👧", "🇳🇴", "a😀b", "\u200b", "\u00a0", "\ufeff", "\x00", "\x07", "\ufffd", "𓀀",
    "def f(x):\n    return x**2\n", "if (a&&b) { c++; }", "foo_bar.baz(qux=1)", "http://x.y/z?q=1#f",
    "<table><tr><td>1</td></tr></table>", "</think>", "▁", "a▁b", "<0x41>", "���",
    "ALLCAPS lowercase MixedCase camelCase", "...!!!???", "—–-", "\"quoted\" 'text'", "a" * 100,
    " " * 40, "\n" * 40, "word " * 30, "<unk>", "[INST]", "<s>", "</s> x", "<|im_end|>",
]  # fmt: skip
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def train_byte_level(split: str = GPT2_SPLIT, *, nfc: bool = False) -> Tokenizer:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it; no start token is added."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """The vocabulary as GGUF metadata."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(index) for index in range(size)]
    types = [1] * size
    for index, token in tokenizer.get_added_tokens_decoder().items():
        types[index] = 3 if token.special else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def train_sentencepiece(*, add_space_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece BPE with byte pieces, as Llama 2, Mistral and Gemma have it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=add_space_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁", "<table>", "</think>"],
        control_symbols=["[INST]", "<|im_end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The vocabulary as GGUF metadata, spelled as llama.cpp's converter spells it."""
    tokens, scores, types = [], [], []
    for index in range(processor.get_piece_size()):
        piece = processor.id_to_piece(index)
        kind = 1
        if processor.is_unknown(index):
            kind = 2
        elif processor.is_control(index):
            kind = 3
        elif processor.is_byte(index):
            kind = 6
        elif piece in ("\n", "\n\n", "▁▁", "▁▁▁", "<table>", "</think>"):
            kind, piece = 4, piece.replace("▁", " ")
        tokens.append(piece)
        scores.append(processor.get_score(index))
        types.append(kind)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
    }
