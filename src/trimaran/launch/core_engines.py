"""Engines from start to end: processes and handshake together.

Owns: ``CoreEngines``, which somebody else's poll loop drives (the supervisor's), and
``launch_core_engines``, which drives it in a thread of its own (for ``LLM`` and ``AsyncLLM``, whose
process is the parent of its engines). Knows nothing of requests. Called by ``supervisor``, client/.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.config import EngineConfig
from trimaran.engine.spec import fingerprint
from trimaran.errors import ChildFailedError, ProtocolError, UnavailableError
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.ipc.listeners import Listener
from trimaran.ipc.progress_board import ProgressBoard
from trimaran.ipc.sockets import Context, HasFileno, Poller, Socket
from trimaran.launch.handshake import Handshake
from trimaran.launch.hang_watch import EngineFence
from trimaran.launch.links import ClientLinks
from trimaran.launch.plan import EngineProcess
from trimaran.launch.processes import (
    ENGINE_ENTRY,
    CoreEngineProcManager,
    EngineId,
    child_failed,
    log_stacks,
)
from trimaran.launch.start_bar import StartBar
from trimaran.launch.start_table import ProcessStart, log_start
from trimaran.messages import (
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineDeath,
    HandshakeMessage,
)
from trimaran.process.spawn import Child, ChildEnd

logger = logging.getLogger(__name__)

_WAITING_LOG_INTERVAL_S = 5.0
# How often deadlines and progress are looked at; everything else wakes the loop by itself.
TICK_S = 0.5
_THREAD_END_TIMEOUT_S = 5.0


class EngineEnd(NamedTuple):
    engine: EngineId
    name: str
    end: ChildEnd

    def error(self) -> ChildFailedError:
        """For whoever waits for the engine to start."""
        return child_failed(self.name, self.end)


class CoreEngines:
    """The engines of this node, while they start, run and end."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Sequence[EngineProcess],
        links: Sequence[ClientLinks],
        context: Context,
        *,
        clock: Clock = SYSTEM_CLOCK,
        entry: str = ENGINE_ENTRY,
    ) -> None:
        self._clock = clock
        self.started_at = clock.monotonic()
        self._waiting_logged_at = self.started_at
        self._encoder = Encoder()
        self._decoder: Decoder[HandshakeMessage] = Decoder(HandshakeMessage)
        with contextlib.ExitStack() as opened:
            self._listener = Listener.bind_ipc()
            opened.callback(self._listener.close)
            self._socket = context.router(self._listener.address, self._listener.fileno())
            opened.callback(self._socket.close)
            self._board = _board_of(links, plan)
            opened.callback(self._board.close)
            self._manager = CoreEngineProcManager(
                config,
                plan,
                self._listener.address,
                clock,
                entry,
                board=self._board.place,
                pass_fds=[
                    *self._listener.peer_fds,
                    *(fd for client in links for fd in client.peer_fds),
                ],
            )
            self._close_links = opened.pop_all().close
        self._fence = EngineFence(
            self._board, self._manager, config.launch.engine_hang_timeout_s, clock
        )
        self.handshake = Handshake(
            dict(self._manager.engines.values()),
            fingerprint(config),
            EngineAddresses(
                inputs=[link.input_address for link in links],
                outputs=[link.output_address for link in links],
            ),
            self.started_at,
            config.launch.engine_ready_timeout_s,
        )

    @property
    def sources(self) -> list[Socket | HasFileno]:
        """What to poll: when one is readable, call ``handle`` with it."""
        return [self._socket, *self._manager.children]

    @property
    def engines(self) -> list[EngineId]:
        return list(self._manager.engines.values())

    def handle(self, source: Socket | HasFileno) -> EngineEnd | None:
        """Take what a readable source brings: messages, or the end of an engine (returned)."""
        if isinstance(source, Child):
            return EngineEnd(self._manager.engines[source], source.name, source.end())
        while (frames := self._socket.try_receive()) is not None:
            try:
                answer = self.handshake.receive(frames[0], self._decoder.decode(frames[-1]))
                if answer is not None:  # it quotes the peer, and may be too large by that
                    self._socket.try_send([frames[0], self._encoder.encode(answer)])
            except (ProtocolError, ValueError) as error:
                logger.warning("refused a handshake message: %s", error)
        return None

    def tick(self) -> None:
        """Look at what no event announces: stacks to print, engines that hang, deadlines.

        Raises DeadlineExceededError: the engines had their time. Says what it waits for.
        """
        for child in self._manager.children:
            log_stacks(child)
        self._fence.tick({response.rank for response in self.handshake.responses})
        now = self._clock.monotonic()
        if self.handshake.complete:
            return
        self.handshake.check_deadline(now)
        if now - self._waiting_logged_at >= _WAITING_LOG_INTERVAL_S:
            self._waiting_logged_at = now
            logger.info("waiting for %s", self.handshake.missing(now))

    def ask_stacks(self) -> None:
        """Have every engine say where its threads are; ``tick`` prints it."""
        for child in self._manager.children:
            child.ask_stacks()

    def starts(self, began: float) -> list[ProcessStart]:
        """For the start-up table; ``began`` (monotonic seconds): of the whole."""
        return [
            ProcessStart(f"engine-{response.rank}", self.started_at - began, response.phases)
            for response in self.handshake.responses
        ]

    def log_capacity(self) -> None:
        for response in self.handshake.responses:
            logger.info(
                "engine rank %d: up to %d tokens a sequence, KV cache of %d blocks of %d tokens"
                " (at most %d MiB, taken as it is used)",
                response.rank,
                response.max_model_len,
                response.num_kv_blocks,
                response.block_size,
                response.kv_cache_bytes >> 20,
            )

    def close(self, grace_s: float | None = None) -> None:
        """End the processes; returns when none is left. Idempotent."""
        try:
            self._manager.close(grace_s)
        finally:
            self._close_links()


