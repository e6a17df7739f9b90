"""The root process of ``trimaran serve``: binds, starts, watches, ends. Torch-free.

Owns: the listening sockets, the children, the word on how far the start is, and the exit code.
Knows nothing of requests, which go between API servers and engines directly. Called by cli/.

    supervisor --+-- api-0      answers /ready from the first second; takes DeploymentState
                 +-- engine-0   handshake: hello, progress, ready
"""

import contextlib
import faulthandler
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

import msgspec

from trimaran import errors
from trimaran.clock import SYSTEM_CLOCK, Laps
from trimaran.config import Config
from trimaran.errors import (
    ChildFailedError,
    ConfigError,
    DeadlineExceededError,
    TrimaranError,
    system_refused,
)
from trimaran.ipc.folder import PrivateFolder
from trimaran.ipc.listeners import bind_tcp
from trimaran.ipc.progress_board import ProgressBoard
from trimaran.ipc.sockets import Context, HasFileno, Poller, Socket
from trimaran.launch.api_servers import API_SERVER_ENTRY, ApiServer
from trimaran.launch.api_spec import StateChannel
from trimaran.launch.core_engines import TICK_S, CoreEngines
from trimaran.launch.links import BoundLinks
from trimaran.launch.model_locator import ModelLocator, locate
from trimaran.launch.plan import plan_api_servers, plan_engines
from trimaran.launch.processes import ENGINE_ENTRY, child_failed, log_stacks
from trimaran.launch.start_bar import StartBar
from trimaran.launch.start_table import ProcessStart, log_start
from trimaran.logging import configure
from trimaran.messages import DeploymentState
from trimaran.process.age import process_age_s
from trimaran.process.spawn import Child, end_children
from trimaran.process.stacks import StackFile, answer_sigusr1

logger = logging.getLogger(__name__)

# Of the time to end, what API servers get to finish their answers before the engines end.
_API_SERVER_SHARE = 0.6
# How much of the whole start a download is, in percent.
_DOWNLOAD_PERCENT = 50.0
# Beyond the engines' deadline: an API server connects when they are ready.
_API_SERVER_EXTRA_S = 30.0
_MAX_FAILURE_CHARS = 4096
_MAX_SIGNALS = 1 << 10
_EVERY_ADDRESS = ("0.0.0.0", "::")


