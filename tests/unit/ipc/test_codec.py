"""The codec: what goes in comes out, and nothing but ProtocolError for the rest."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.errors import ProtocolError
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HandshakeMessage,
    UtilityCall,
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


DECODERS = [
    Decoder(kind)
    for kind in (EngineCoreRequest, EngineCoreOutputs, UtilityCall, AbortRequests, HandshakeMessage)
]


@given(st.sampled_from(DECODERS), st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_errors(decoder, frame):
    with contextlib.suppress(ProtocolError):
        decoder.decode(frame)


@given(st.sampled_from([REQUEST, OUTPUTS]), st.data())
def test_damaged_messages_raise_only_protocol_errors(message, data):
    frame = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    with contextlib.suppress(ProtocolError):
        Decoder(type(message)).decode(bytes(frame[:cut]))


@pytest.mark.parametrize("depth", [10, 100_000])
def test_depth_and_length_bombs(depth):
    for frame in (b"\x91" * depth, b"\xdd\xff\xff\xff\xff", b"\x92\xa1a\xdd\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            Decoder(EngineCoreRequest).decode(frame)
