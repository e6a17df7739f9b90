"""Utility calls at the engine's door: what is no operation of ours is refused and counted."""

import os
import queue
import tempfile

import msgspec
import pytest

from trimaran.engine.request_receiver import RequestReceiver, Work
from trimaran.ipc.listeners import Listener
from trimaran.ipc.sockets import Context
from trimaran.messages import Ping, Profile, RequestType, Sleep, UtilityCall, WakeUp

TIMEOUT_S = 5.0
IDENTITY = b"\0\0"
UTILITY = RequestType.UTILITY.value
encode = msgspec.msgpack.encode


@pytest.fixture
def link():
    """(front end's socket, receiver, its work items); the engine has greeted."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        context = Context()
        listener = Listener.bind_ipc(os.path.join(folder, "s"))
        router = context.router(listener.address, listener.fileno())
        items = queue.SimpleQueue()
        receiver = RequestReceiver(context, IDENTITY, [listener.address], items, lambda _: None)
        receiver.start(b"greeting")
        assert router.receive(TIMEOUT_S) == [IDENTITY, b"greeting"]
        assert items.get(timeout=TIMEOUT_S).work is Work.CONNECTED
        yield router, receiver, items
        receiver.close(TIMEOUT_S)
        router.close()
        listener.close()
        context.close()


@pytest.mark.parametrize(
    "frames",
    [
        [UTILITY, encode([0, 0, [99]])],  # no such operation
        [UTILITY, encode([0, 0, ["ping"]])],
        [UTILITY, encode([0, 0, [3, 7, "wait"]])],  # Sleep, no such level
        [UTILITY, encode([0, 0, [3, True, "wait"]])],
        [UTILITY, encode([0, 0, [3, 1, "keep"]])],  # no such mode
        [UTILITY, encode([0, 0, [5, "pause"]])],  # Profile, no such action
        [UTILITY, encode([0, 0, [5]])],
        [UTILITY, encode(["0", 0, [2]])],
        [UTILITY, encode([0, 0])],
        [UTILITY, encode({"call_id": 0})],
        [UTILITY, b""],
        [b"\x09", encode([0, 0, [2]])],
        [UTILITY],
    ],
)
def test_what_is_no_operation_is_refused_and_counted(link, frames):
    router, receiver, items = link
    router.try_send([IDENTITY, *frames])
    router.try_send([IDENTITY, UTILITY, encode(UtilityCall(7, 0, Ping()))])
    item = items.get(timeout=TIMEOUT_S)
    assert (item.work, item.payload.call_id) == (Work.UTILITY, 7)
    assert receiver.num_refused_frames == 1
    assert items.empty()


@pytest.mark.parametrize(
    "operation", [Sleep(2, "wait"), Sleep(), WakeUp(), Profile("start"), Profile("stop")]
)
def test_operations_arrive_as_they_were_sent(link, operation):
    router, _, items = link
    router.try_send([IDENTITY, UTILITY, encode(UtilityCall(1, 0, operation))])
    assert items.get(timeout=TIMEOUT_S).payload.operation == operation
