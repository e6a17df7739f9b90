"""The engine's output thread: results of steps to the front ends they belong to.

Owns: the output links, encoding, and what happens to a front end that does not read: its messages
are merged here, and nobody else waits for it. Started by ``engine_core_proc``.
"""

import queue
import threading
from collections.abc import Callable, Sequence

from trimaran.engine.outputs import append_or_merge
from trimaran.ipc.codec import Encoder
from trimaran.ipc.sockets import Context, Sent, Socket
from trimaran.messages import ENGINE_CORE_DEAD, EngineCoreOutputs, EngineDeath

# While a front end lags, how often its link is tried again.
_RETRY_S = 0.005
# How long the word of this engine's death may take to leave. Nobody is left to read anything else:
# who ends an engine in order has closed its front ends.
_LINGER_S = 1.0


class OutputSender:
    """One PUSH per front end, all in one thread."""

    def __init__(
        self,
        context: Context,
        addresses: Sequence[str],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[tuple[int, EngineCoreOutputs] | EngineDeath | None] = (
            queue.SimpleQueue()
        )
        self._encoder = Encoder()
        self._links: list[Socket] = []
        self._backlogs: dict[int, list[EngineCoreOutputs]] = {}
        self._thread = threading.Thread(
            target=self._main, name="process_output_sockets", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Hand over; never waits."""
        self._queue.put((client_index, outputs))

    def announce_death(self, death: EngineDeath) -> None:
        """The last message that this engine sends to anybody."""
        self._queue.put(death)

    def close(self, timeout_s: float) -> bool:
        """Send what is queued, then end; whether the thread has ended, and with it its sockets."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._process_output_sockets()
        except BaseException as error:  # noqa: BLE001  the main of a thread: the engine ends by it
            self._on_failure(error)

    def _process_output_sockets(self) -> None:
        linger_s = 0.0
        try:
            for address in self._addresses:
                self._links.append(self._context.push(address))
            while True:
                try:
                    item = self._queue.get(timeout=_RETRY_S if self._backlogs else None)
                except queue.Empty:
                    self._retry_backlogs()
                    continue
                if item is None:
                    return
                if isinstance(item, EngineDeath):
                    linger_s = _LINGER_S
                    for link in self._links:
                        link.try_send([ENGINE_CORE_DEAD, self._encoder.encode(item)])
                    continue
                self._send(*item)
        finally:
            for link in self._links:
                link.close(linger_s)

    def _send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        backlog = self._backlogs.get(client_index)
        if backlog is not None:
            append_or_merge(backlog, outputs)
            self._retry_backlogs()
        elif not self._try_send(client_index, outputs):
            self._backlogs[client_index] = [outputs]

    def _retry_backlogs(self) -> None:
        for client_index, backlog in list(self._backlogs.items()):
            while backlog and self._try_send(client_index, backlog[0]):
                del backlog[0]
            if not backlog:
                del self._backlogs[client_index]

    def _try_send(self, client_index: int, outputs: EngineCoreOutputs) -> bool:
        return self._links[client_index].try_send([self._encoder.encode(outputs)]) is Sent.OK
