"""Engines in processes, for callers that wait (S20, S23).

Owns: the thread that drains the output link, and the waiting. Chosen by
``EngineCoreClient.make_client``; used by LLM.
"""

import threading
from collections.abc import Callable, Sequence

from trimaran.client.core_client import DEFAULT_CONTROL_TIMEOUT_S
from trimaran.client.mp import CAUSE_TIMEOUT_S, MPClient, weakly
from trimaran.client.utility_calls import no_answer
from trimaran.clock import SYSTEM_CLOCK
from trimaran.errors import DeadlineExceededError, EngineDeadError
from trimaran.ipc.sockets import Context, Poller, Socket
from trimaran.messages import (
    ControlOperation,
    EngineCoreOutputs,
    EngineCoreRequest,
)

# Between an engine's "ready" to its launcher and its greeting, which lie moments apart. The request
# link is read under the lock, not waited on: another thread may close it meanwhile.
_GREETING_POLL_S = 0.005
_THREAD_END_TIMEOUT_S = 5.0


class SyncMPClient(MPClient):
    """For callers that wait: outputs are drained by a thread (S20, S23)."""

    def _open_receiver(self) -> None:
        reader = _OutputReader(self._context, self._outputs, weakly(self._on_output))
        self.resources.push("the output thread", reader.close)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        self._check()
        timeout_s = self._ready_timeout_s(timeout_s)
        try:
            deadline = SYSTEM_CLOCK.monotonic() + timeout_s
            if self._launched is not None:
                self._launched.ready.result(timeout_s)
            with self._changed:
                while self._missing:
                    self._check()
                    if SYSTEM_CLOCK.monotonic() > deadline:
                        raise TimeoutError
                    if frames := self._requests.try_receive():
                        self._on_greeting(frames)
                    else:
                        self._changed.wait(_GREETING_POLL_S)
        except TimeoutError as error:
            self.shutdown()
            if isinstance(error, DeadlineExceededError):
                raise  # the launcher's own, which knows more
            raise self._not_ready(timeout_s) from error
        except BaseException:
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        if not self._add_request(request):
            with self._changed:
                self._changed.wait_for(lambda: self._error, CAUSE_TIMEOUT_S)
                self._check()
            raise EngineDeadError("the engine is not connected")

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._abort_requests(request_ids)

    def get_output(self, timeout_s: float | None = None) -> EngineCoreOutputs:
        with self._changed:
            if not self._changed.wait_for(lambda: self._queue or self._error, timeout_s):
                raise DeadlineExceededError(f"no output in {timeout_s:g} s")
            outputs = self._take()
        assert outputs is not None, "woken without outputs or error"
        return outputs

    def control(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        futures, timeout_s = self._start_control(operation, timeout_s)
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        try:
            return [
                future.result(max(0.0, deadline - SYSTEM_CLOCK.monotonic())) for future in futures
            ]
        except TimeoutError as error:
            raise no_answer(operation, timeout_s) from error
        finally:
            self._forget_calls(futures)

    def shutdown(self) -> None:
        self._close()
        self.resources()

    def _wake_receiver(self) -> None:
        self._changed.notify_all()


class _OutputReader:
    """A thread that owns the output socket; told to end through a pair of sockets."""

    def __init__(
        self, context: Context, outputs: Socket, on_message: Callable[[list[bytes]], None]
    ) -> None:
        self._outputs = outputs
        self._on_message = on_message
        self._closing = False
        self._stop, self._stopped = context.pair()
        self._thread = threading.Thread(
            target=self._read, name="process_outputs_socket", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            self._stop.close()
            self._stopped.close()
            raise

    def close(self) -> None:
        self._closing = True
        self._stop.try_send([b""])
        if threading.current_thread() is self._thread:
            self._close_sockets()  # a finalizer, run where the last reference went
        else:
            self._thread.join(_THREAD_END_TIMEOUT_S)
        self._stop.close()

    def _read(self) -> None:
        poller = Poller()
        poller.register(self._outputs)
        poller.register(self._stopped)
        try:
            while not self._closing:
                poller.poll(None)
                while not self._closing and (frames := self._outputs.try_receive()) is not None:
                    self._on_message(frames)
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._outputs.close()
        self._stopped.close()
