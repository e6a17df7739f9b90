"""ZMQ sockets with our rules built in, and the ways to wait on them.

Owns: socket options (identities, hand-over, high-water marks, frame caps, heartbeats), what a full
or unreachable peer looks like, and the waiting: ``Poller`` for threads, ``AsyncReceiver`` for
asyncio. Knows nothing of what the bytes mean. A socket belongs to the thread that uses it.

    front end   ROUTER (requests)  <--- DEALER   engine
                PULL   (outputs)   <--- PUSH
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Protocol

import zmq

# Keeps what is sent without a copy alive. Imported here and not with the first such frame: what is
# registered to run at exit from now on runs before it lets go, so that contexts are closed by then.
import zmq.utils.garbage

from trimaran.ipc.codec import MAX_BUFFER_BYTES, MAX_FRAME_BYTES, Frame

# Messages, per peer and direction. Requests are bounded by admission at the front end long before;
# outputs beyond the mark are merged by the engine, so a small one costs a slow reader nothing.
REQUEST_HWM = 1 << 15
OUTPUT_HWM = 256
HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 2000
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 1000
# What a process needs for all that it opens around a context: a client with one engine starts with
# 24 descriptors left, and this is twice that.
_DESCRIPTORS = 48
# How long a socket's end waits for another thread's event loop to let go of it.
_LOOP_TIMEOUT_S = 1.0
# Messages taken in one call of the event loop before others get their turn.
_ASYNC_BATCH = 64


class Sent(Enum):
    """What became of a message that was given to a socket without waiting."""

    OK = 0
    FULL = 1  # the peer does not read as fast as we write
    UNREACHABLE = 2  # no peer of that identity is connected


class Context:
    """Owns the I/O thread. Close its sockets first: ``close`` waits for them.

    Raises OSError: this process may not open as many files as a context needs.
    """

    def __init__(
        self, max_frame_bytes: int = MAX_FRAME_BYTES, max_buffer_bytes: int = MAX_BUFFER_BYTES
    ) -> None:
        _require_descriptors(_DESCRIPTORS)
        self._context = zmq.Context()
        self._max_frame_bytes = max_frame_bytes
        self._max_buffer_bytes = max_buffer_bytes

    def router(self, address: str, listening_fd: int) -> "Socket":
        """Talks to many peers by identity; refuses to send to one that is not connected.

        The descriptor is bound to ``address`` already, and stays the caller's.
        """
        socket = self._open(zmq.ROUTER, REQUEST_HWM)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Without it a restarted peer with the same identity is silently ignored.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return _bind(socket, address, listening_fd)

    def pull(self, address: str, listening_fd: int) -> "Socket":
        return _bind(self._open(zmq.PULL, OUTPUT_HWM), address, listening_fd)

    def dealer(self, address: str, identity: bytes, *, takes_buffers: bool = False) -> "Socket":
        """``takes_buffers``: messages may bring frames of up to max_buffer_bytes."""
        socket = self._open(zmq.DEALER, REQUEST_HWM)
        if takes_buffers:
            socket.setsockopt(zmq.MAXMSGSIZE, self._max_buffer_bytes)
        socket.setsockopt(zmq.IDENTITY, identity)
        return _connect(socket, address)

    def push(self, address: str) -> "Socket":
        return _connect(self._open(zmq.PUSH, OUTPUT_HWM), address)

    def pair(self) -> tuple["Socket", "Socket"]:
        """Two connected ends within this process: by which one thread wakes another."""
        left = self._open(zmq.PAIR, 16)
        with _closed_on_failure(left):
            right = self._open(zmq.PAIR, 16)
            with _closed_on_failure(right):
                left.bind(f"inproc://{id(left)}")
                right.connect(f"inproc://{id(left)}")
        return Socket(left), Socket(right)

    def close(self) -> None:
        self._context.term()

    def _open(self, kind: int, high_water_mark: int) -> "zmq.Socket[bytes]":
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        return socket


def _require_descriptors(count: int) -> None:
    """libzmq aborts the process where a descriptor is missing; this raises OSError instead."""
    descriptors: list[int] = []
    try:
        descriptors += (os.eventfd(0, os.EFD_CLOEXEC) for _ in range(count))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def _closed_on_failure(socket: "zmq.Socket[bytes]") -> Iterator[None]:
    """A socket that is left open is one that its context waits for, for ever."""
    try:
        yield
    except BaseException:
        socket.close(0)
        raise


def _bind(socket: "zmq.Socket[bytes]", address: str, listening_fd: int) -> "Socket":
    with _closed_on_failure(socket):
        _set_heartbeats(socket, address)
        # ZMQ closes what it is given; the listener itself stays with its owner.
        socket.setsockopt(zmq.USE_FD, os.dup(listening_fd))
        socket.bind(address)
    return Socket(socket)


def _connect(socket: "zmq.Socket[bytes]", address: str) -> "Socket":
    with _closed_on_failure(socket):
        _set_heartbeats(socket, address)
        socket.connect(address)
    return Socket(socket)


def _set_heartbeats(socket: "zmq.Socket[bytes]", address: str) -> None:
    # A local peer's death closes its socket at once; only a remote one can fall silent.
    if address.startswith("tcp://"):
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


class Socket:
    """Frames in, frames out; never blocks unless asked to, and then with a deadline."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def try_send(self, frames: Sequence[Frame]) -> Sent:
        """``bytes`` are copied. Big views are not: ZMQ reads the memory itself, and keeps it alive
        until it is sent (by a thread of pyzmq's, started with the first one, one per process)."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=type(frames[-1]) is bytes)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.UNREACHABLE
        return Sent.OK

    def try_receive(self) -> list[bytes] | None:
        """The next message, or None."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def try_receive_buffers(self, num_frames: int) -> tuple[list[bytes], list[memoryview]] | None:
        """The next message: ``num_frames`` frames (or fewer), and views of those behind them.

        The views are of ZMQ's own memory, which lives as long as they do.
        """
        try:
            frames = [self._socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        buffers = []
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(frames) < num_frames:
                frames.append(self._socket.recv())
            else:
                buffers.append(self._socket.recv(copy=False).buffer.toreadonly())
        return frames, buffers

    def receive(self, timeout_s: float) -> list[bytes] | None:
        """The next message, or None after ``timeout_s`` seconds."""
        if not self._socket.poll(max(0, round(timeout_s * 1000))):
            return None
        return self.try_receive()

    @property
    def has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def fileno(self) -> int:
        """Edge-triggered: readable means that events changed, not that a message waits."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self, linger_s: float = 0.0) -> None:
        """Messages not yet sent get ``linger_s`` seconds, spent where the context closes."""
        self._socket.close(round(linger_s * 1000))


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poller:
    """Waits on sockets and on anything with a descriptor at once."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._sources: dict[object, Socket | HasFileno] = {}

    def register(self, source: Socket | HasFileno) -> None:
        self._poller.register(_pollable(source), zmq.POLLIN)
        self._sources[_pollable(source)] = source

    def unregister(self, source: Socket | HasFileno) -> None:
        self._poller.unregister(_pollable(source))
        del self._sources[_pollable(source)]

    def poll(self, timeout_s: float | None) -> list[Socket | HasFileno]:
        """What became readable within ``timeout_s`` seconds (None: wait for ever)."""
        timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1000))
        return [self._sources[source] for source, _ in self._poller.poll(timeout_ms)]


