"""Engines in processes of their own, reached over sockets (S20).

Owns: the half that sync and asyncio share (``MPClient``: links, engines by rank and incarnation,
death, teardown). Knows nothing of text. Its two ways to receive are mp_sync and mp_async, chosen by
``EngineCoreClient.make_client``.

    caller --> add, abort, control  --ROUTER/DEALER-->  engine processes
    caller <-- queue <-- _on_output <-----PUSH/PULL---
"""

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
from trimaran.client.core_client import EngineCoreClient
from trimaran.client.death_policy import DeathPolicy, RaiseOnDeath
from trimaran.client.utility_calls import UtilityCalls
from trimaran.config import EngineConfig
from trimaran.engine.outputs import append_or_merge
from trimaran.errors import (
    DeadlineExceededError,
    EngineDeadError,
    OverloadedError,
    ProtocolError,
    TrimaranError,
    UnavailableError,
    system_refused,
)
from trimaran.ids import engine_identity, rank_of_identity
from trimaran.ipc.codec import Decoder, Encoder, Frame
from trimaran.ipc.folder import PrivateFolder
from trimaran.ipc.progress_board import ProgressBoard, SentCells
from trimaran.ipc.sockets import Context, Sent
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
)
from trimaran.process.interrupts import interrupts_deferred

logger = logging.getLogger(__name__)

# Messages kept for a caller that does not take them; beyond it they are merged.
_MAX_QUEUED = 64
# Engines we launched say "ready" twice: to the launcher, then here. Between the two lie moments.
_GREETING_TIMEOUT_S = 10.0
# A link breaks a moment before the process behind it has ended and can be asked why.
CAUSE_TIMEOUT_S = 2.0


@dataclass
class _Engine:
    rank: int
    identity: bytes
    incarnation: int | None = None  # of one that others launched: known once it has greeted
    ready: EngineCoreReadyResponse | None = None
    death: EngineDeath | None = None


