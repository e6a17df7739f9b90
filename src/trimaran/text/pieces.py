"""How the spelling of a token in a vocabulary becomes bytes, and bytes become text.

Owns: the two alphabets (SentencePiece's ``▁`` and ``<0x41>``, the printable stand-ins of byte-level
BPE), read off the decoder of a ``tokenizers`` tokenizer, and the rule for what is not UTF-8.
Called by ``tokenizer`` and ``detokenizer``.

Bytes that are not UTF-8 become U+FFFD: one for each byte where the vocabulary has byte pieces, as
SentencePiece decodes; one for each broken character where it is byte-level, as the ``tokenizers``
library decodes. (For byte pieces that library replaces the whole run in which a bad byte stands,
valid characters included. A stream cannot take back what it has sent, so that is not followed.)
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimaran.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder

EACH_BYTE = "trimaran.each_byte"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for 256, 257 …"""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


@dataclass(frozen=True)
class Spelling:
    """What the decoder of a tokenizer does with the pieces of a vocabulary."""

    alphabet: dict[str, int] | None = None  # byte-level: the byte of each character
    replacements: tuple[tuple[str, str], ...] = ()
    byte_pieces: bool = False  # <0x41> is one byte
    strip_start: int = 0  # spaces taken from the beginning of a whole text

    @property
    def errors(self) -> str:
        """The codec error handler of this vocabulary."""
        return EACH_BYTE if self.byte_pieces else "replace"

    def to_bytes(self, piece: str) -> bytes:
        if self.alphabet is not None:
            try:
                return bytes([self.alphabet[character] for character in piece])
            except KeyError:  # an added token is spelled as itself
                return piece.encode()
        if self.byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def spelling_of(decoder: Decoder | None) -> Spelling:
    """From ``tokenizers.Tokenizer.decoder``.

    Raises CheckpointError: a kind of decoder that the supported model families do not use.
    """
    if decoder is None:
        raise CheckpointError(
            "tokenizer.json has no decoder, so its tokens cannot be joined to a text",
            hint="save the tokenizer with a ByteLevel decoder, or Replace, ByteFallback and Fuse",
        )
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    found = Spelling()
    for step in steps:
        found = _with_step(found, step)
    return found


def _with_step(spelling: Spelling, step: dict[str, Any]) -> Spelling:
    alphabet, replacements = spelling.alphabet, spelling.replacements
    byte_pieces, strip_start = spelling.byte_pieces, spelling.strip_start
    match step:
        case {"type": "ByteLevel"}:
            alphabet = _byte_level_alphabet()
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            replacements = (*replacements, (old, new))
        case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}:
            replacements = (*replacements, (old, " "))
            strip_start = 0 if scheme == "never" else 1
        case {"type": "ByteFallback"}:
            byte_pieces = True
        case {"type": "Fuse"}:
            pass  # we always join
        case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
            strip_start = start
        case _:
            raise CheckpointError(
                f"tokenizer.json has a decoder that is not supported: {json.dumps(step)[:200]}",
                hint="supported are ByteLevel, Replace, ByteFallback, Fuse, Strip and Metaspace",
            )
    return Spelling(alphabet, replacements, byte_pieces, strip_start)
