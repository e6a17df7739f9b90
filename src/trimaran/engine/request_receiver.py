"""The engine's input thread: frames of all front ends to work items of the main thread.

Owns: the request links, decoding, and the refusal of what is malformed or too much. Knows nothing
of what the items do. Started by ``engine_core_proc``; ends when told so, or when it raises.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from trimaran.errors import ProtocolError
from trimaran.ipc.codec import Decoder
from trimaran.ipc.progress_board import EngineCells
from trimaran.ipc.sockets import Context, Poller, Socket
from trimaran.messages import AbortRequests, EngineCoreRequest, RequestType, UtilityCall

logger = logging.getLogger(__name__)

# Requests that wait for the main thread (it takes all of them before each step). Admission at the
# front end is far below it; beyond it they are refused, so that no front end can fill the memory.
MAX_WAITING_ITEMS = 1 << 15
# How often the thread shows that it looks at its links, though nothing comes.
_TURN_S = 1.0


class Work(Enum):
    ADD = 0  # EngineCoreRequest
    ABORT = 1  # AbortRequests
    UTILITY = 2  # UtilityCall
    STOP = 3  # None: end in order
    FAILED = 4  # the exception that ended one of the threads
    CONNECTED = 5  # None: the request links are open; comes before what they bring


class WorkItem(NamedTuple):
    work: Work
    payload: EngineCoreRequest | AbortRequests | UtilityCall | BaseException | None = None
    number: int = 0  # of those that came by a link, from 1


class RequestReceiver:
    """One DEALER per front end, all in one thread."""

    def __init__(
        self,
        context: Context,
        identity: bytes,
        addresses: Sequence[str],
        items: "queue.SimpleQueue[WorkItem]",
        refuse: Callable[[EngineCoreRequest], None],
        cells: EngineCells | None = None,
    ) -> None:
        self._context = context
        self._identity = identity
        self._addresses = addresses
        self._items = items
        self._refuse = refuse
        self._cells = cells or EngineCells(num_clients=len(addresses))
        self._num_queued = 0
        self._stop, self._stopped = context.pair()
        self._decode_add: Decoder[EngineCoreRequest] = Decoder(EngineCoreRequest)
        self._decode_abort: Decoder[AbortRequests] = Decoder(AbortRequests)
        self._decode_utility: Decoder[UtilityCall] = Decoder(UtilityCall)
        self.num_refused_frames = 0
        self._thread: threading.Thread | None = None

    def start(self, greeting: bytes) -> None:
        """Connect; ``greeting`` is the first message on every link (no front end speaks before)."""
        self._thread = threading.Thread(
            target=self._main, args=(greeting,), name="process_input_sockets", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Whether the thread has ended, and with it its sockets."""
        self._stop.try_send([b""])
        if self._thread is None:
            self._stopped.close()
        else:
            self._thread.join(timeout_s)
        self._stop.close()
        return self._thread is None or not self._thread.is_alive()

    def _main(self, greeting: bytes) -> None:
        try:
            self._process_input_sockets(greeting)
        except BaseException as error:  # noqa: BLE001  the main of a thread: the engine ends by it
            self._items.put(WorkItem(Work.FAILED, error))

    def _process_input_sockets(self, greeting: bytes) -> None:
        links: dict[Socket, int] = {}
        poller = Poller()
        poller.register(self._stopped)
        try:
            for client_index, address in enumerate(self._addresses):
                link = self._context.dealer(address, self._identity, takes_buffers=True)
                links[link] = client_index
                link.try_send([greeting])
                poller.register(link)
            self._items.put(WorkItem(Work.CONNECTED))
            while True:
                self._cells.turned()
                for source in poller.poll(_TURN_S):
                    if source is self._stopped:
                        return
                    assert isinstance(source, Socket)
                    self._receive(source, links[source])
        finally:
            for socket in (*links, self._stopped):
                socket.close()

    def _receive(self, link: Socket, client_index: int) -> None:
        while (message := link.try_receive_buffers(2)) is not None:
            try:
                self._take(self._item(*message, client_index))
            except ProtocolError as error:
                self.num_refused_frames += 1
                logger.warning(
                    "refused message %d of front end %d: %s",
                    self.num_refused_frames, client_index, error,
                )  # fmt: skip
            self._cells.received(client_index)

    def _take(self, item: WorkItem) -> None:
        if item.work is Work.ADD and self._items.qsize() >= MAX_WAITING_ITEMS:
            assert isinstance(item.payload, EngineCoreRequest)
            self._refuse(item.payload)
            return
        self._num_queued += 1
        self._cells.queued(self._num_queued)
        self._items.put(item._replace(number=self._num_queued))

    def _item(self, frames: list[bytes], buffers: list[memoryview], client_index: int) -> WorkItem:
        if len(frames) != 2:
            raise ProtocolError("a request message has at least 2 frames")
        kind, payload = frames
        if buffers and kind != RequestType.ADD.value:
            raise ProtocolError(f"only requests bring buffers, got {len(buffers)}")
        # The link is the truth about who asks; answers go back by it and nowhere else.
        match kind:
            case RequestType.ADD.value:
                request = self._decode_add.decode(payload, buffers)
                request.client_index = client_index
                return WorkItem(Work.ADD, request)
            case RequestType.ABORT.value:
                return WorkItem(Work.ABORT, self._decode_abort.decode(payload))
            case RequestType.UTILITY.value:
                call = self._decode_utility.decode(payload)
                call.client_index = client_index
                return WorkItem(Work.UTILITY, call)
            case _:
                raise ProtocolError(f"unknown message type {kind[:16]!r}")