def _board_of(links: Sequence[ClientLinks], plan: Sequence[EngineProcess]) -> ProgressBoard:
    """The board of the front ends on this node; one for the engines alone if there are none."""
    for link in links:
        if link.board is not None:
            return ProgressBoard(link.board)
    return ProgressBoard.create(tuple(process.rank for process in plan), len(links))


class LaunchedEngines:
    """Engines watched by a thread. ``ready`` brings their responses, or the first cause."""

    def __init__(self, engines: CoreEngines, on_death: Callable[[EngineDeath], None]) -> None:
        self.ready: Future[list[EngineCoreReadyResponse]] = Future()
        self._engines = engines
        self._on_death = on_death
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="engine-monitor", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake)
            raise

    @property
    def engines(self) -> list[EngineId]:
        return self._engines.engines

    def missing(self) -> str:
        """Who is not ready, in which phase, since when."""
        return self._engines.handshake.missing(SYSTEM_CLOCK.monotonic())

    def close(self) -> None:
        """Stop watching, then end the engines. Idempotent."""
        if self._closing:
            return
        self._closing = True
        with contextlib.ExitStack() as closers:  # which a Ctrl-C meanwhile does not stop
            closers.callback(self._engines.close)
            closers.callback(os.close, self._wake)
            os.eventfd_write(self._wake, 1)
            # A garbage collection, and so a finalizer, can happen in any thread: in that one too.
            if threading.current_thread() is not self._thread:
                self._thread.join(_THREAD_END_TIMEOUT_S)

    def _watch(self) -> None:
        try:
            self._watch_until_closed()
            if not self.ready.done():
                raise UnavailableError("closed while the engines started")
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            else:
                logger.exception("the engine monitor failed")

    def _watch_until_closed(self) -> None:
        bar = StartBar()
        poller = Poller()
        for source in (_Descriptor(self._wake), *self._engines.sources):
            poller.register(source)
        while not self._closing:
            for source in poller.poll(TICK_S):
                if self._closing:
                    return
                end = self._engines.handle(source)
                if end is not None:
                    poller.unregister(source)
                    self._engine_ended(end)
            self._engines.tick()
            if not self.ready.done():
                bar.update(*self._engines.handshake.progress)
                if self._engines.handshake.complete:
                    bar.close()
                    self._log_start()
                    self.ready.set_result(self._engines.handshake.responses)
            else:
                bar.close()

    def _log_start(self) -> None:
        self._engines.log_capacity()
        began = self._engines.started_at
        total_s = SYSTEM_CLOCK.monotonic() - began
        log_start(logger, "start-up of the engines:", self._engines.starts(began), total_s)

    def _engine_ended(self, end: EngineEnd) -> None:
        if self.ready.done():
            rank, incarnation = end.engine
            self._on_death(EngineDeath(rank, incarnation, end.end.explained))
        else:
            self.ready.set_exception(end.error())


class _Descriptor:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


def launch_core_engines(
    config: EngineConfig,
    plan: Sequence[EngineProcess],
    links: Sequence[ClientLinks],
    context: Context,
    on_death: Callable[[EngineDeath], None],
    entry: str = ENGINE_ENTRY,
) -> LaunchedEngines:
    """Start the planned engines as children of this process, and watch them.

    ``config.model.model`` must be what the engine can open (see formats.hub.locate_model). The
    caller holds the links, and closes what is returned. ``on_death`` is called from another thread,
    for an engine that ends after it was ready. Raises OSError: a process cannot be started.
    """
    engines = CoreEngines(config, plan, links, context, entry=entry)
    try:
        return LaunchedEngines(engines, on_death)
    except BaseException:
        engines.close(0.0)
        raise
