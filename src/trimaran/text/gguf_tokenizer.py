"""A ``tokenizers`` tokenizer from the metadata of a GGUF file.

Owns: the two vocabularies that GGUF files of our families carry. ``llama`` is SentencePiece BPE
(pieces and scores; merges are implied by the scores), ``gpt2`` is byte-level BPE (merges in the
file, the splitting expression known by the name in ``tokenizer.ggml.pre``). The format is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows nothing of caching or decoding;
called by ``tokenizer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from trimaran.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_T = TypeVar("_T")
SPACE = "\u2581"  # how SentencePiece spells a space


class PieceType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5  # padding of the embedding: such ids are not part of the tokenizer
    BYTE = 6


@dataclass(frozen=True)
class _Splitting:
    """How a byte-level vocabulary cuts text before merging, by ``tokenizer.ggml.pre``."""

    pattern: str | None  # None: the expression of GPT-2
    ignore_merges: bool = False  # a whole word that is in the vocabulary is taken as it is
    normalize: bool = False  # to NFC, as the tokenizer that the model was trained with does
    add_bos: bool = False  # where the file does not say


_LLAMA3 = _Splitting(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = _Splitting(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    normalize=True,
)
_TEKKEN = _Splitting(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_SPLITTINGS = {
    "default": _Splitting(None),
    "gpt-2": _Splitting(None),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True)
class GGUFVocabulary:
    """The ``tokenizer.ggml.*`` keys, checked."""

    pieces: list[str]
    types: list[int]
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    byte_level: bool
    scores: list[float]
    merges: list[str]
    splitting: _Splitting

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> GGUFVocabulary:
        """Raises CheckpointError: a key is missing, contradicts another or is unsupported."""
        model = _get(metadata, "model", str, "")
        if model not in ("llama", "gpt2"):
            raise CheckpointError(
                f"tokenizer.ggml.model is {model!r}; 'llama' and 'gpt2' are supported",
                hint="convert the model from a folder with a tokenizer.json",
            )
        byte_level = model == "gpt2"
        pre = _get(metadata, "pre", str, "default")
        splitting = _SPLITTINGS.get(pre) if byte_level else _Splitting(None, add_bos=True)
        if splitting is None:
            raise CheckpointError(
                f"tokenizer.ggml.pre is {pre!r}, which is not known; supported are "
                + ", ".join(sorted(_SPLITTINGS)),
                hint="serve the model from a folder with a tokenizer.json",
            )
        pieces = _strings(metadata, "tokens")
        scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(pieces)
        types = metadata.get("tokenizer.ggml.token_type") or [PieceType.NORMAL] * len(pieces)
        if not pieces or len(scores) != len(pieces) or len(types) != len(pieces):
            raise CheckpointError(
                f"the tokenizer has {len(pieces)} tokens, {len(scores)} scores and {len(types)}"
                " types; the counts must agree",
                hint="the file is damaged: download or convert it again",
            )
        return cls(
            pieces=pieces,
            types=types,
            bos_token_id=_token_id(metadata, "bos", len(pieces)),
            eos_token_id=_token_id(metadata, "eos", len(pieces)),
            unknown_token_id=_token_id(metadata, "unknown", len(pieces)),
            add_bos=_get(metadata, "add_bos_token", bool, splitting.add_bos),
            add_eos=_get(metadata, "add_eos_token", bool, False),
            add_space_prefix=_get(metadata, "add_space_prefix", bool, not byte_level),
            byte_level=byte_level,
            scores=scores,
            merges=_strings(metadata, "merges") if byte_level else [],
            splitting=splitting,
        )

    def of_type(self, *types: PieceType) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind in types]


def build_library_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    """The same vocabulary as a ``tokenizers`` tokenizer, without a post-processor.

    Raises CheckpointError: the library refuses it (merges of unknown pieces, for one).
    """
    ids = {
        piece: index
        for index, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind != PieceType.UNUSED
    }
    build = _byte_level if vocabulary.byte_level else _sentencepiece
    try:
        tokenizer = build(vocabulary, ids)
        tokenizer.add_special_tokens(_added(vocabulary, PieceType.UNKNOWN, PieceType.CONTROL))
        tokenizer.add_tokens(_added(vocabulary, PieceType.USER_DEFINED))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"the tokenizer of the GGUF file cannot be built: {error}",
            hint="the file is damaged: download or convert it again",
        ) from error
    return tokenizer


def _added(vocabulary: GGUFVocabulary, *types: PieceType) -> list[AddedToken]:
    from tokenizers import AddedToken

    special = PieceType.CONTROL in types
    # normalized=False: matched in the text as written. GGUF spells the spaces of user-defined
    # pieces as spaces, unlike those of all others.
    return [
        AddedToken(piece, special=special, normalized=False)
        for piece in vocabulary.of_type(*types)
        if piece
    ]


def _sentencepiece(vocabulary: GGUFVocabulary, ids: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = vocabulary.unknown_token_id
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges_from_scores(vocabulary),
            unk_token=None if unknown is None else vocabulary.pieces[unknown],
            fuse_unk=True,
            byte_fallback=PieceType.BYTE in vocabulary.types,
        )
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        # Before the first word only, and not where the text begins with a space or an added
        # token: what transformers does. (SentencePiece itself adds one there, too.)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="first", split=False
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best third first.

    SentencePiece BPE joins the neighbours whose union has the highest score; a merge list in that
    order does the same. Only normal pieces take part: control and byte pieces must not be spelled
    by text, and user-defined ones are found before any merging.
    """
    normal = {
        piece: index
        for index, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind == PieceType.NORMAL
    }
    scores = vocabulary.scores
    merges: list[tuple[str, str]] = []
    for piece in sorted(normal, key=lambda piece: (-scores[normal[piece]], normal[piece])):
        ways = [
            (normal[left], normal[right], left, right)
            for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            if left in normal and right in normal
        ]
        ways.sort()
        merges += [(left, right) for _, _, left, right in ways]
    return merges


def _byte_level(vocabulary: GGUFVocabulary, ids: dict[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting = vocabulary.splitting
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in vocabulary.merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=splitting.ignore_merges)
    )
    if splitting.normalize:
        tokenizer.normalizer = normalizers.NFC()
    prefix = vocabulary.add_space_prefix
    if splitting.pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _get(metadata: dict[str, Any], name: str, kind: type[_T], default: _T) -> _T:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, kind):
        raise CheckpointError(
            f"tokenizer.ggml.{name} is a {type(value).__name__}, expected {kind.__name__}"
        )
    return value


def _strings(metadata: dict[str, Any], name: str) -> list[str]:
    values = _get(metadata, name, list, [])
    if not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"tokenizer.ggml.{name} holds something that is not text")
    return values


def _token_id(metadata: dict[str, Any], name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(f"{key} is {value}, outside the {vocab_size} tokens of the file")
    return value
