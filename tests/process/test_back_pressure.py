"""A front end that does not read, and one that talks nonsense: neither costs anybody else."""

import queue

import pytest

from trimaran.engine.output_sender import OutputSender
from trimaran.engine.request_receiver import RequestReceiver, Work
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.ipc.sockets import OUTPUT_HWM, Context, Sent
from trimaran.messages import (
    ENGINE_CORE_DEAD,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeath,
    RequestType,
)
from trimaran.sampling_params import SamplingParams

TIMEOUT_S = 10.0


@pytest.fixture
def context():
    context = Context()
    yield context
    context.close()


def token(index):
    return EngineCoreOutputs(0, 1, [EngineCoreOutput("r", index, [index])])


def test_who_reads_late_gets_merged_deltas_and_holds_up_nobody(context, links):
    slow, fast = (context.pull(each.output_address, each.output_fd) for each in links)
    failures = []
    sender = OutputSender(context, [each.output_address for each in links], failures.append)
    sender.start()
    decoder = Decoder(EngineCoreOutputs)
    # Many more than both queues of a link hold together, while "slow" reads none of them.
    count = 8 * OUTPUT_HWM
    for index in range(count):
        sender.send(0, token(index))
        sender.send(1, token(index))
        (frame,) = fast.receive(TIMEOUT_S)
        assert decoder.decode(frame).outputs[0].first_index == index
    tokens, messages = [], 0
    while len(tokens) < count:
        (frame,) = slow.receive(TIMEOUT_S)
        messages += 1
        (output,) = decoder.decode(frame).outputs
        assert output.first_index == len(tokens)
        tokens += output.new_token_ids
    assert tokens == list(range(count))
    assert messages < count // 2
    sender.announce_death(EngineDeath(0, 1, "ValueError: boom"))
    for pull in (slow, fast):
        first, payload = pull.receive(TIMEOUT_S)
        assert first == ENGINE_CORE_DEAD
        assert Decoder(EngineDeath).decode(payload).cause == "ValueError: boom"
    sender.close(TIMEOUT_S)
    assert failures == []
    slow.close()
    fast.close()


def test_nonsense_is_counted_and_what_is_in_order_arrives(context, links):
    (router, other) = (context.router(each.input_address, each.input_fd) for each in links)
    items, refused = queue.SimpleQueue(), []
    receiver = RequestReceiver(
        context, engine_identity(0), [each.input_address for each in links], items, refused.append
    )
    receiver.start(b"greeting")
    assert items.get(timeout=TIMEOUT_S).work is Work.CONNECTED
    for link in (router, other):
        assert link.receive(TIMEOUT_S) == [engine_identity(0), b"greeting"]
    encoder = Encoder()
    request = EngineCoreRequest("a", [1], SamplingParams(max_tokens=1), client_index=7)
    nonsense = [
        [b"\x00", b"\xff\xff"],
        [b"\x09", b""],
        [b"\x00"],
        [b"\x01", b"\x90", b"more"],
        [b"\x02", encoder.encode(AbortRequests(["a"]))],
    ]
    for frames in nonsense:
        assert other.try_send([engine_identity(0), *frames]) is Sent.OK
    frames = [RequestType.ADD.value, encoder.encode(request)]
    assert other.try_send([engine_identity(0), *frames]) is Sent.OK
    work, received, _ = items.get(timeout=TIMEOUT_S)
    # The link tells who asks, whatever the message says.
    assert (work, received.request_id, received.client_index) == (Work.ADD, "a", 1)
    assert receiver.num_refused_frames == len(nonsense)
    receiver.close(TIMEOUT_S)
    assert items.empty()
    router.close()
    other.close()
