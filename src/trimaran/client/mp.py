"""Engines in processes of their own, reached over sockets (S20).

Owns: the half that sync and asyncio share (``MPClient``: links, engines by rank and incarnation,
utility calls, death) and the two ways to receive (a thread, an event loop). Knows nothing of text.
Chosen by ``EngineCoreClient.make_client``.

    caller --> add, abort, control  --ROUTER/DEALER-->  engine processes
    caller <-- queue <-- _on_output <-----PUSH/PULL---
"""

import asyncio
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from trimaran.client.background_resources import BackgroundResources
from trimaran.client.core_client import DEFAULT_CONTROL_TIMEOUT_S, RESULT_TYPES, EngineCoreClient
from trimaran.client.death_policy import DeathPolicy, RaiseOnDeath
from trimaran.clock import SYSTEM_CLOCK
from trimaran.config import EngineConfig
from trimaran.engine.outputs import append_or_merge
from trimaran.errors import (
    DeadlineExceededError,
    EngineDeadError,
    OverloadedError,
    ProtocolError,
    RequestFailedError,
    TrimaranError,
    UnavailableError,
)
from trimaran.ids import engine_identity, rank_of_identity
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.ipc.folder import PrivateFolder
from trimaran.ipc.sockets import AsyncReceiver, Context, Poller, Sent, Socket
from trimaran.launch.core_engines import LaunchedEngines, launch_core_engines
from trimaran.launch.links import BoundLinks, ClientLinks
from trimaran.launch.plan import plan_engines
from trimaran.launch.processes import ENGINE_ENTRY
from trimaran.messages import (
    ENGINE_CORE_DEAD,
    AbortRequests,
    ControlOperation,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineDeath,
    RequestType,
    UtilityCall,
    UtilityOutput,
)

logger = logging.getLogger(__name__)

# Messages kept for a caller that does not take them; beyond it they are merged.
_MAX_QUEUED = 64
# Engines we launched say "ready" twice: to the launcher, then here. Between the two lie moments.
_GREETING_TIMEOUT_S = 10.0
_POLL_S = 0.1
_THREAD_END_TIMEOUT_S = 5.0


@dataclass
class _Engine:
    rank: int
    identity: bytes
    incarnation: int | None = None  # known once it has greeted
    ready: EngineCoreReadyResponse | None = None
    dead: bool = False


@dataclass
class _Call:
    """A utility call under way."""

    future: "Future[object]"
    rank: int
    operation: ControlOperation


