"""How many token ids the tokenizer of a model knows.

Owns: that number, read without building a tokenizer (which would cost an engine its start). The
rest of a padded embedding must never be sampled. Called by ``worker``.
"""

from pathlib import Path

import msgspec

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import TokenizerFiles


class _Model(msgspec.Struct):
    # Token -> id, or (Unigram) a list of [token, score] whose places are the ids.
    vocab: dict[str, int] | list[msgspec.Raw]


class _AddedToken(msgspec.Struct):
    id: int


class _TokenizerJson(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


def num_known_tokens(files: TokenizerFiles, vocab_size: int) -> int:
    """Ids below this are known; at most ``vocab_size``, which is also the answer without files.

    Raises CheckpointError: tokenizer.json is damaged.
    """
    if files.gguf is not None:
        return min(vocab_size, len(files.gguf["tokenizer.ggml.tokens"]))
    if files.tokenizer_json is None:
        return vocab_size
    try:
        content = Path(files.tokenizer_json).read_bytes()
        tokenizer = msgspec.json.decode(content, type=_TokenizerJson)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"is not a tokenizer: {error}", file=files.tokenizer_json, hint="download it again"
        ) from error
    vocab = tokenizer.model.vocab
    ids = [len(vocab) - 1] if isinstance(vocab, list) else list(vocab.values())
    ids += [token.id for token in tokenizer.added_tokens]
    return min(vocab_size, max(ids, default=vocab_size - 1) + 1)