class _SecondSignalError(BaseException):
    """Not an Exception: nothing on its way may take it for one of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def serve(
    config: Config,
    *,
    api_entry: str = API_SERVER_ENTRY,
    engine_entry: str = ENGINE_ENTRY,
    find_model: Callable[..., str] = locate,
) -> int:
    """Serve until a signal or a failure ends it; returns the exit code. Main thread only.

    0: ended by SIGINT or SIGTERM. 1: something failed, and its first cause is the last line
    logged. 128 + n: a second signal n ended it at once.
    """
    observability = config.observability
    configure("supervisor", level=observability.log_level, log_format=observability.log_format)
    supervisor = Supervisor(config, api_entry, engine_entry, find_model)
    with SignalInbox() as signals:
        try:
            supervisor.run(signals)
            return 0
        except _SecondSignalError as second:
            return 128 + second.number
        except (TrimaranError, OSError) as error:
            failure = (
                error
                if isinstance(error, TrimaranError)
                else system_refused("the deployment cannot be started", error)
            )
            supervisor.end(failure)
            _report(failure)
            return 1
        finally:
            signals.ignore()
            supervisor.close()


class SignalInbox:
    """SIGINT, SIGTERM, SIGHUP: the first is kept and makes this readable, the second is raised.

    SIGUSR1 makes it readable too, and leaves this process's stacks in ``stacks``.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # HUP: the terminal was closed

    def __init__(self) -> None:
        self.received: int | None = None
        self._stacks_wanted = False

    def __enter__(self) -> Self:
        # The C handler writes here at once, even if Python's runs only after a poll has begun.
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        self._old_handlers = {n: signal.signal(n, self._on_signal) for n in self._NUMBERS}
        self._old_handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_sigusr1)
        self.stacks = StackFile()
        answer_sigusr1(self.stacks.descriptor, chain=True)
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        self.stacks.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._readable)
        os.close(self._writable)

    def fileno(self) -> int:
        return self._readable

    def ignore(self) -> None:
        """From now on all is being ended as fast as it can be."""
        for number in self._NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def take_stacks_wanted(self) -> bool:
        """Whether SIGUSR1 came since this was last asked; what made this readable is read."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, _MAX_SIGNALS)
        wanted, self._stacks_wanted = self._stacks_wanted, False
        return wanted

    def _on_sigusr1(self, _number: int, _frame: FrameType | None) -> None:
        self._stacks_wanted = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            raise _SecondSignalError(number)
        self.received = number


class Supervisor:
    """The parts of one deployment on this node."""

    def __init__(
        self, config: Config, api_entry: str, engine_entry: str, find_model: Callable[..., str]
    ) -> None:
        self._config = config
        self._api_entry = api_entry
        self._engine_entry = engine_entry
        self._find_model = find_model
        self._clock = SYSTEM_CLOCK
        self._began = self._clock.monotonic() - process_age_s()
        self._laps = Laps(self._began)
        self._state = DeploymentState(ready=False, phase="starting", percent=0.0)
        self._announced = False
        self._bar = StartBar(enabled=config.observability.log_format == "text")
        self._poller = Poller()
        self._closers = contextlib.ExitStack()
        self._context: Context
        self._api_servers: list[ApiServer] = []
        self._links: list[BoundLinks] = []
        self._engines: CoreEngines | None = None
        self._engines_deadline = float("inf")

    def run(self, signals: SignalInbox) -> None:
        """Start everything, then serve; returns after a signal, with all children ended.

        Raises TrimaranError: something cannot start, or ended by itself.
        """
        self._start()
        self._poller.register(signals)
        while signals.received is None:
            self._handle([source for source in self._poller.poll(TICK_S) if source is not signals])
            self._tick()
            self._show_stacks(signals)
        self._bar.close()
        logger.info("%s: ending", signal.Signals(signals.received).name)
        self.end()

    def end(self, failure: TrimaranError | None = None) -> None:
        """End all children in order, within the time of --shutdown-grace-s."""
        self._bar.close()
        self._set_state(
            ready=False,
            phase="failed" if failure else "ending",
            failure=str(failure)[:_MAX_FAILURE_CHARS] if failure else None,
        )
        grace_s = self._config.launch.shutdown_grace_s
        deadline = self._clock.monotonic() + grace_s
        end_children([server.child for server in self._api_servers], grace_s * _API_SERVER_SHARE)
        if self._engines is not None:
            self._engines.close(max(0.0, deadline - self._clock.monotonic()))

    def close(self) -> None:
        """Kill what is left and give everything back. Idempotent."""
        for server in self._api_servers:
            server.close()
        if self._engines is not None:
            self._engines.close(0.0)
        self._closers.close()

    # ------------------------------------------------------------------------------------- start

    def _start(self) -> None:
        server = self._config.server
        try:
            listening = bind_tcp(server.host, server.port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {server.host}:{server.port}: {error.strerror or error}",
                hint="choose another address with --host and --port",
            ) from error
        self._closers.callback(listening.close)
        self._context = Context()
        self._closers.callback(self._context.close)
        host = f"[{server.host}]" if ":" in server.host else server.host
        self._url = f"http://{host}:{listening.getsockname()[1]}"
        self._folder = PrivateFolder()
        self._closers.callback(self._folder.close)
        ranks = tuple(process.rank for process in plan_engines(self._config.engine))
        api_servers = plan_api_servers()
        board = ProgressBoard.create(ranks, len(api_servers))
        self._closers.callback(board.close)
        for process in api_servers:
            links = BoundLinks.bind(self._folder, process.client_index, ranks, board.place)
            self._closers.callback(links.close)
            self._links.append(links)
            api = ApiServer(self._config, process, links.spec, listening.fileno(), self._api_entry)
            self._api_servers.append(api)
            self._poller.register(api.child)
            self._poller.register(api.channel)
        logger.info("listening on %s", self._url)
        if server.host in _EVERY_ADDRESS and not (server.api_key or server.api_key_file):
            logger.warning(
                "anybody who reaches this machine may use it: set --api-key, or listen on 127.0.0.1"
            )
        self._locator = ModelLocator(self._config.model, self._find_model)
        self._closers.callback(self._locator.close)
        self._poller.register(self._locator)
        self._laps.done("starting")
        self._set_state(phase="downloading")

    def _start_engines(self) -> None:
        path = self._locator.result.result(0)
        self._laps.done("locating the model")
        model = msgspec.structs.replace(self._config.model, model=path)
        config = msgspec.structs.replace(self._config.engine, model=model)
        self._engines = CoreEngines(
            config,
            plan_engines(config),
            [links.spec for links in self._links],
            self._folder,
            self._context,
            entry=self._engine_entry,
        )
        self._engines_deadline = (
            self._clock.monotonic() + config.launch.engine_ready_timeout_s + _API_SERVER_EXTRA_S
        )
        for source in self._engines.sources:
            self._poller.register(source)
        self._set_state(model_path=path)

    # -------------------------------------------------------------------------------------- serve

    def _handle(self, sources: list[Socket | HasFileno]) -> None:
        ends: list[ChildFailedError] = []
        for source in sources:
            if source is self._locator:
                self._poller.unregister(source)
                self._start_engines()
            elif isinstance(source, StateChannel):
                if not source.read():
                    self._poller.unregister(source)
            elif isinstance(source, Child) and any(
                source is server.child for server in self._api_servers
            ):
                ends.append(child_failed(source.name, source.end()))
            else:
                assert self._engines is not None
                end = self._engines.handle(source)
                if end is not None:
                    # First: API servers fail because engines do, not the other way round.
                    ends.insert(0, end.error())
        if ends:
            raise ends[0]

    def _tick(self) -> None:
        if self._engines is None:
            self._set_state(percent=round(self._locator.share * _DOWNLOAD_PERCENT, 1))
            self._bar.update(self._state.phase, self._state.percent, self._locator.detail)
        else:
            self._engines.tick()
            phase, percent, detail = self._engines.handshake.progress
            begin = self._locator.share * _DOWNLOAD_PERCENT
            self._set_state(
                ready=self._engines.handshake.complete,
                phase=phase,
                percent=round(begin + percent * (100.0 - begin) / 100.0, 1),
            )
            if not self._announced:
                self._bar.update(phase, self._state.percent, detail)
                self._announce_ready()
        for server in self._api_servers:
            server.channel.flush()

    def _show_stacks(self, signals: SignalInbox) -> None:
        if signals.take_stacks_wanted():
            own = signals.stacks.take(at_once=True)
            logger.error("stacks of the supervisor (pid %d):\n%s", os.getpid(), own)
            for server in self._api_servers:
                server.child.ask_stacks()
            if self._engines is not None:
                self._engines.ask_stacks()
        for server in self._api_servers:
            log_stacks(server.child)

    def _announce_ready(self) -> None:
        assert self._engines is not None
        waiting = [server for server in self._api_servers if server.channel.ready is None]
        if self._engines.handshake.complete and not waiting:
            self._announced = True
            self._bar.close()
            total_s = self._clock.monotonic() - self._began
            self._engines.log_capacity()
            log_start(logger, "start-up:", self._starts(self._engines), total_s)
            logger.info("ready at %s after %.2f s", self._url, total_s)
        elif self._clock.monotonic() > self._engines_deadline:
            names = ", ".join(server.child.name for server in waiting)
            raise DeadlineExceededError(
                f"{names} is not ready, though all engines are",
                hint="give it more time with --engine-ready-timeout-s",
            )

    def _starts(self, engines: CoreEngines) -> list[ProcessStart]:
        api_servers = [
            ProcessStart(
                server.child.name, server.spawned_at - self._began, server.channel.ready.phases
            )
            for server in self._api_servers
            if server.channel.ready is not None
        ]
        return [
            ProcessStart("supervisor", 0.0, self._laps.laps),
            *api_servers,
            *engines.starts(self._began),
        ]

    def _set_state(self, **changes: object) -> None:
        state = msgspec.structs.replace(self._state, **changes)
        if state != self._state:
            self._state = state
            for server in self._api_servers:
                server.channel.send(state)


def _report(error: TrimaranError) -> None:
    """The first cause, last; with its traceback where it is nothing that we raise on purpose."""
    if isinstance(error, ChildFailedError) and error.traceback:
        if not hasattr(errors, error.cause_type or ""):
            logger.error("%s:\n%s", error.child, error.traceback.rstrip())
        else:
            logger.debug("%s:\n%s", error.child, error.traceback.rstrip())
    logger.error("%s", error)