class MPClient(EngineCoreClient):
    """The shared half. Subclasses receive: they call ``_on_greeting`` and ``_on_output``."""

    def __init__(
        self,
        config: EngineConfig,
        links: ClientLinks | None = None,
        *,
        death_policy: DeathPolicy | None = None,
        engine_entry: str = ENGINE_ENTRY,
    ) -> None:
        self._config = config
        self._engine_entry = engine_entry
        self._policy = death_policy or RaiseOnDeath()
        self._encoder = Encoder()
        self._decode_outputs: Decoder[EngineCoreOutputs] = Decoder(EngineCoreOutputs)
        self._decode_death: Decoder[EngineDeath] = Decoder(EngineDeath)
        self._decode_ready: Decoder[EngineCoreReadyResponse] = Decoder(EngineCoreReadyResponse)
        # Guards all that follows: callers, the reading thread and the engine monitor meet here.
        self._lock = threading.RLock()
        self._queue: deque[EngineCoreOutputs] = deque()
        self._error: TrimaranError | None = None  # what every call raises from now on
        self._calls: dict[int, _Call] = {}
        self._call_ids = itertools.count()
        self._unsent: deque[list[bytes]] = deque()  # aborts and calls for a link that is full
        self.num_dropped_messages = 0  # undecodable, or of an old incarnation
        self.resources = BackgroundResources()
        self._finalizer = weakref.finalize(self, self.resources)
        try:
            self._open(links)
        except BaseException:
            self._finalizer()
            raise

    def _open(self, links: ClientLinks | None) -> None:
        self._context = Context()
        self.resources.push("the ZMQ context", self._context.close)
        self._launched: LaunchedEngines | None = None
        if links is not None:
            self._open_links(links)
            return
        plan = plan_engines(self._config)
        folder = PrivateFolder()
        self.resources.push("the folder of sockets", folder.close)
        bound = BoundLinks.bind(folder, 0, tuple(process.rank for process in plan))
        self.resources.push("the listeners", bound.close)
        self._open_links(bound.spec)
        self._launched = launch_core_engines(
            self._config,
            plan,
            [bound.spec],
            folder,
            self._context,
            _weakly(self._on_child_end),
            self._engine_entry,
        )
        self.resources.push("the engines", self._launched.close)

    def _open_links(self, links: ClientLinks) -> None:
        self._client_index = links.client_index
        self._engines = {rank: _Engine(rank, engine_identity(rank)) for rank in links.ranks}
        self._requests = self._context.router(links.input_address, links.input_fd)
        self.resources.push("the request link", self._requests.close)
        self._outputs = self._context.pull(links.output_address, links.output_fd)
        self.resources.push("the output link", self._outputs.close)

    @property
    def ready(self) -> list[EngineCoreReadyResponse]:
        return [engine.ready for engine in self._engines.values() if engine.ready is not None]

    def fail(self, cause: str) -> None:
        self._fail_all(EngineDeadError("the deployment failed", cause=cause))

    def _engine_died(self, death: EngineDeath) -> None:
        with self._lock:
            engine = self._engines.get(death.rank)
            if engine is None or engine.dead or engine.incarnation not in (None, death.incarnation):
                return  # of an engine that is gone already, or was replaced
            engine.dead = True
            error = self._policy.engine_died(death)
            for call_id, call in list(self._calls.items()):
                if call.rank == death.rank:
                    del self._calls[call_id]
                    _fail(call.future, error or EngineDeadError(f"engine rank {death.rank} died"))
            if error is not None:
                self._fail_all(error)

    # -------------------------------------------------------------------- what subclasses provide

    def _on_child_end(self, death: EngineDeath) -> None:
        """Called by the engine monitor's thread."""
        raise NotImplementedError

    def _wake_receiver(self) -> None:
        """Something is in the queue, or ``_error`` is set."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ sending

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _add_request(self, request: EngineCoreRequest) -> None:
        with self._lock:
            self._check()
            engine = self._engine_for(request)
            request.client_index = self._client_index
            frames = self._frames(engine, RequestType.ADD, request)
            if self._unsent or (sent := self._requests.try_send(frames)) is Sent.FULL:
                self._send_unsent()
                raise OverloadedError(f"engine rank {engine.rank} does not take requests")
            if sent is Sent.UNREACHABLE:
                raise EngineDeadError(f"engine rank {engine.rank} is not connected")

    def _engine_for(self, request: EngineCoreRequest) -> _Engine:
        """Where a balancer will choose among several."""
        return next(iter(self._engines.values()))

    def _abort_requests(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            self._check()
            if request_ids:
                # To all: an engine ignores the ids that it does not have.
                for engine in self._engines.values():
                    self._send_surely(engine, RequestType.ABORT, AbortRequests(list(request_ids)))

    def _start_control(self, operation: ControlOperation) -> "list[Future[object]]":
        """One future per engine, in order of rank."""
        futures = []
        with self._lock:
            self._check()
            for engine in self._engines.values():
                call_id, future = next(self._call_ids), Future[object]()
                self._calls[call_id] = _Call(future, engine.rank, operation)
                futures.append(future)
                call = UtilityCall(call_id, self._client_index, operation)
                if not self._send_surely(engine, RequestType.UTILITY, call):
                    del self._calls[call_id]
                    _fail(future, EngineDeadError(f"engine rank {engine.rank} is not connected"))
        return futures

    def _forget_calls(self, futures: "Sequence[Future[object]]") -> None:
        with self._lock:
            for call_id, call in list(self._calls.items()):
                if call.future in futures:
                    del self._calls[call_id]

    def _frames(self, engine: _Engine, kind: RequestType, message: msgspec.Struct) -> list[bytes]:
        return [engine.identity, kind.value, self._encoder.encode(message)]

    def _send_surely(self, engine: _Engine, kind: RequestType, message: msgspec.Struct) -> bool:
        """Send, or keep for later what may not be refused; False: the engine is not connected."""
        self._send_unsent()
        frames = self._frames(engine, kind, message)
        sent = Sent.FULL if self._unsent else self._requests.try_send(frames)
        if sent is Sent.FULL:
            self._unsent.append(frames)
        return sent is not Sent.UNREACHABLE

    def _send_unsent(self) -> None:
        while self._unsent and self._requests.try_send(self._unsent[0]) is not Sent.FULL:
            self._unsent.popleft()

    # ---------------------------------------------------------------------------------- receiving

    def _on_greeting(self, frames: list[bytes]) -> None:
        """The first message of an engine on its request link: from now on we may speak."""
        try:
            response = self._decode_ready.decode(frames[-1])
            engine = self._engines.get(rank_of_identity(frames[0]))
        except (ProtocolError, ValueError) as error:
            self._drop("a greeting", error)
            return
        with self._lock:
            if engine is None or engine.rank != response.rank:
                self._drop("a greeting", f"no engine of rank {response.rank} is expected")
                return
            engine.incarnation, engine.ready = response.incarnation, response

    def _on_output(self, frames: list[bytes]) -> None:
        try:
            if frames[0] == ENGINE_CORE_DEAD:
                self._engine_died(self._decode_death.decode(frames[-1]))
                return
            outputs = self._decode_outputs.decode(frames[0])
        except ProtocolError as error:
            self._drop("a message", error)
            return
        with self._lock:
            engine = self._engines.get(outputs.rank)
            if engine is None or engine.incarnation != outputs.incarnation:
                self._drop("outputs", f"from an old engine of rank {outputs.rank}")
                return
            if outputs.utility is not None:
                self._complete(outputs.utility)
                return
            if len(self._queue) < _MAX_QUEUED:
                self._queue.append(outputs)
            else:
                append_or_merge(self._queue, outputs)
            self._wake_receiver()

    def _complete(self, output: UtilityOutput) -> None:
        call = self._calls.pop(output.call_id, None)
        if call is None:
            return  # its caller gave up
        name = type(call.operation).__name__
        if output.error is not None:
            _fail(call.future, RequestFailedError(f"{name}: {output.error_type}: {output.error}"))
            return
        try:
            result = msgspec.msgpack.decode(output.result, type=RESULT_TYPES[type(call.operation)])
        except msgspec.MsgspecError as error:
            _fail(call.future, ProtocolError(f"{name}: its result is malformed: {error}"))
            return
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(result)

    def _drop(self, what: str, why: object) -> None:
        self.num_dropped_messages += 1
        logger.warning("dropped %s (%d so far): %s", what, self.num_dropped_messages, why)

    # --------------------------------------------------------------------------- starting, ending

    @property
    def _missing(self) -> str:
        return ", ".join(
            f"engine rank {engine.rank}" for engine in self._engines.values() if not engine.ready
        )

    def _not_ready(self, timeout_s: float) -> DeadlineExceededError:
        missing = (self._launched.missing() if self._launched else "") or self._missing
        return DeadlineExceededError(
            f"not ready after {timeout_s:g} s: {missing}",
            hint="give it more time with --engine-ready-timeout-s",
        )

    def _ready_timeout_s(self, timeout_s: float | None) -> float:
        if timeout_s is not None:
            return timeout_s
        # The launcher has the same deadline and a better word for it: it comes first.
        return self._config.launch.engine_ready_timeout_s + _GREETING_TIMEOUT_S

    def _fail_all(self, error: TrimaranError) -> None:
        """From now on every call raises ``error``; the first one stays, but for a close."""
        with self._lock:
            if self._error is None or isinstance(error, UnavailableError):
                self._error = error
            calls, self._calls = self._calls, {}
            for call in calls.values():
                _fail(call.future, error)
            self._wake_receiver()


class SyncMPClient(MPClient):
    """For callers that wait: outputs are drained by a thread (S20, S23)."""

    def __init__(
        self,
        config: EngineConfig,
        links: ClientLinks | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, links, **options)
        self._arrived = threading.Condition(self._lock)
        try:
            reader = _OutputReader(self._context, self._outputs, _weakly(self._on_output))
            self.resources.push("the output thread", reader.close)
        except BaseException:
            self._finalizer()
            raise

    def wait_ready(self, timeout_s: float | None = None) -> None:
        self._check()
        timeout_s = self._ready_timeout_s(timeout_s)
        try:
            deadline = SYSTEM_CLOCK.monotonic() + timeout_s
            if self._launched is not None:
                self._launched.ready.result(timeout_s)
            while self._missing:
                self._check()
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise TimeoutError
                if frames := self._requests.receive(_POLL_S):
                    self._on_greeting(frames)
        except TimeoutError as error:
            self.shutdown()
            raise self._not_ready(timeout_s) from error
        except BaseException:
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._abort_requests(request_ids)

    def get_output(self, timeout_s: float | None = None) -> EngineCoreOutputs:
        with self._lock:
            if not self._arrived.wait_for(lambda: self._queue or self._error, timeout_s):
                raise DeadlineExceededError(f"no output in {timeout_s:g} s")
            if self._queue:
                return self._queue.popleft()
            self._check()
        raise AssertionError("woken without outputs or error")

    def control(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        futures = self._start_control(operation)
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        try:
            return [
                future.result(max(0.0, deadline - SYSTEM_CLOCK.monotonic())) for future in futures
            ]
        except TimeoutError as error:
            raise _no_answer(operation, timeout_s) from error
        finally:
            self._forget_calls(futures)

    def shutdown(self) -> None:
        self._fail_all(UnavailableError("this client is closed"))
        self._finalizer()

    def _on_child_end(self, death: EngineDeath) -> None:
        self._engine_died(death)

    def _wake_receiver(self) -> None:
        self._arrived.notify_all()


class AsyncMPClient(MPClient):
    """For asyncio: all but construction and ``ready`` in one event loop (S20)."""

    def __init__(
        self,
        config: EngineConfig,
        links: ClientLinks | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, links, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._greeted = asyncio.Event()
        self._receivers = (
            AsyncReceiver(self._requests, _weakly(self._on_request_link)),
            AsyncReceiver(self._outputs, _weakly(self._on_output)),
        )
        for receiver in self._receivers:
            self.resources.push("a receiver", receiver.stop)

    async def wait_ready_async(self, timeout_s: float | None = None) -> None:
        self._check()
        timeout_s = self._ready_timeout_s(timeout_s)
        self._loop = asyncio.get_running_loop()
        for receiver in self._receivers:
            receiver.start()
        try:
            async with asyncio.timeout(timeout_s):
                if self._launched is not None:
                    # Shielded: who gives up waiting does not take the result from the monitor.
                    await asyncio.shield(asyncio.wrap_future(self._launched.ready))
                while self._missing:
                    self._check()
                    self._greeted.clear()
                    await self._greeted.wait()
        except TimeoutError as error:
            await self.shutdown_async()
            raise self._not_ready(timeout_s) from error
        except BaseException:
            await self.shutdown_async()
            raise

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._add_request(request)
        self._receivers[0].poke()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self._abort_requests(request_ids)
        self._receivers[0].poke()

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._queue:
            self._check()
            self._arrived.clear()
            await self._arrived.wait()
        return self._queue.popleft()

    async def control_async(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        futures = self._start_control(operation)
        self._receivers[0].poke()
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        except TimeoutError as error:
            raise _no_answer(operation, timeout_s) from error
        finally:
            self._forget_calls(futures)

    async def shutdown_async(self) -> None:
        self._fail_all(UnavailableError("this client is closed"))
        for receiver in self._receivers:
            receiver.stop()
        # The rest waits for processes to end, which is nothing for the event loop.
        await asyncio.to_thread(self._finalizer)

    def shutdown(self) -> None:
        """For when no event loop runs any more."""
        self._fail_all(UnavailableError("this client is closed"))
        self._finalizer()

    def _on_request_link(self, frames: list[bytes]) -> None:
        self._on_greeting(frames)
        self._greeted.set()

    def _on_child_end(self, death: EngineDeath) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._engine_died, death)
        else:
            self._engine_died(death)

    def _wake_receiver(self) -> None:
        self._arrived.set()
        self._greeted.set()


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
        self._thread.start()

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


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Call a method for as long as its object lives, without keeping it alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(argument)

    return call


def _fail(future: "Future[object]", error: TrimaranError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _no_answer(operation: ControlOperation, timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(f"{type(operation).__name__}: no answer in {timeout_s:g} s")
