"""Structs to bytes and back, over msgpack.

Owns: the size cap of a frame and the one error a bad frame raises. Knows no struct: the type is an
argument. Called by whoever holds a socket (engine/, client/, launch/). Nothing it decodes can
execute, and nothing it is given raises anything but ProtocolError.
"""

from typing import Any, Generic, TypeVar

import msgspec

from trimaran.errors import ProtocolError

# A prompt of a million tokens takes 5 MB; sockets refuse larger frames before they are read.
MAX_FRAME_BYTES = 64 << 20

T = TypeVar("T")


class Encoder:
    """One per thread."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def encode(self, message: Any) -> bytes:
        """Raises ProtocolError: the message is too large, or holds what msgpack cannot."""
        try:
            self._encoder.encode_into(message, self._buffer)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"cannot encode {type(message).__name__}: {error}") from error
        if len(self._buffer) > self._max_bytes:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(self._buffer)} bytes is above the"
                f" {self._max_bytes} that a frame may have"
            )
        return bytes(self._buffer)


class Decoder(Generic[T]):
    """Decodes frames of one type (a struct, or a tagged union of structs)."""

    def __init__(self, type_: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type_)
        self._name = getattr(type_, "__name__", str(type_))
        self._max_bytes = max_bytes

    def decode(self, frame: bytes) -> T:
        """Raises ProtocolError: the frame is too large or not of this type."""
        if len(frame) > self._max_bytes:
            raise ProtocolError(f"a frame of {len(frame)} bytes is above {self._max_bytes}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a {self._name}: {error}") from error
