"""The codec: what goes in comes out, and nothing but ProtocolError for the rest."""

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ipc.frames import (
    BOMBS,
    MESSAGES,
    damaged,
    damaged_frames,
    frames_of,
    with_a_wild_field,
)

from trimaran import messages
from trimaran.errors import ProtocolError
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HandshakeMessage,
    Tensor,
)
from trimaran.sampling_params import SamplingParams

REQUEST = EngineCoreRequest("a", [1, 2], SamplingParams(max_tokens=3, logit_bias={7: 1.5}))
OUTPUTS = EngineCoreOutputs(
    1, 99, outputs=[EngineCoreOutput("a", 4, [5], FinishReason.STOP, stop_reason=5)]
)


@pytest.mark.parametrize("message", [REQUEST, OUTPUTS, AbortRequests(["a"])], ids=lambda m: type(m))
def test_round_trip(message):
    assert Decoder(type(message)).decode(Encoder().encode(message)) == message


def test_an_encoder_can_be_used_again_for_something_shorter():
    encoder = Encoder()
    encoder.encode(AbortRequests(["a" * 1000]))
    assert encoder.encode(AbortRequests(["b"])) == msgspec.msgpack.encode(AbortRequests(["b"]))


def test_size_caps():
    with pytest.raises(ProtocolError, match="above the 10 that"):
        Encoder(max_bytes=10).encode(AbortRequests(["a" * 20]))
    with pytest.raises(ProtocolError, match="above 10"):
        Decoder(AbortRequests, max_bytes=10).decode(b"x" * 11)


def test_what_msgpack_cannot_hold_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="cannot encode AbortRequests"):
        Encoder().encode(AbortRequests([object()]))
    with pytest.raises(ProtocolError, match="cannot encode"):
        Encoder().encode(EngineCoreOutputs(1 << 70, 0))


TYPES = [*{type(message) for message in MESSAGES}, HandshakeMessage, Tensor]
DECODERS = [Decoder(kind) for kind in TYPES]
FRAMES = [(type(message), frames_of(message)) for message in MESSAGES]


def test_the_messages_of_the_fuzz_are_in_order():
    for kind, (payload, *buffers) in FRAMES:
        Decoder(kind).decode(payload, buffers)
    assert [len(frames) for _, frames in FRAMES].count(2) == 1


def kinds_in(value):
    if isinstance(value, msgspec.Struct):
        return {type(value)}.union(*(kinds_in(getattr(value, f)) for f in value.__struct_fields__))
    values = value.values() if isinstance(value, dict) else value
    return set().union(*map(kinds_in, values)) if isinstance(value, list | tuple | dict) else set()


def test_every_kind_of_message_is_among_them():
    kinds = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    assert kinds_in(MESSAGES) == kinds, "put one of the new kind into tests/unit/ipc/frames.py"


@settings(max_examples=400)
@given(st.sampled_from(DECODERS), damaged_frames(), st.lists(damaged_frames(), max_size=2))
def test_nothing_but_protocol_errors_whatever_comes(decoder, payload, buffers):
    with contextlib.suppress(ProtocolError):
        decoder.decode(payload, buffers)


@settings(max_examples=400)
@given(st.sampled_from(FRAMES), st.data())
def test_nothing_but_protocol_errors_for_what_is_nearly_in_order(kind_and_frames, data):
    kind, (payload, *buffers) = kind_and_frames
    payload = data.draw(damaged(payload) | with_a_wild_field(payload))
    buffers = data.draw(st.sampled_from([buffers, [], [*buffers, b"x"], buffers[::-1]]))
    with contextlib.suppress(ProtocolError):
        Decoder(kind).decode(payload, buffers)


@pytest.mark.parametrize("depth", [10, 100_000])
def test_depth_and_length_bombs(depth):
    for frame in (b"\x91" * depth, *BOMBS):
        with pytest.raises(ProtocolError):
            Decoder(EngineCoreRequest).decode(frame)
