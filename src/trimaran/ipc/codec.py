"""Structs to frames and back, over msgpack.

Owns: the size caps, how big buffers travel, and the one error a bad message raises. Knows no
struct: the type is an argument. Called by whoever holds a socket (engine/, client/, launch/).
Nothing it decodes can execute, and nothing it is given raises anything but ProtocolError.

A message is one payload frame; each ``Buffer`` of INLINE_BYTES and more that it holds is a frame of
its own behind it, in the order in which they lie in the payload, where its number stands instead.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from trimaran.errors import ProtocolError

# A prompt of a million tokens takes 5 MB; sockets refuse larger frames before they are read.
MAX_FRAME_BYTES = 64 << 20
# Of one buffer, and of all of a message: 32,768 rows of 2,048 float32 numbers.
MAX_BUFFER_BYTES = 256 << 20
MAX_BUFFERS = 16
# Below it a copy costs less than a frame of its own (pyzmq's copy_threshold is the same).
INLINE_BYTES = 64 << 10

T = TypeVar("T")
Frame = bytes | memoryview


class Buffer:
    """Bytes in somebody's memory, which nobody may change while a Buffer of them is in use.

    Sent without a copy from INLINE_BYTES on; received as a view of what the socket read.
    """

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        """``data``: anything contiguous that has the buffer protocol (TypeError: it is not)."""
        self.data = memoryview(data).cast("B")  # [nbytes]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Encoder:
    """One per thread."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_buffer)
        self._max_bytes = max_bytes
        self._payload = bytearray()
        self._buffers: list[Frame] = []

    def encode(self, message: Any) -> bytes:
        """For messages of one frame.

        Raises ProtocolError: it is too large, holds what msgpack cannot, or a big buffer.
        """
        payload = self._encode(message)
        if self._buffers:
            raise ProtocolError(f"a {type(message).__name__} with big buffers needs more frames")
        return payload

    def encode_frames(self, message: Any) -> list[Frame]:
        """[payload, buffers…]; the buffers are views, not copies. Raises as ``encode``."""
        payload = self._encode(message)
        buffers, self._buffers = self._buffers, []  # kept alive by whoever sends, not here
        if buffers:
            _check_buffers(buffers)
        return [payload, *buffers]

    def _encode(self, message: Any) -> bytes:
        self._buffers.clear()
        try:
            self._encoder.encode_into(message, self._payload)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"cannot encode {type(message).__name__}: {error}") from error
        if len(self._payload) > self._max_bytes:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(self._payload)} bytes is above the"
                f" {self._max_bytes} that a frame may have"
            )
        return bytes(self._payload)

    def _encode_buffer(self, value: Any) -> Any:
        if not isinstance(value, Buffer):
            raise TypeError(f"a {type(value).__name__} cannot be encoded")
        if value.nbytes < INLINE_BYTES:
            return value.data
        self._buffers.append(value.data)
        return len(self._buffers) - 1


class Decoder(Generic[T]):
    """Decodes messages of one type (a struct, or a tagged union of structs). One per thread."""

    def __init__(self, type_: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            type_, dec_hook=self._decode_buffer
        )
        self._name = getattr(type_, "__name__", str(type_))
        self._max_bytes = max_bytes
        self._buffers: Sequence[Frame] = ()
        self._num_taken = 0

    def decode(self, frame: Frame, buffers: Sequence[Frame] = ()) -> T:
        """``buffers``: the frames behind the payload, each of which it must use once.

        Raises ProtocolError: a frame is too large, or they are no message of this type.
        """
        if len(frame) > self._max_bytes:
            raise ProtocolError(f"a frame of {len(frame)} bytes is above {self._max_bytes}")
        if buffers:
            _check_buffers(buffers)
        self._buffers, self._num_taken = buffers, 0
        try:
            message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a {self._name}: {error}") from error
        finally:
            self._buffers = ()
        if self._num_taken != len(buffers):
            raise ProtocolError(
                f"a {self._name} that names {self._num_taken} buffers came with {len(buffers)}"
            )
        return message

    def _decode_buffer(self, type_: type, value: Any) -> Buffer:
        """``value``: the bytes themselves, or the number of the next frame."""
        if type(value) is bytes:
            return Buffer(value)
        # In order, so that no frame is named twice and no number leads nowhere.
        if type(value) is int and value == self._num_taken < len(self._buffers):
            self._num_taken += 1
            return Buffer(self._buffers[value])
        raise ValueError("a buffer is bytes, or the number of the next frame")


def _check_buffers(buffers: Sequence[Frame]) -> None:
    if len(buffers) > MAX_BUFFERS:
        raise ProtocolError(f"a message has at most {MAX_BUFFERS} big buffers, got {len(buffers)}")
    total = sum(map(len, buffers))
    if total > MAX_BUFFER_BYTES:
        raise ProtocolError(
            f"the buffers of a message have {total} bytes, above the limit of {MAX_BUFFER_BYTES}"
        )
