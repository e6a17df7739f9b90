"""Control operations under way: who waits for which answer (S24).

Owns: call ids, futures, and the decoding of results. Guarded by its owner's lock. Called by the
multi-process clients.
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from trimaran.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidRequestError,
    ProtocolError,
    RequestFailedError,
    TrimaranError,
)
from trimaran.ipc.codec import Decoder
from trimaran.messages import ControlOperation, UtilityOutput


@dataclass
class _Call:
    future: "Future[object]"
    rank: int
    operation: ControlOperation


class UtilityCalls:
    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()

    def start(self, rank: int, operation: ControlOperation) -> "tuple[int, Future[object]]":
        """(id, future) of a call to one engine."""
        call_id, future = next(self._ids), Future[object]()
        self._calls[call_id] = _Call(future, rank, operation)
        return call_id, future

    def complete(self, rank: int, output: UtilityOutput) -> bool:
        """False: this engine was not asked, or its caller gave up."""
        call = self._calls.get(output.call_id)
        if call is None or call.rank != rank:
            return False
        del self._calls[output.call_id]
        if output.error is not None:
            error_type = output.error_type or "an error"
            _fail(call.future, operation_failed(call.operation, error_type, output.error))
            return True
        try:
            result = Decoder[object](call.operation.result_type).decode(output.result)
        except ProtocolError as error:
            name = type(call.operation).__name__
            _fail(call.future, ProtocolError(f"{name}: its result is malformed: {error}"))
            return True
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(result)
        return True

    def forget(self, futures: "Sequence[Future[object]]") -> None:
        """Nobody waits for these any more."""
        for call_id, call in list(self._calls.items()):
            if call.future in futures:
                del self._calls[call_id]

    def fail(self, error: TrimaranError, rank: int | None = None) -> None:
        """All calls to ``rank`` (None: to every engine) raise ``error``."""
        for call_id, call in list(self._calls.items()):
            if rank is None or call.rank == rank:
                del self._calls[call_id]
                _fail(call.future, error)


# Errors of the caller, raised by whatever carries an operation out, stay what they are.
_CALLERS_ERRORS = {error.__name__: error for error in (InvalidRequestError, ConflictError)}


def operation_failed(operation: ControlOperation, error_type: str, text: str) -> TrimaranError:
    """What a caller gets for an exception in the engine, given by its type's name and its text."""
    name = type(operation).__name__
    if error_type in _CALLERS_ERRORS:
        return _CALLERS_ERRORS[error_type](f"{name}: {text}")
    return RequestFailedError(f"{name}: {error_type}: {text}")


def no_answer(operation: ControlOperation, timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(f"{type(operation).__name__}: no answer in {timeout_s:g} s")


def _fail(future: "Future[object]", error: TrimaranError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error.again())
