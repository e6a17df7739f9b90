"""The launcher's end of the handshake: who is let in, and what is said of those who are missing."""

import contextlib
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.config import CacheConfig, EngineConfig, ModelConfig
from trimaran.engine.spec import fingerprint
from trimaran.errors import DeadlineExceededError, ProtocolError
from trimaran.ids import engine_identity
from trimaran.launch.handshake import Handshake
from trimaran.messages import (
    PROTOCOL_VERSION,
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineHello,
    EngineInit,
    EngineProgress,
    HandshakeRefusal,
)

ADDRESSES = EngineAddresses(inputs=["ipc:///in"], outputs=["ipc:///out"])
CONFIG = EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(block_size=16))


@pytest.fixture
def handshake():
    return Handshake({0: 100, 1: 101}, fingerprint(CONFIG), ADDRESSES, 1000.0, 60.0)


def hello(rank=0, incarnation=100, version=PROTOCOL_VERSION, config=CONFIG):
    return EngineHello(version, rank, incarnation, 4242, fingerprint(config))


def ready(rank, incarnation):
    return EngineCoreReadyResponse(
        rank=rank,
        incarnation=incarnation,
        num_kv_blocks=10,
        block_size=16,
        max_model_len=100,
        vocab_size=7,
        dtype="float32",
        kv_cache_bytes=1,
        weight_bytes=1,
        num_threads=1,
        kernels="mock",
    )


def test_from_hello_to_ready(handshake):
    assert handshake.receive(engine_identity(0), hello()) == EngineInit(ADDRESSES)
    assert handshake.progress == ("spawned", 0.0, "")
    handshake.receive(engine_identity(0), EngineProgress(0, 100, "loading", 40.0, "3 of 7"))
    assert handshake.missing(1012.0) == (
        "engine rank 0 (phase loading 3 of 7, 12 s), engine rank 1 (phase spawned, 12 s)"
    )
    handshake.receive(engine_identity(0), ready(0, 100))
    assert handshake.missing(1012.0) == "engine rank 1 (phase spawned, 12 s)"
    assert not handshake.complete
    handshake.receive(engine_identity(1), ready(1, 101))
    assert handshake.complete
    assert handshake.progress[:2] == ("ready", 100.0)
    assert [response.rank for response in handshake.responses] == [0, 1]
    handshake.check_deadline(5000.0)


@pytest.mark.parametrize(
    ("message", "identity", "reason"),
    [
        (hello(version=99), 0, r"protocol 99.*install the same version"),
        (hello(rank=5), 5, r"rank 5 is not expected \(expected: 0, 1\)"),
        (hello(rank=0), 1, r"rank 0 is not expected"),
        (hello(incarnation=7), 0, r"another engine runs as rank 0"),
        (
            hello(config=msgspec.structs.replace(CONFIG, cache=CacheConfig(block_size=32))),
            0,
            r"^--block-size is 16 here and 32 there$",
        ),
        (
            hello(config=EngineConfig(model=ModelConfig(model="n", dtype="float32"))),
            0,
            r"--dtype is auto here and float32 there; --model is m here and n there",
        ),
    ],
)
def test_who_does_not_fit_is_told_why(handshake, message, identity, reason):
    refusal = handshake.receive(engine_identity(identity), message)
    assert isinstance(refusal, HandshakeRefusal)
    assert re.search(reason, refusal.reason)


def test_messages_of_old_incarnations_and_strangers_are_refused(handshake):
    for message in (EngineProgress(0, 7, "loading", 1.0), ready(1, 7), ready(9, 100)):
        with pytest.raises(ProtocolError):
            handshake.receive(engine_identity(0), message)
    with pytest.raises(ProtocolError):
        handshake.receive(engine_identity(0), EngineInit(ADDRESSES))
    assert not handshake.responses


def test_progress_never_goes_back_or_above_everything(handshake):
    handshake.receive(engine_identity(1), ready(1, 101))
    for percent in (30.0, 20.0):
        handshake.receive(engine_identity(0), EngineProgress(0, 100, "loading", percent))
    assert handshake.progress[:2] == ("loading", 30.0)
    handshake.receive(engine_identity(0), EngineProgress(0, 100, "loading", 1e9))
    assert handshake.progress[1] == 100.0


def test_the_deadline_names_who_is_missing(handshake):
    handshake.receive(engine_identity(0), ready(0, 100))
    handshake.check_deadline(1059.0)
    with pytest.raises(DeadlineExceededError, match=r"after 60 s: engine rank 1 \(phase spawned"):
        handshake.check_deadline(1061.0)


WILD_INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.sampled_from([0, 1, 100, 101])
WILD_NUMBERS = st.floats() | st.integers(-5, 200).map(float)
WILD_MESSAGES = st.one_of(
    st.builds(
        EngineHello, WILD_INTEGERS, WILD_INTEGERS, WILD_INTEGERS, WILD_INTEGERS, st.text(max_size=9)
    ),
    st.builds(EngineProgress, WILD_INTEGERS, WILD_INTEGERS, st.text(max_size=9), WILD_NUMBERS),
    st.builds(
        EngineCoreReadyResponse,
        *[WILD_INTEGERS] * 6, st.text(max_size=3), *[WILD_INTEGERS] * 3, st.text(max_size=3),
    ),
    st.builds(HandshakeRefusal, st.text(max_size=9)),
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(st.tuples(st.binary(max_size=3) | st.just(b"\0\0"), WILD_MESSAGES), max_size=5))
def test_absurd_messages_change_nothing_that_matters(messages):
    """As core_engines drives it: these two errors are refusals."""
    handshake = Handshake({0: 100, 1: 101}, fingerprint(CONFIG), ADDRESSES, 1000.0, 60.0)
    for identity, message in messages:
        with contextlib.suppress(ProtocolError, ValueError):
            handshake.receive(identity, message)
        _, percent, _ = handshake.progress
        assert 0.0 <= percent <= 100.0
        handshake.missing(1001.0)
    handshake.check_deadline(1001.0)
    for response in handshake.responses:
        response.verify()
    for rank, incarnation in ((0, 100), (1, 101)):
        assert handshake.receive(engine_identity(rank), hello(rank, incarnation))
        handshake.receive(engine_identity(rank), ready(rank, incarnation))
    assert handshake.complete


@pytest.mark.parametrize("field", ["num_kv_blocks", "block_size", "max_model_len", "vocab_size"])
def test_an_engine_that_can_compute_nothing_is_not_ready(handshake, field):
    response = ready(0, 100)
    setattr(response, field, 0)
    with pytest.raises(ProtocolError, match="nothing"):
        handshake.receive(engine_identity(0), response)
    assert not handshake.responses


def test_an_engine_speaks_for_itself_only(handshake):
    with pytest.raises(ProtocolError, match="old or unknown"):
        handshake.receive(engine_identity(1), ready(0, 100))
