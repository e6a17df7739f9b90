"""Peers that send what decodes but cannot be true, and what does not decode at all, through real
sockets: refused and counted, and whoever is in order is served as before."""

import queue

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.process.conftest import wait_until
from tests.process.raw_peers import (
    INCARNATION,
    TIMEOUT_S,
    FrontEnd,
    RawEngine,
    ready_response,
)
from tests.unit.ipc.frames import damaged_frames

from trimaran.clock import SYSTEM_CLOCK
from trimaran.config import EngineConfig
from trimaran.engine.launcher_link import LauncherLink
from trimaran.engine.request_receiver import RequestReceiver, Work
from trimaran.engine.spec import EngineSpec
from trimaran.errors import DeadlineExceededError, ProtocolError, RequestFailedError
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Encoder
from trimaran.ipc.sockets import Context, Sent
from trimaran.messages import (
    ENGINE_CORE_DEAD,
    AbortRequests,
    EngineAddresses,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeath,
    EngineInit,
    EngineProgress,
    Ping,
    RequestType,
    SchedulerStats,
    UtilityOutput,
)
from trimaran.sampling_params import SamplingParams

NAN = float("nan")
FEW = settings(max_examples=30, suppress_health_check=list(HealthCheck))
FRAMES = st.lists(damaged_frames(), min_size=1, max_size=3)


@pytest.fixture(params=["sync", "async"])
def front(request, links):
    front = FrontEnd(request.param, links[0])
    yield front
    front.close()


@pytest.fixture
def engine(front, links):
    engine = RawEngine(links[0])
    engine.greet()
    front.wait_ready()
    yield engine
    engine.close()


# ------------------------------------------------------------------------------- the client's links


def test_a_client_outlives_any_frames(front, engine):
    @FEW
    @given(FRAMES)
    def send(frames):
        # What claims to be a death in order is one, and no nonsense.
        if frames[0] != ENGINE_CORE_DEAD:
            engine.send(engine.outputs, *frames)
            front.outputs_until(engine.mark())

    send()
    assert front.num_dropped_messages > 10


ABSURD = {
    "unknown rank": EngineCoreOutputs(9, INCARNATION),
    "negative rank": EngineCoreOutputs(-1, INCARNATION),
    "old incarnation": EngineCoreOutputs(0, 1, [EngineCoreOutput("a", 0, [1])]),
    "answer to nobody": EngineCoreOutputs(0, INCARNATION, utility=UtilityOutput(1 << 63)),
}
DEATHS = {
    "of an old life": EngineDeath(0, 1, "old"),
    "of a stranger": EngineDeath(7, INCARNATION, "who?"),
}


@pytest.mark.parametrize("what", ABSURD)
def test_outputs_of_whom_one_does_not_expect_are_dropped_and_counted(front, engine, what):
    engine.say(engine.outputs, ABSURD[what])
    assert front.outputs_until(engine.mark()) == []
    assert front.num_dropped_messages == 1


@pytest.mark.parametrize("what", DEATHS)
def test_deaths_that_concern_nobody_are_dropped_and_counted(front, engine, what):
    engine.send(engine.outputs, ENGINE_CORE_DEAD, msgspec.msgpack.encode(DEATHS[what]))
    engine.send(engine.outputs, ENGINE_CORE_DEAD)
    engine.send(engine.outputs, ENGINE_CORE_DEAD, b"\x93", b"")
    assert front.outputs_until(engine.mark()) == []
    assert front.num_dropped_messages == 3


def test_numbers_without_sense_reach_a_callers_hands_and_hurt_nobody(front, engine):
    stats = SchedulerStats(step=-1, num_running=-5, kv_cache_usage=NAN)
    engine.put_out(EngineCoreOutput("x", -3, [-1], queued_at=NAN), stats=stats, timestamp=NAN)
    assert len(front.outputs_until(engine.mark())) == 1
    assert front.num_dropped_messages == 0


def test_a_reader_that_lags_gets_gaps_and_resends_as_they_came(front, engine):
    """The queue of a client merges what is not taken; what does not fit together stays apart."""
    indices = [*range(100), 50, 51, 300, 299, 100, -7]
    for index in indices:
        engine.put_out(EngineCoreOutput("a", index, [index % 50]))
    tokens = []
    for output in front.outputs_until(engine.mark()):
        if output.request_id == "a":
            first = output.first_index
            tokens += [(first + i, token) for i, token in enumerate(output.new_token_ids)]
    assert tokens == [(index, index % 50) for index in indices]


