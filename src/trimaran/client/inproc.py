"""An engine in the caller's own process: no sockets, no threads (S19).

Owns: an EngineCore, and the translation of its failures into those of the other clients. Chosen by
``EngineCoreClient.make_client``.
"""

from collections import deque
from collections.abc import Sequence

from trimaran.client.core_client import DEFAULT_CONTROL_TIMEOUT_S, EngineCoreClient
from trimaran.client.utility_calls import operation_failed
from trimaran.config import EngineConfig
from trimaran.engine.engine_core import EngineCore, make_executor
from trimaran.engine.outputs import failed_output
from trimaran.errors import (
    EngineDeadError,
    InvalidRequestError,
    TrimaranError,
    UnavailableError,
)
from trimaran.ids import new_incarnation
from trimaran.messages import (
    ControlOperation,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    Sleep,
)
from trimaran.process.failure import failure_of


class InprocClient(EngineCoreClient):
    """Steps the engine in ``get_output``. Raises what loading the model raises."""

    def __init__(self, config: EngineConfig) -> None:
        self._incarnation = new_incarnation()
        self._waiting: deque[EngineCoreOutputs] = deque()
        self._error: TrimaranError | None = None
        self._core = EngineCore(config, make_executor(config))
        self._ready = self._core.ready_response(0, self._incarnation, ())

    @property
    def ready(self) -> list[EngineCoreReadyResponse]:
        return [self._ready]

    def fail(self, cause: str) -> None:
        self._error = EngineDeadError("the deployment failed", cause=cause)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        self._check()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check()
        request.client_index = 0
        try:
            answer = self._core.add_request(request)
        except TrimaranError as error:
            answer = failed_output(request, error)
        if answer is not None:
            # As from an engine process, it is the request's only output.
            self._waiting.append(EngineCoreOutputs(0, self._incarnation, outputs=[answer]))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._check()
        self._core.abort_requests(request_ids)

    def get_output(self, timeout_s: float | None = None) -> EngineCoreOutputs:
        """The outputs of one step; empty ones where there is no work."""
        self._check()
        return self._waiting.popleft() if self._waiting else self._step()

    def _step(self) -> EngineCoreOutputs:
        try:
            outputs = self._core.step().get(0)
        except Exception as error:
            # A step that raised leaves the engine's state in doubt: this engine is over.
            self._error = EngineDeadError(
                "the engine failed", incarnation=self._incarnation, cause=failure_of(error).text
            )
            raise self._error.again() from error
        if outputs is None:
            return EngineCoreOutputs(0, self._incarnation)
        outputs.incarnation = self._incarnation
        return outputs

    def control(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        self._check()
        if isinstance(operation, Sleep) and operation.mode == "wait":
            raise InvalidRequestError(
                'an engine in the caller\'s own process cannot sleep with mode "wait": nobody'
                " takes the outputs of running requests while this call waits for them",
                param="mode",
                hint='finish the requests first, or use mode "abort" or an engine process',
            )
        done = self._core.control(operation)
        while not done.done():  # a Sleep: the next step or two
            self._waiting.append(self._step())
        error = done.exception()
        if error is not None:
            raise operation_failed(operation, type(error).__name__, str(error)) from error
        return [done.result()]

    def shutdown(self) -> None:
        if not isinstance(self._error, UnavailableError):
            self._error = UnavailableError("this client is closed")
            self._core.shutdown()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()
