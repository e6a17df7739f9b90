"""Requests with megabytes of embeddings, and frames that are too large."""

import gc
import os
import queue
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.process.conftest import descendants, is_gone, wait_until
from tests.process.raw_peers import TIMEOUT_S, FrontEnd, RawEngine

from trimaran.client.core_client import EngineCoreClient
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.engine.request_receiver import RequestReceiver, Work
from trimaran.errors import ProtocolError
from trimaran.executor.mock import mock_salt, mock_token
from trimaran.ids import engine_identity
from trimaran.ipc.codec import MAX_BUFFER_BYTES, MAX_FRAME_BYTES, Buffer, Encoder
from trimaran.ipc.sockets import Context, Sent
from trimaran.messages import EngineCoreRequest, RequestType, Tensor
from trimaran.sampling_params import SamplingParams

MOCK = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))
ROWS, COLUMNS, OUTPUT = 2048, 1024, 6  # 8 MiB


def embeddings():
    return np.random.default_rng(1).random((ROWS, COLUMNS), np.float32)


def request_of(rows):
    return EngineCoreRequest(
        "a",
        [0] * len(rows),
        SamplingParams(max_tokens=OUTPUT, seed=0),
        prompt_embeds=Tensor("float32", rows.shape, Buffer(rows)),
    )


def expected_tokens(rows):
    salt = mock_salt(0, 0, rows.tobytes())
    tokens = [0] * len(rows)
    for _ in range(OUTPUT):
        tokens.append(mock_token(tokens[-1], len(tokens), salt))
    return tokens[len(rows) :]


def tokens_from(client):
    tokens, finished = [], False
    while not finished:
        for output in client.get_output(TIMEOUT_S).outputs:
            assert output.error is None
            tokens += output.new_token_ids
            finished = output.finish_reason is not None
    return tokens


@pytest.fixture
def client():
    client = EngineCoreClient.make_client(True, False, MOCK)
    client.wait_ready()
    yield client
    client.shutdown()


@pytest.fixture
def stopped(client):
    """The engine reads nothing until it is called; what a socket's buffer takes has left."""
    (pid,) = descendants()
    os.kill(pid, signal.SIGSTOP)
    yield lambda: os.kill(pid, signal.SIGCONT)
    if not is_gone(pid):
        os.kill(pid, signal.SIGCONT)


def test_a_buffer_lives_until_the_engine_has_it(client, stopped):
    client.add_request(request_of(embeddings()))
    # Nobody here has a reference any more. What is free is written over.
    gc.collect()
    rubbish = [np.full((ROWS, COLUMNS), 7.0, np.float32) for _ in range(20)]
    stopped()
    assert tokens_from(client) == expected_tokens(embeddings())
    assert len(rubbish) == 20


def test_what_is_sent_is_the_callers_own_memory(client, stopped):
    """Forbidden, and so shows that there is no copy: a change is seen by an engine that reads
    later."""
    rows = embeddings()
    client.add_request(request_of(rows))
    rows[-1, -1] += 1.0
    stopped()
    assert expected_tokens(rows) != expected_tokens(embeddings())
    assert tokens_from(client) == expected_tokens(rows)


def test_closing_does_not_wait_for_what_nobody_reads(client, stopped):
    client.add_request(request_of(embeddings()))
    client.shutdown()
    assert descendants() == {}