def _pollable(source: Socket | HasFileno) -> "zmq.Socket[bytes] | int":
    return source._socket if isinstance(source, Socket) else source.fileno()


class AsyncReceiver:
    """Calls ``on_message`` in the event loop for every message of a socket.

    A ZMQ descriptor is edge-triggered, so each wake takes messages until there are none, and a
    send on the same socket, which may swallow the edge, is followed by ``poke``.
    """

    def __init__(self, socket: Socket, on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._descriptor = socket.fileno()
        # None: not started, or stopped. Set under the lock, as the socket is used: after ``stop``
        # whoever stopped may close it, in any thread.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def poke(self) -> None:
        with self._lock:
            if self._loop is not None and self._socket.has_message:
                self._loop.call_soon(self._drain)

    def stop(self) -> None:
        """Take no more. From any thread: a finalizer runs where the garbage is collected."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        if runs_here(loop) or not loop.is_running():
            loop.remove_reader(self._descriptor)
            return
        removed = threading.Event()
        with contextlib.suppress(RuntimeError):  # closed just now
            loop.call_soon_threadsafe(self._remove, loop, removed)
            removed.wait(_LOOP_TIMEOUT_S)

    def _remove(self, loop: asyncio.AbstractEventLoop, removed: threading.Event) -> None:
        loop.remove_reader(self._descriptor)
        removed.set()

    def _drain(self) -> None:
        for _ in range(_ASYNC_BATCH):
            with self._lock:
                if self._loop is None:
                    return
                frames = self._socket.try_receive()
            if frames is None:
                return
            self._on_message(frames)
        if self._loop is not None:
            self._loop.call_soon(self._drain)


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether we are inside a callback or task of this loop."""
    return asyncio._get_running_loop() is loop
