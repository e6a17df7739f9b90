"""How a front end reaches its engines: one set of methods, whatever is behind it (S18).

Owns: the methods and the choice between InprocClient, SyncMPClient and AsyncMPClient. Knows nothing
of sockets or steps. Called by AsyncLLM, LLM and the API server.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from trimaran.config import EngineConfig
from trimaran.launch.links import ClientLinks
from trimaran.messages import (
    ControlOperation,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)

DEFAULT_CONTROL_TIMEOUT_S = 60.0
# Running work may have to end first, and weights to be read again.
SLEEP_TIMEOUT_S = 600.0

# (multiprocess_mode, asyncio_mode) -> the client; imported when chosen.
_CLIENTS = {
    (False, False): ("trimaran.client.inproc", "InprocClient"),
    (True, False): ("trimaran.client.mp_sync", "SyncMPClient"),
    (True, True): ("trimaran.client.mp_async", "AsyncMPClient"),
}


class EngineCoreClient:
    """The methods; a client has the plain ones or the ``_async`` ones.

    A new client has started its engines (unless it was given links to running ones); ``wait_ready``
    comes before any request. Whatever a method raises from there on, ``shutdown`` ends all that the
    client started. Every method raises EngineDeadError once an engine is gone, with its own last
    exception as the cause, and UnavailableError once the client is closed.
    """

    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: bool,
        config: EngineConfig,
        *,
        links: ClientLinks | None = None,
    ) -> "EngineCoreClient":
        """The client for these modes.

        ``links`` attaches to engines that a supervisor started; without them the client starts its
        own, and ``config.model.model`` must be a path (see formats.hub). Raises StartupError.
        Raises NotImplementedError: asyncio in one process.
        """
        if asyncio_mode and not multiprocess_mode:
            raise NotImplementedError(
                "asyncio needs engine processes (multiprocess_mode=True): in one process every"
                " step of the engine would block the event loop"
            )
        module, name = _CLIENTS[multiprocess_mode, asyncio_mode]
        client_type = getattr(import_module(module), name)
        client: EngineCoreClient = (
            client_type(config, links) if multiprocess_mode else client_type(config)
        )
        return client

    @property
    def ready(self) -> list[EngineCoreReadyResponse]:
        """What the engines found out, in order of rank; complete after ``wait_ready``."""
        raise NotImplementedError

    def fail(self, cause: str) -> None:
        """Hear from the supervisor that the deployment is over: every call raises from now on."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ plain

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait for all engines (default: the configured time).

        Raises ChildFailedError with the engine's own first cause; DeadlineExceededError, which says
        which ranks are missing and in which phase. Everything is closed then.
        """
        self._lacks("wait_ready")

    def add_request(self, request: EngineCoreRequest) -> None:
        """Submit. Raises OverloadedError: the engine does not read; nothing was submitted."""
        self._lacks("add_request")

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop these; unknown and finished ids are no error. No output need follow."""
        self._lacks("abort_requests")

    def get_output(self, timeout_s: float | None = None) -> EngineCoreOutputs:
        """The next outputs, waited for. Raises DeadlineExceededError after ``timeout_s``."""
        self._lacks("get_output")

    def control(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        """Carry out an operation on every engine; results in order of rank.

        Raises RequestFailedError: an engine could not, and says with which error;
        InvalidRequestError, ConflictError: its own, where the caller is at fault;
        DeadlineExceededError: it did not answer (it may carry the operation out all the same).
        """
        self._lacks("control")

    def shutdown(self) -> None:
        """End all that this client started. Idempotent."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------- asyncio

    async def wait_ready_async(self, timeout_s: float | None = None) -> None:
        self._lacks("wait_ready_async")

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._lacks("add_request_async")

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self._lacks("abort_requests_async")

    async def get_output_async(self) -> EngineCoreOutputs:
        self._lacks("get_output_async")

    async def control_async(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        self._lacks("control_async")

    async def shutdown_async(self) -> None:
        self._lacks("shutdown_async")

    def _lacks(self, method: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {method}: see make_client")
