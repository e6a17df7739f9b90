"""Text to token ids and back.

Owns: loading (tokenizer.json, or GGUF metadata converted once and cached as a tokenizer.json), what
text may spell, and the bytes of every token. Encoding is the ``tokenizers`` library's; decoding is
ours, from bytes, so that a stream and a whole text cannot differ. Knows nothing of requests; called
by client/ and server/, from any thread.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import threading
from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import TokenizerFiles
from trimaran.text.gguf_tokenizer import GGUFVocabulary, build_library_tokenizer
from trimaran.text.pieces import Spelling, spelling_of

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)
# Raise when the conversion from GGUF changes: older cache files are then no longer looked at.
_CACHE_VERSION = 1


class TokenTexts(dict[int, str | None]):
    """Token id -> its text, or None where its bytes alone are not whole characters. Filled lazily.

    A look-up of what is known costs one dictionary access. Two threads may fill the same entry:
    both write the same value.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._errors = tokenizer.spelling.errors

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self._tokenizer.vocab_size:  # other ids have no bound
            self[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

    def decode(
        self, ids: Sequence[int], pending: bytes = b"", *, final: bool = True
    ) -> tuple[str, bytes]:
        """Text of the bytes ``pending`` and of ``ids``, and the bytes left over.

        Left over is the beginning of a character; nothing where this is ``final``.
        """
        parts = [self[token_id] for token_id in ids]
        if not pending and None not in parts:  # nearly always
            return "".join(parts), pending  # type: ignore[arg-type]
        data = pending + b"".join([self.bytes_of(token_id) for token_id in ids])
        text, used = utf_8_decode(data, self._errors, final)
        return text, data[used:]


class Tokenizer:
    """One model's vocabulary. Thread-safe."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_id: int | None,
        prefix_ids: list[int],
        suffix_ids: list[int],
    ) -> None:
        """``prefix_ids`` and ``suffix_ids`` are what ``add_special_tokens`` puts around a text."""
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        named = {token_id for token_id in (bos_token_id, eos_token_id) if token_id is not None}
        self.special_ids = frozenset(named | set(_special_tokens(library)))
        self.spelling: Spelling = spelling_of(library.decoder)
        self.vocab_size = _vocab_size(library)
        self._library = library
        self._prefix_ids = prefix_ids
        self._suffix_ids = suffix_ids
        # The library keeps "special tokens are ordinary text" as a setting of the whole tokenizer.
        self._lock = threading.Lock()
        self._bytes: dict[int, bytes] = {}
        self._texts = {skip: TokenTexts(self, skip_special_tokens=skip) for skip in (False, True)}

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """Of any token; computed at the first use."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``.

        ``allow_special``: special tokens that the text spells ("<bos>", "<|im_end|>") become those
        tokens; else they are cut up like any other text, so that a user cannot forge them.
        ``add_special_tokens``: put the start token before it (and the end token behind it) where
        the model's own tokenizer does. The start token is never doubled: where the text already
        begins with it, which needs ``allow_special``, none is added.
        """
        # Lone surrogates, which JSON can carry, are no text: the library would raise TypeError.
        text = text.encode("utf-8", "replace").decode("utf-8")
        with self._lock:
            self._library.encode_special_tokens = not allow_special
            # Unlike encode(), which keeps the interpreter lock for as long as it takes.
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if not allow_special:
            ids = self._without_specials(ids)
        if not add_special_tokens:
            return ids
        prefix = self._prefix_ids
        if ids[: len(prefix)] == prefix:
            prefix = []
        return [*prefix, *ids, *self._suffix_ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; unknown ids are empty, broken UTF-8 becomes U+FFFD."""
        text, _ = self._texts[skip_special_tokens].decode(ids)
        strip = self.spelling.strip_start
        return text[:strip].lstrip(" ") + text[strip:] if strip else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, special ones included; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._piece(token_id)
            known = b"" if piece is None else self.spelling.to_bytes(piece)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """For display: the text of one token, U+FFFD where it is part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_texts(self, *, skip_special_tokens: bool) -> TokenTexts:
        """The table that detokenizers share."""
        return self._texts[skip_special_tokens]

    def is_known(self, token_id: int) -> bool:
        return self._piece(token_id) is not None

    def _piece(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        piece: str | None = self._library.id_to_token(token_id)
        return piece

    def _without_specials(self, ids: list[int]) -> list[int]:
        """Cut up special tokens that plain merging has spelled (some vocabularies can)."""
        if self.special_ids.isdisjoint(ids):
            return ids
        model = self._library.model
        unknown = model.unk_token and self._library.token_to_id(model.unk_token)
        plain: list[int] = []
        for token_id in ids:
            if token_id not in self.special_ids or token_id == unknown:
                plain.append(token_id)
                continue
            for character in self._library.id_to_token(token_id) or "":
                plain += [token.id for token in model.tokenize(character)]
        return plain


def load_tokenizer(files: TokenizerFiles, *, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer that ``files`` describe; what GGUF needs converted is kept in ``cache_dir``.

    Raises CheckpointError: there is none, or it is damaged or of an unsupported kind.
    """
    if files.tokenizer_json is not None:
        return _from_json(files.tokenizer_json, files.config)
    if files.gguf is not None:
        return _from_gguf(files, cache_dir)
    raise CheckpointError(
        "the model's files have no tokenizer", hint="put its tokenizer.json into the model folder"
    )


def _from_json(path: str, config: Mapping[str, Any]) -> Tokenizer:
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"tokenizer.json cannot be read: {error}", file=path, hint="download the file again"
        ) from error
    library.no_truncation()
    library.no_padding()
    bos, eos = (_named_token(library, config.get(name)) for name in ("bos_token", "eos_token"))
    prefix, suffix = _surroundings(library)
    return Tokenizer(
        library,
        bos_token_id=bos,
        eos_token_id=eos,
        prefix_ids=prefix,
        suffix_ids=suffix,
    )