class MPClient(EngineCoreClient):
    """The shared half. Subclasses receive: they call ``_on_greeting`` and ``_on_output``.

    What they need for it they open in ``_open_receiver``, and note in ``resources``.
    """

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
        # Guards all that follows, and the request link: callers, the reading thread and the engine
        # monitor meet here. Notified when there is an output, a greeting or an error.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[EngineCoreOutputs] = deque()
        self._error: TrimaranError | None = None  # what every call raises from now on
        self._calls = UtilityCalls()
        self._unsent: deque[list[Frame]] = deque()  # aborts and calls for a link that is full
        self.num_dropped_messages = 0  # undecodable, absurd, or of an old incarnation
        self.resources = BackgroundResources()
        weakref.finalize(self, self.resources)
        try:
            with interrupts_deferred():
                self._open(links)
        except BaseException as error:
            self.resources()
            if isinstance(error, OSError) and not isinstance(error, TrimaranError):
                raise system_refused("the engine cannot be started", error) from error
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
        ranks = tuple(process.rank for process in plan)
        board = ProgressBoard.create(ranks, num_clients=1)
        self.resources.push("the progress board", board.close)
        bound = BoundLinks.bind(folder, 0, ranks, board.place)
        self.resources.push("the listeners", bound.close)
        self._open_links(bound.spec)
        self._launched = launch_core_engines(
            self._config,
            plan,
            [bound.spec],
            folder,
            self._context,
            weakly(self._engine_died),
            self._engine_entry,
        )
        self.resources.push("the engines", self._launched.close)
        for rank, incarnation in self._launched.engines:
            self._engines[rank].incarnation = incarnation

    def _open_links(self, links: ClientLinks) -> None:
        self._client_index = links.client_index
        self._sent = SentCells(links.board, links.client_index)
        self.resources.push("the counts of messages", self._sent.close)
        self._engines = {rank: _Engine(rank, engine_identity(rank)) for rank in links.ranks}
        self._requests = self._context.router(links.input_address, links.input_fd)
        self.resources.push("the request link", self._requests.close)
        self._outputs = self._context.pull(links.output_address, links.output_fd)
        self.resources.push("the output link", self._outputs.close)
        self._open_receiver()

    @property
    def ready(self) -> list[EngineCoreReadyResponse]:
        return [engine.ready for engine in self._engines.values() if engine.ready is not None]

    def fail(self, cause: str) -> None:
        self._fail_all(EngineDeadError("the deployment failed", cause=cause))

    def _engine_died(self, death: EngineDeath) -> None:
        """From the output link (its last message), or from the engine monitor's thread.

        Both know the same cause: an engine writes it down for its parent before it tells anybody.
        """
        with self._changed:
            engine = self._engines.get(death.rank)
            if engine is None or engine.death or engine.incarnation != death.incarnation:
                return  # of an engine that is gone already, or was replaced
            engine.death = death
            error = self._policy.engine_died(death)
            self._calls.fail(error or _died(death), death.rank)
            if error is not None:
                self._fail_all(error)
            self._wake_receiver()

    # -------------------------------------------------------------------- what subclasses provide

    def _open_receiver(self) -> None:
        """Both links are open; no engine is started yet."""
        raise NotImplementedError

    def _wake_receiver(self) -> None:
        """There is an output, an error or a death. Called in any thread, with the lock held."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ sending

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    def _add_request(self, request: EngineCoreRequest) -> bool:
        """False: the engine is not connected (any more); ``_gone`` is what to wait for then."""
        with self._changed:
            self._check()
            engine = self._engine_for(request)
            request.client_index = self._client_index
            frames = self._frames(engine, RequestType.ADD, request)
            if self._unsent or (sent := self._try_send(frames)) is Sent.FULL:
                self._send_unsent()
                raise OverloadedError(f"engine rank {engine.rank} does not take requests")
            return sent is not Sent.UNREACHABLE

    @property
    def _living(self) -> list[_Engine]:
        return [engine for engine in self._engines.values() if engine.death is None]

    def _engine_for(self, request: EngineCoreRequest) -> _Engine:
        """Where a balancer will choose among several. Raises EngineDeadError: none is left."""
        if not (living := self._living):
            raise _died(*(engine.death for engine in self._engines.values() if engine.death))
        return living[0]

    def _abort_requests(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            self._check()
            if request_ids:
                # To all: an engine ignores the ids that it does not have.
                for engine in self._living:
                    self._send_surely(engine, RequestType.ABORT, AbortRequests(list(request_ids)))

    def _start_control(
        self, operation: ControlOperation, timeout_s: float
    ) -> "tuple[list[Future[object]], float]":
        """(one future per living engine in order of rank, how long to wait for them)."""
        futures = []
        with self._changed:
            self._check()
            for engine in self._living:
                call_id, future = self._calls.start(engine.rank, operation)
                futures.append(future)
                call = UtilityCall(call_id, self._client_index, operation)
                if not self._send_surely(engine, RequestType.UTILITY, call):
                    timeout_s = min(timeout_s, CAUSE_TIMEOUT_S)  # it fails when the cause is known
        return futures, timeout_s

    def _forget_calls(self, futures: "Sequence[Future[object]]") -> None:
        with self._changed:
            self._calls.forget(futures)

    def _frames(self, engine: _Engine, kind: RequestType, message: msgspec.Struct) -> list[Frame]:
        return [engine.identity, kind.value, *self._encoder.encode_frames(message)]

    def _send_surely(self, engine: _Engine, kind: RequestType, message: msgspec.Struct) -> bool:
        """Send, or keep for later what may not be refused; False: the engine is not connected."""
        self._send_unsent()
        frames = self._frames(engine, kind, message)
        sent = Sent.FULL if self._unsent else self._try_send(frames)
        if sent is Sent.FULL:
            self._unsent.append(frames)
        return sent is not Sent.UNREACHABLE

    def _send_unsent(self) -> None:
        while self._unsent and self._try_send(self._unsent[0]) is not Sent.FULL:
            self._unsent.popleft()

    def _try_send(self, frames: list[Frame]) -> Sent:
        sent = self._requests.try_send(frames)
        if sent is Sent.OK:
            self._sent.count(rank_of_identity(bytes(frames[0])))
        return sent

    # ---------------------------------------------------------------------------------- receiving

    def _on_greeting(self, frames: list[bytes]) -> None:
        """The first message of an engine on its request link: from now on we may speak."""
        try:
            identity, payload = frames
            response = self._decode_ready.decode(payload)
            response.verify()
            engine = self._engines.get(rank_of_identity(identity))
        except (ProtocolError, ValueError) as error:
            self._drop("a greeting", error)
            return
        with self._changed:
            if engine is None or engine.rank != response.rank:
                self._drop("a greeting", f"no engine of rank {response.rank} is expected")
                return
            is_other = engine.incarnation not in (None, response.incarnation)
            if is_other and (self._launched is not None or engine.death is None):
                self._drop("a greeting", f"from an old engine of rank {response.rank}")
                return
            engine.incarnation, engine.ready = response.incarnation, response
            self._sent.begin(engine.rank, response.incarnation)
            self._wake_receiver()

    def _on_output(self, frames: list[bytes]) -> None:
        try:
            if frames[0] == ENGINE_CORE_DEAD and len(frames) == 2:
                self._on_last_words(self._decode_death.decode(frames[1]))
                return
            if len(frames) != 1:
                raise ProtocolError(f"outputs have one frame, got {len(frames)}")
            outputs = self._decode_outputs.decode(frames[0])
        except ProtocolError as error:
            self._drop("a message", error)
            return
        with self._changed:
            if isinstance(self._error, UnavailableError):
                return  # closed; engines that end in order may still have something to say
            engine = self._engines.get(outputs.rank)
            if engine is None or engine.incarnation != outputs.incarnation:
                self._drop("outputs", f"from an old engine of rank {outputs.rank}")
                return
            if outputs.utility is not None:
                if not self._calls.complete(outputs.rank, outputs.utility):
                    self._drop("an answer", "nobody waits for it")
                return
            if len(self._queue) < _MAX_QUEUED:
                self._queue.append(outputs)
            else:
                append_or_merge(self._queue, outputs)
            self._wake_receiver()

    def _on_last_words(self, death: EngineDeath) -> None:
        engine = self._engines.get(death.rank)
        if engine is None or engine.incarnation not in (None, death.incarnation):
            self._drop("a death", f"of an old or unknown engine of rank {death.rank}")
        else:
            self._engine_died(death)

    def _take(self) -> EngineCoreOutputs | None:
        """The next outputs, or None: there are none yet. Raises what every call raises."""
        with self._changed:
            if self._queue:
                return self._queue.popleft()
            self._check()
            return None

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
        with self._changed:
            if self._error is None or isinstance(error, UnavailableError):
                self._error = error
            self._calls.fail(error)
            self._wake_receiver()

    def _close(self) -> None:
        """From now on every call says that this client is closed."""
        with self._changed:
            self._queue.clear()
            self._fail_all(UnavailableError("this client is closed"))


def _died(*deaths: EngineDeath) -> EngineDeadError:
    last = deaths[-1]
    return EngineDeadError(
        f"engine rank {last.rank} died",
        rank=last.rank,
        incarnation=last.incarnation,
        cause=last.cause,
    )


def weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Call a method for as long as its object lives, without keeping it alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(argument)

    return call
