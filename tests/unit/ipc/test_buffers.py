"""Big buffers: frames of their own, the same memory on both sides, and nothing dangling."""

import time
import weakref

import msgspec
import numpy as np
import pytest

from trimaran.errors import ProtocolError
from trimaran.ipc import codec
from trimaran.ipc.codec import INLINE_BYTES, MAX_BUFFERS, Buffer, Decoder, Encoder
from trimaran.ipc.sockets import Context, Sent
from trimaran.messages import AbortRequests

TIMEOUT_S = 10.0


class Parcel(msgspec.Struct, array_like=True):
    name: str
    items: list[Buffer]


def address(data):
    return np.frombuffer(data, np.uint8).ctypes.data


def array(nbytes=INLINE_BYTES, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_small_ones_lie_in_the_payload_and_big_ones_are_the_senders_own_memory():
    small, big, bigger = array(INLINE_BYTES - 1, 1), array(seed=2), array(1 << 20, 3)
    message = Parcel("p", [Buffer(big), Buffer(small), Buffer(bigger)])
    payload, *buffers = Encoder().encode_frames(message)
    assert [address(buffer) for buffer in buffers] == [big.ctypes.data, bigger.ctypes.data]
    assert INLINE_BYTES < len(payload) < INLINE_BYTES + 100
    decoded = Decoder(Parcel).decode(payload, buffers)
    assert [address(item.data) for item in decoded.items[::2]] == [
        big.ctypes.data,
        bigger.ctypes.data,
    ]
    assert decoded.items[1].data == small.tobytes()


def test_a_message_of_one_frame_may_not_hold_a_big_one():
    encoder = Encoder()
    with pytest.raises(ProtocolError, match="more frames"):
        encoder.encode(Parcel("p", [Buffer(array())]))
    assert encoder.encode_frames(AbortRequests(["a"])) == [
        msgspec.msgpack.encode(AbortRequests(["a"]))
    ]


def test_an_encoder_keeps_nothing_alive():
    data = array()
    gone = weakref.ref(data)
    encoder = Encoder()
    frames = encoder.encode_frames(Parcel("p", [Buffer(data)]))
    del data
    assert gone() is not None
    del frames
    assert gone() is None


@pytest.mark.parametrize(
    ("places", "num_frames"),
    [
        ([0], 0),
        ([], 1),
        ([0], 2),
        ([0, 0], 1),
        ([1], 2),
        ([1, 0], 2),
        ([0, 2], 3),
        ([-1], 1),
        ([1 << 63], 1),
        ([0.0], 1),
        ([True], 2),
        (["0"], 1),
        ([None], 1),
        ([[0]], 1),
        ([msgspec.msgpack.Ext(5, b"0")], 1),
    ],
    ids=str,
)
def test_dangling_doubled_and_nonsensical_numbers_are_refused(places, num_frames):
    payload = msgspec.msgpack.encode(["p", places])
    with pytest.raises(ProtocolError):
        Decoder(Parcel).decode(payload, [b"x"] * num_frames)


def test_a_decoder_is_none_the_worse_for_a_refusal():
    decoder = Decoder(Parcel)
    with pytest.raises(ProtocolError):
        decoder.decode(msgspec.msgpack.encode(["p", [0, 0]]), [b"x"])
    decoded = decoder.decode(msgspec.msgpack.encode(["p", [0, b"y"]]), [b"x"])
    assert [bytes(item.data) for item in decoded.items] == [b"x", b"y"]


def test_buffers_that_come_with_a_type_without_any_are_refused():
    with pytest.raises(ProtocolError, match="names 0 buffers came with 1"):
        Decoder(AbortRequests).decode(Encoder().encode(AbortRequests(["a"])), [b"x"])


def test_their_number_and_their_bytes_are_bounded_on_both_sides(monkeypatch):
    many = Parcel("p", [Buffer(array()) for _ in range(MAX_BUFFERS + 1)])
    with pytest.raises(ProtocolError, match=f"at most {MAX_BUFFERS} big buffers"):
        Encoder().encode_frames(many)
    with pytest.raises(ProtocolError, match="at most"):
        Decoder(Parcel).decode(b"", [b"x"] * (MAX_BUFFERS + 1))
    # Of all buffers of a message together.
    monkeypatch.setattr(codec, "MAX_BUFFER_BYTES", 2 * INLINE_BYTES)
    with pytest.raises(ProtocolError, match=f"above the limit of {2 * INLINE_BYTES}"):
        Encoder().encode_frames(Parcel("p", [Buffer(array())] * 3))
    with pytest.raises(ProtocolError, match="above the limit"):
        Decoder(Parcel).decode(b"", [bytes(INLINE_BYTES)] * 3)


def test_what_is_not_contiguous_is_no_buffer():
    with pytest.raises(TypeError):
        Buffer(np.zeros((4, 4), np.uint8)[:, ::2])


def test_a_big_frame_is_the_same_memory_on_both_sides_and_lives_until_it_is_dropped():
    """Within a process ZMQ hands messages over as they are, so that a copy would show."""
    context = Context()
    left, right = context.pair()
    data = array(1 << 20)
    where, content, gone = data.ctypes.data, data.tobytes(), weakref.ref(data)
    frames = Encoder().encode_frames(Parcel("p", [Buffer(data), Buffer(b"small")]))
    assert left.try_send([b"type", *frames]) is Sent.OK
    del data, frames
    assert gone() is not None
    received, buffers = right.try_receive_buffers(2)
    assert [received[0], len(received), len(buffers)] == [b"type", 2, 1]
    parcel = Decoder(Parcel).decode(received[1], buffers)
    assert address(parcel.items[0].data) == where
    assert parcel.items[0].data == content
    assert parcel.items[0].data.readonly
    del received, buffers
    assert gone() is not None
    del parcel
    deadline = time.monotonic() + TIMEOUT_S  # pyzmq's thread lets go of it
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    left.close()
    right.close()
    context.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_frames_before_the_buffers_are_bytes(count):
    context = Context()
    left, right = context.pair()
    assert right.try_receive_buffers(2) is None
    left.try_send([b"%d" % i for i in range(count)])
    frames, buffers = right.try_receive_buffers(2)
    assert frames == [b"0", b"1"][:count]
    assert [bytes(buffer) for buffer in buffers] == [b"2", b"3"][: max(0, count - 2)]
    left.close()
    right.close()
    context.close()