def _from_gguf(files: TokenizerFiles, cache_dir: Path | None) -> Tokenizer:
    vocabulary = GGUFVocabulary.from_metadata(files.gguf or {})
    library = None
    path = _cache_path(files.fingerprint, cache_dir)
    if path is not None:
        library = _read_cache(path)
    if library is None:
        library = build_library_tokenizer(vocabulary)
        if path is not None:
            _write_cache(path, library.to_str())
    bos, eos = vocabulary.bos_token_id, vocabulary.eos_token_id
    return Tokenizer(
        library,
        bos_token_id=bos,
        eos_token_id=eos,
        prefix_ids=[bos] if vocabulary.add_bos and bos is not None else [],
        suffix_ids=[eos] if vocabulary.add_eos and eos is not None else [],
    )


def _cache_path(fingerprint: str, cache_dir: Path | None) -> Path | None:
    if cache_dir is None or not fingerprint.isalnum():
        return None
    return cache_dir / f"tokenizer-v{_CACHE_VERSION}-{fingerprint}.json"


def _read_cache(path: Path) -> tokenizers.Tokenizer | None:
    import tokenizers

    if not path.exists():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        logger.warning("ignoring the cached tokenizer %s: %s", path, error)
        return None


def _write_cache(path: Path, content: str) -> None:
    """Whole or not at all, also when several processes write it at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        logger.warning("the tokenizer is not cached, so every start converts it: %s", error)


def _vocab_size(library: tokenizers.Tokenizer) -> int:
    """Highest id + 1. Reading the whole vocabulary is slow, so only where the ids have holes."""
    size: int = library.get_vocab_size(with_added_tokens=False)
    if size and library.id_to_token(size - 1) is None:
        size = max(library.get_vocab(with_added_tokens=False).values()) + 1
    return max([size, *(token_id + 1 for token_id in library.get_added_tokens_decoder())])


def _surroundings(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and behind a text."""
    plain: list[int] = library.encode("a", add_special_tokens=False).ids
    whole: list[int] = library.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise CheckpointError("the post-processor of tokenizer.json changes the text's own tokens")


def _special_tokens(library: tokenizers.Tokenizer) -> list[int]:
    added = library.get_added_tokens_decoder()
    return [token_id for token_id, token in added.items() if token.special]


def _named_token(library: tokenizers.Tokenizer, entry: object) -> int | None:
    """The id of a token that tokenizer_config.json names: as a string, or in an object.

    It is special by being named, even where tokenizer.json has it as an ordinary token.
    """
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    token_id: int | None = library.token_to_id(entry) if isinstance(entry, str) else None
    if token_id is not None and token_id not in _special_tokens(library):
        library.add_special_tokens([entry])
    return token_id
