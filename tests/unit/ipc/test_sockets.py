"""Sockets over inherited listeners: restarts, hand-over, full links, caps, both ways to wait."""

import asyncio
import os

import pytest

from trimaran.ipc.listeners import Listener
from trimaran.ipc.sockets import OUTPUT_HWM, AsyncReceiver, Context, Poller, Sent

TIMEOUT_S = 5.0


@pytest.fixture
def context():
    context = Context()
    yield context
    context.close()


@pytest.fixture(params=["ipc", "tcp", "tcp6"])
def listener(request):
    if request.param == "ipc":
        listener = Listener.bind_ipc()
    else:
        listener = Listener.bind_tcp("127.0.0.1" if request.param == "tcp" else "::1", 0)
    yield listener
    listener.close()


def test_a_restarted_server_keeps_its_address_and_its_peers_come_back(listener):
    peers = Context()
    dealer = peers.dealer(listener.address, b"\0\0")
    for life in (b"one", b"two"):
        context = Context()
        router = context.router(listener.address, listener.fileno())
        dealer.try_send([life])
        assert router.receive(TIMEOUT_S) == [b"\0\0", life]
        assert router.try_send([b"\0\0", b"answer"]) is Sent.OK
        assert dealer.receive(TIMEOUT_S) == [b"answer"]
        router.close()
        context.close()
    dealer.close()
    peers.close()


def test_a_restarted_peer_takes_over_its_identity(listener, context):
    router = context.router(listener.address, listener.fileno())
    lives = []
    for life in (b"one", b"two"):
        peer = Context()
        dealer = peer.dealer(listener.address, b"\1\0")
        dealer.try_send([life])
        assert router.receive(TIMEOUT_S) == [b"\1\0", life]
        assert router.try_send([b"\1\0", b"to " + life]) is Sent.OK
        assert dealer.receive(TIMEOUT_S) == [b"to " + life]
        lives.append((peer, dealer))  # the first is not closed before the second connects
    for peer, dealer in lives:
        dealer.close()
        peer.close()
    router.close()


def test_nobody_there_and_nobody_reading_are_told_apart(listener, context):
    router = context.router(listener.address, listener.fileno())
    assert router.try_send([b"\7\0", b"hello"]) is Sent.UNREACHABLE
    router.close()
    push = context.push(listener.address)  # connected, but its peer takes nothing
    results = [push.try_send([b"x"]) for _ in range(OUTPUT_HWM + 1)]
    assert results[0] is Sent.OK
    assert results[-1] is Sent.FULL
    push.close()


def test_a_frame_above_the_cap_cuts_its_link_and_is_not_delivered(listener, context):
    strict = Context(max_frame_bytes=1000)
    pull = strict.pull(listener.address, listener.fileno())
    push = context.push(listener.address)
    push.try_send([bytes(1000)])
    assert pull.receive(TIMEOUT_S) == [bytes(1000)]
    push.try_send([bytes(1001)])  # on an open link, so long before one that is only made
    honest = context.push(listener.address)
    honest.try_send([b"small"])
    assert pull.receive(TIMEOUT_S) == [b"small"]
    for socket in (push, honest, pull):
        socket.close()
    strict.close()


def test_receive_has_a_deadline(listener, context):
    pull = context.pull(listener.address, listener.fileno())
    assert pull.receive(0.01) is None
    assert pull.try_receive() is None
    pull.close()


def test_a_poller_tells_sockets_and_descriptors_apart(context):
    left, right = context.pair()
    readable, writable = os.pipe()

    class Pipe:
        def fileno(self):
            return readable

    pipe, poller = Pipe(), Poller()
    poller.register(right)
    poller.register(pipe)
    assert poller.poll(0) == []
    left.try_send([b"x"])
    assert poller.poll(TIMEOUT_S) == [right]
    os.write(writable, b"x")
    assert right.try_receive() == [b"x"]
    assert poller.poll(TIMEOUT_S) == [pipe]
    poller.unregister(pipe)
    assert poller.poll(0) == []
    for socket in (left, right):
        socket.close()
    os.close(readable)
    os.close(writable)


def test_an_async_receiver_misses_nothing_whatever_the_edges_do(listener, context):
    """More messages than one call takes, arriving before, during and after the start."""
    router = context.router(listener.address, listener.fileno())
    dealer = context.dealer(listener.address, b"\0\0")
    count = 500

    async def run():
        got = []
        done = asyncio.Event()

        def on_message(frames):
            got.append(int(frames[1]))
            # A send on the receiving socket may swallow the edge of what arrives meanwhile.
            router.try_send([frames[0], b"ack"])
            receiver.poke()
            if len(got) == count:
                done.set()

        for i in range(count // 2):
            dealer.try_send([b"%d" % i])
        receiver = AsyncReceiver(router, on_message)
        receiver.start()
        for i in range(count // 2, count):
            dealer.try_send([b"%d" % i])
            if i % 50 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(done.wait(), TIMEOUT_S)
        receiver.stop()
        return got

    assert asyncio.run(run()) == list(range(count))
    router.close()
    dealer.close()


def test_a_send_that_swallows_the_edge_is_made_good_by_a_poke(context):
    listener = Listener.bind_ipc()
    router = context.router(listener.address, listener.fileno())
    dealer = context.dealer(listener.address, b"\0\0")

    async def run():
        got: asyncio.Queue[bytes] = asyncio.Queue()
        receiver = AsyncReceiver(router, lambda frames: got.put_nowait(frames[1]))
        receiver.start()
        dealer.try_send([b"hello"])
        assert await asyncio.wait_for(got.get(), TIMEOUT_S) == b"hello"
        for _ in range(20):
            dealer.try_send([b"again"])
            # Without a turn of the loop: it has arrived, and a look at the socket takes note.
            while not router.has_message:
                pass
            receiver.poke()
            assert await asyncio.wait_for(got.get(), TIMEOUT_S) == b"again"
        receiver.stop()

    asyncio.run(run())
    for socket in (router, dealer, listener):
        socket.close()