@pytest.mark.parametrize(
    "greeting",
    [
        ready_response(incarnation=5),
        ready_response(rank=3),
        ready_response(max_model_len=0),
        ready_response(num_kv_blocks=-1),
    ],
    ids=["another life", "another rank", "no room", "less than nothing"],
)
def test_a_greeting_of_another_engine_changes_nothing(front, engine, greeting):
    engine.say(engine.requests, greeting)

    def is_dropped():
        front.outputs_until(engine.mark())
        return front.num_dropped_messages == 1

    if front.kind == "async":  # the other one reads no greetings later on
        wait_until(is_dropped)
    front.outputs_until(engine.mark())
    assert front.ready == [ready_response()]


def test_answers_to_calls_must_come_from_the_engine_that_was_asked(front, engine, links):
    """A wrong answer is an error of that call; the right one comes by its own id."""
    engine.put_out(utility=UtilityOutput(0, b"\xc3"))  # before anybody asked
    front.outputs_until(engine.mark())
    engine.put_out(utility=UtilityOutput(0, b"\xc1"))
    with pytest.raises((ProtocolError, RequestFailedError, DeadlineExceededError)):
        front.control(Ping(), 0.2)
    front.outputs_until(engine.mark())
    assert front.num_dropped_messages >= 1


# ------------------------------------------------------------------------------- the engine's links


@pytest.fixture
def receiver(links):
    """(send to it, what it made of it, itself)."""
    context, items, refused = Context(), queue.SimpleQueue(), []
    router = context.router(links[0].input_address, links[0].input_fd)
    receiver = RequestReceiver(
        context, engine_identity(0), [links[0].input_address], items, refused.append
    )
    receiver.start(b"greeting")
    assert items.get(timeout=TIMEOUT_S).work is Work.CONNECTED
    assert router.receive(TIMEOUT_S)

    def send(*frames):
        assert router.try_send([engine_identity(0), *frames]) is Sent.OK

    yield send, items, receiver
    receiver.close(TIMEOUT_S)
    router.close()
    context.close()


def test_an_engine_outlives_any_frames(receiver):
    send, items, receiver = receiver
    encoder = Encoder()

    @settings(parent=FEW, max_examples=100)
    @given(st.sampled_from([*RequestType]), FRAMES, st.booleans())
    def attack(kind, frames, is_typed):
        send(*([kind.value] if is_typed else []), *frames)
        send(RequestType.ABORT.value, encoder.encode(AbortRequests(["mark"])))
        while True:
            work, payload, _ = items.get(timeout=TIMEOUT_S)
            assert work is not Work.FAILED, payload
            if work is Work.ABORT and payload.request_ids == ["mark"]:
                return

    attack()
    assert receiver.num_refused_frames > 20


def test_buffers_that_belong_to_nothing_are_refused(receiver):
    send, items, receiver = receiver
    encoder = Encoder()
    request = encoder.encode(EngineCoreRequest("a", [1], SamplingParams(max_tokens=1, seed=0)))
    send(RequestType.ADD.value, request, bytes(100_000))
    send(RequestType.ABORT.value, encoder.encode(AbortRequests(["a"])), bytes(100_000))
    send(RequestType.ADD.value, request)
    assert items.get(timeout=TIMEOUT_S).work is Work.ADD
    assert items.empty()
    assert receiver.num_refused_frames == 2


# ------------------------------------------------------------------------------ the engine's hello


@pytest.fixture
def launcher(links):
    """(a launcher's socket, the engine's link to it)."""
    context = Context()
    router = context.router(links[1].input_address, links[1].input_fd)
    spec = EngineSpec(
        config=EngineConfig(),
        rank=0,
        incarnation=1,
        handshake_address=links[1].input_address,
        spawned_at=0.0,
    )
    link = LauncherLink(context, spec, 1, SYSTEM_CLOCK)
    yield router, link
    for each in (link, router, context):
        each.close()


def test_an_engine_that_starts_waits_for_an_answer_that_is_one(launcher):
    router, link = launcher
    with pytest.raises(DeadlineExceededError, match="no answer"):
        link.introduce(0.01)
    assert router.receive(TIMEOUT_S)
    encoder = Encoder()
    nonsense = [b"", b"\xc1", b"\x91" * 5000, encoder.encode(EngineProgress(0, 1, "x", NAN))]
    for frame in nonsense:
        router.try_send([engine_identity(0), frame])
    router.try_send([engine_identity(0), b"two", b"frames"])
    addresses = EngineAddresses(inputs=["ipc:///a"], outputs=["ipc:///b"])
    router.try_send([engine_identity(0), encoder.encode(EngineInit(addresses))])
    assert link.introduce(TIMEOUT_S) == addresses