def test_a_process_that_just_ends_ends(tmp_path):
    """With megabytes under way: our sockets are closed before pyzmq frees what they still send
    (ZMQ aborts the process where it reads memory that is gone)."""
    code = (
        "import os, signal, weakref\n"
        "weakref.finalize(signal, int)\n"  # somebody's, so that all run late at exit
        "from tests.process import test_big_frames as t\n"
        "client = t.EngineCoreClient.make_client(True, False, t.MOCK)\n"
        "client.wait_ready()\n"
        "(pid,) = t.descendants()\n"
        "os.kill(pid, signal.SIGSTOP)\n"
        "for _ in range(3):\n"
        "    client.add_request(t.request_of(t.embeddings()))\n"
        "from zmq.utils.garbage import gc\n"
        "stop = gc.stop\n"
        "gc.stop = lambda: (print('under way:', len(gc.refs), flush=True), stop())\n"
        "print('sent:', len(gc.refs), flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "sent: 3\nunder way: 0\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "zmq" not in done.stderr


def test_our_own_sender_refuses_what_is_above_the_caps(client):
    # Of zeros that nobody touches: no memory is taken.
    rows = np.zeros((1, MAX_BUFFER_BYTES // 4 + 1), np.float32)
    with pytest.raises(ProtocolError, match=f"above the limit of {MAX_BUFFER_BYTES}"):
        client.add_request(request_of(rows))
    client.add_request(request_of(embeddings()[:3]))
    assert tokens_from(client) == expected_tokens(embeddings()[:3])


def test_a_front_end_that_sends_too_much_cuts_itself_off_and_nobody_else(links):
    """The engine is the side that connects: ZMQ gives up a link for good on which it was sent
    too much. So the sender finds its engine unreachable, at once; others do not notice."""
    context = Context()
    engine = Context(max_buffer_bytes=100_000)
    guilty, other = (context.router(each.input_address, each.input_fd) for each in links)
    items = queue.SimpleQueue()
    addresses = [each.input_address for each in links]
    receiver = RequestReceiver(engine, engine_identity(0), addresses, items, lambda _: None)
    receiver.start(b"hello")
    assert items.get(timeout=TIMEOUT_S).work is Work.CONNECTED
    for router in (guilty, other):
        assert router.receive(TIMEOUT_S) == [engine_identity(0), b"hello"]
    assert guilty.try_send([engine_identity(0), b"\x00", bytes(100_001)]) is Sent.OK
    frames = Encoder().encode_frames(
        EngineCoreRequest("b", [1], SamplingParams(max_tokens=1, seed=0))
    )
    message = [engine_identity(0), RequestType.ADD.value, *frames]
    wait_until(lambda: guilty.try_send(message) is Sent.UNREACHABLE, TIMEOUT_S)
    assert items.empty()
    assert other.try_send(message) is Sent.OK
    item = items.get(timeout=TIMEOUT_S)
    assert (item.work, item.payload.client_index) == (Work.ADD, 1)
    receiver.close(TIMEOUT_S)
    assert items.empty()
    for each in (guilty, other, engine, context):
        each.close()


def test_a_payload_that_only_fits_a_buffer_is_refused_by_the_decoder(links):
    context = Context()
    router = context.router(links[0].input_address, links[0].input_fd)
    items = queue.SimpleQueue()
    receiver = RequestReceiver(
        context, engine_identity(0), [links[0].input_address], items, lambda _: None
    )
    receiver.start(b"hello")
    assert items.get(timeout=TIMEOUT_S).work is Work.CONNECTED
    assert router.receive(TIMEOUT_S)
    frames = Encoder().encode_frames(
        EngineCoreRequest("a", [1], SamplingParams(max_tokens=1, seed=0))
    )
    for payload in (bytes(MAX_FRAME_BYTES + 1), *frames):
        router.try_send([engine_identity(0), RequestType.ADD.value, payload])
    assert items.get(timeout=TIMEOUT_S).payload.request_id == "a"
    assert receiver.num_refused_frames == 1
    receiver.close(TIMEOUT_S)
    router.close()
    context.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_engine_that_sends_too_much_loses_that_and_comes_back(links, kind):
    front, engine = FrontEnd(kind, links[0]), RawEngine(links[0])
    engine.greet()
    front.wait_ready()
    for link in (engine.outputs, engine.requests):
        engine.send(link, bytes(MAX_FRAME_BYTES + 1))
    # What was queued behind it may go with the connection; what comes later arrives.
    wait_until(lambda: front.hears(engine.mark()), TIMEOUT_S)
    wait_until(lambda: front.reaches(engine.requests), TIMEOUT_S)
    assert front.num_dropped_messages == 0
    front.close()
    engine.close()
