"""An engine process: three threads around one EngineCore (S8, S9).

Owns: the order of the start, the main loop and the end. Knows nothing of scheduling (EngineCore)
nor of sockets (the receiver, the sender and the launcher link). Started by launch/ through
``run_engine_core``.

    input thread  --WorkItem-->  main thread: add, abort, control, step  --outputs-->  output thread
"""

import gc
import logging
import os
import queue
import signal
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any

import msgspec

from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.engine.engine_core import EngineCore, make_executor
from trimaran.engine.launcher_link import LauncherLink
from trimaran.engine.output_sender import OutputSender
from trimaran.engine.outputs import failed_output
from trimaran.engine.progress import WorkProgress
from trimaran.engine.request_receiver import RequestReceiver, Work, WorkItem
from trimaran.engine.spec import EngineSpec
from trimaran.errors import DeadlineExceededError, OverloadedError, TrimaranError
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Encoder
from trimaran.ipc.progress_board import EngineCells
from trimaran.ipc.sockets import Context
from trimaran.logging import configure
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineDeath,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)
from trimaran.process.failure import failure_of, report_failure

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 30.0
# A SIGTERM that comes just before the wait for work begins does not end that wait: its Python
# handler runs when the wait does.
_SIGNAL_TURN_S = 0.25
_THREAD_END_TIMEOUT_S = 2.0


def run_engine_core(spec: EngineSpec) -> None:
    """The entry point of an engine process: returns when told to end, raises when it fails."""
    observability = spec.config.observability
    configure(
        f"engine {spec.rank}", level=observability.log_level, log_format=observability.log_format
    )
    EngineCoreProc(spec).run()


class EngineCoreProc:
    """One rank of the deployment."""

    def __init__(self, spec: EngineSpec, clock: Clock = SYSTEM_CLOCK) -> None:
        self._spec = spec
        self._clock = clock
        self._context = Context()
        self._items: queue.SimpleQueue[WorkItem] = queue.SimpleQueue()
        self._launcher = LauncherLink(self._context, spec, os.getpid(), clock)
        self._cells: EngineCells
        self._progress: WorkProgress
        self._core: EngineCore
        self._reported = SchedulerStats()  # to all front ends
        self._num_clients = 0
        self._sender: OutputSender
        self._receiver: RequestReceiver

    def run(self) -> None:
        timeout_s = self._spec.config.launch.engine_ready_timeout_s
        addresses = self._launcher.introduce(timeout_s)
        self._num_clients = len(addresses.outputs)
        # After the handshake: a rank that nobody expects has no row on the board.
        self._cells = EngineCells(self._spec.board, self._spec.rank, num_clients=self._num_clients)
        self._progress = WorkProgress(self._cells, self._clock)
        response = self._build_core()
        self._sender = OutputSender(self._context, addresses.outputs, self._thread_failed)
        self._receiver = RequestReceiver(
            self._context,
            engine_identity(self._spec.rank),
            addresses.inputs,
            self._items,
            self._refuse,
            self._cells,
        )
        # Until here SIGTERM ends the process at once: there was nothing to end in order.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._sender.start()
            self._receiver.start(Encoder().encode(response))
            self._await_links()
            self._launcher.ready(response)
            # What was loaded stays for good: no collection has to look at it again.
            gc.collect()
            gc.freeze()
            self._run_busy_loop()
        except BaseException as error:
            # Before anything else can go wrong, or take time.
            report_failure(error)
            self._announce_death(error)
            raise
        else:
            self._core.shutdown()
        finally:
            with self._progress.operation():
                self._close()

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """The first ends the engine after its step; the second ends the process."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._items.put(WorkItem(Work.STOP))

    def _await_links(self) -> None:
        try:
            item = self._items.get(timeout=_CONNECT_TIMEOUT_S)
        except queue.Empty:
            raise DeadlineExceededError(
                f"engine rank {self._spec.rank}: its request links were not open after"
                f" {_CONNECT_TIMEOUT_S:g} s"
            ) from None
        if item.work is Work.STOP:
            self._items.put(item)  # to be taken in its turn
        else:
            self._apply(item.work, item.payload)

    def _build_core(self) -> EngineCoreReadyResponse:
        spawned = self._clock.wall() - self._spec.spawned_at
        began = self._clock.monotonic()
        self._launcher.progress("importing", 0.0)
        # Imports torch where it needs it.
        executor = make_executor(self._spec.config, self._progress.unit_done)
        importing = self._clock.monotonic() - began
        self._core = EngineCore(
            self._spec.config,
            executor,
            clock=self._clock,
            on_progress=self._launcher.progress,
            num_engines_on_host=self._spec.num_engines_on_host,
            progress=self._progress,
        )
        return self._core.ready_response(
            self._spec.rank,
            self._spec.incarnation,
            [("process", spawned), ("importing", importing)],
        )

    def _run_busy_loop(self) -> None:
        while self._take_work():
            for client_index, outputs in self._core.step().items():
                self._send(client_index, outputs)

    def _take_work(self) -> bool:
        """Apply all that came in, aborts included, before each step; block while there is no work.

        Returns False when told to end.
        """
        while True:
            if idle := not self._core.has_work():
                self._report(self._core.stats())
            self._progress.set_busy(not idle)
            try:
                item = self._items.get(block=idle, timeout=_SIGNAL_TURN_S)
            except queue.Empty:
                if idle:
                    continue
                return True
            if item.work is Work.STOP:
                return False
            self._apply(item.work, item.payload)
            if item.number:
                self._cells.applied(item.number)

    def _report(self, stats: SchedulerStats) -> None:
        """Tell all: statistics otherwise come with outputs, and to whom those belong."""
        if stats == self._reported:
            return
        self._reported = stats
        for client_index in range(self._num_clients):
            self._send(client_index, self._outputs(stats=stats))

    def _apply(self, work: Work, payload: Any) -> None:
        match work:
            case Work.ADD:
                try:
                    answer = self._core.add_request(payload)
                except TrimaranError as error:
                    answer = _refusal(payload, error)
                if answer is not None:
                    self._send(payload.client_index, self._outputs(outputs=[answer]))
            case Work.ABORT:
                self._core.abort_requests(payload.request_ids)
            case Work.UTILITY:
                with self._progress.operation():
                    future = self._core.control(payload.operation)
                self._report_sleep()
                future.add_done_callback(partial(self._answer, payload))
            case Work.CONNECTED:
                pass
            case Work.FAILED:
                raise payload

    def _report_sleep(self) -> None:
        """Every front end knows that we sleep, or wake, before the one who asked is answered."""
        stats, known = self._core.stats(), self._reported
        if (stats.sleep_level, stats.is_falling_asleep) != (
            known.sleep_level,
            known.is_falling_asleep,
        ):
            self._report(stats)

    def _answer(self, call: UtilityCall, future: "Future[object]") -> None:
        self._report_sleep()
        error = future.exception()
        if error is None:
            answer = UtilityOutput(call.call_id, msgspec.msgpack.encode(future.result()))
        else:
            logger.warning("%s failed: %s", type(call.operation).__name__, error)
            answer = UtilityOutput(call.call_id, error=str(error), error_type=type(error).__name__)
        self._send(call.client_index, self._outputs(utility=answer))

    def _refuse(self, request: EngineCoreRequest) -> None:
        """Called in the input thread, where it finds the queue full."""
        error = OverloadedError("too many requests wait for this engine")
        self._send(request.client_index, self._outputs(outputs=[_refusal(request, error)]))

    def _outputs(self, **content: Any) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            rank=self._spec.rank,
            incarnation=self._spec.incarnation,
            timestamp=self._clock.wall(),
            **content,
        )

    def _send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        # EngineCore does not know which replica it is; every message says so.
        outputs.rank, outputs.incarnation = self._spec.rank, self._spec.incarnation
        self._sender.send(client_index, outputs)

    def _thread_failed(self, error: BaseException) -> None:
        self._items.put(WorkItem(Work.FAILED, error))

    def _announce_death(self, error: BaseException) -> None:
        failure = failure_of(error)
        cause = f"{failure.text} ({failure.hint})" if failure.hint else failure.text
        self._sender.announce_death(EngineDeath(self._spec.rank, self._spec.incarnation, cause))

    def _close(self) -> None:
        ended = [
            self._sender.close(_THREAD_END_TIMEOUT_S),
            self._receiver.close(_THREAD_END_TIMEOUT_S),
        ]
        self._launcher.close()
        if all(ended):  # else the context would wait for their sockets, and the process for it
            self._context.close()


def _refusal(request: EngineCoreRequest, error: TrimaranError) -> EngineCoreOutput:
    external_id = request.external_id
    logger.warning("request %s refused: %s", external_id, error, extra={"request_id": external_id})
    return failed_output(request, error)
