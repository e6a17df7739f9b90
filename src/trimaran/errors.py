"""Every error trimaran raises on purpose, and what each means to an HTTP client.

    TrimaranError                       500 internal_error
    ├── InvalidRequestError             400 invalid_request_error   (a ValueError; names the field)
    │   ├── NotFoundError               404 not_found_error
    │   │   └── ModelNotFoundError      404 not_found_error
    │   ├── ConflictError               409 invalid_request_error   (not in the present state)
    │   ├── PayloadTooLargeError        413 invalid_request_error
    │   └── UnsupportedMediaTypeError   415 invalid_request_error
    ├── AuthenticationError             401 authentication_error
    ├── OverloadedError                 429 overloaded_error        (Retry-After)
    ├── UnavailableError                503 service_unavailable     (Retry-After)
    ├── RequestFailedError              500 internal_error          (one request; the batch goes on)
    ├── EngineDeadError                 500 engine_dead             (rank, incarnation, first cause)
    ├── OutOfMemoryError                500 internal_error          (of an engine; it ends by it)
    ├── DeadlineExceededError           504 timeout_error           (says what was waited for)
    └── StartupError                    (no status: nothing is serving yet)
        ├── ConfigError                 a flag, file or environment value; names it
        ├── CheckpointError             a model file; names file, tensor, what to do
        └── ChildFailedError            a child process; carries the child's own first cause

The message is written for the person who can act on it; ``hint`` says what to change. Nothing here
formats tracebacks or JSON: that is the business of process/ and server/.
"""

import errno
from typing import ClassVar, Self


class TrimaranError(Exception):
    """Base of all. ``http_status``, ``error_type`` and ``code`` feed the one HTTP mapper."""

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def again(self) -> Self:
        """A copy without traceback or context, for an error that many callers are to raise."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        return twin


class InvalidRequestError(TrimaranError, ValueError):
    """The request is at fault; ``param`` is the field as the client spelled it."""

    http_status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class NotFoundError(InvalidRequestError):
    http_status = 404
    error_type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class ConflictError(InvalidRequestError):
    """Sound in itself, but not in the state that the engine or the deployment is in."""

    http_status = 409


class PayloadTooLargeError(InvalidRequestError):
    http_status = 413


class UnsupportedMediaTypeError(InvalidRequestError):
    http_status = 415


class AuthenticationError(TrimaranError):
    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class OverloadedError(TrimaranError):
    """Refused now, welcome later."""

    http_status = 429
    error_type = "overloaded_error"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class UnavailableError(TrimaranError):
    """Not serving (starting, draining, or given up)."""

    http_status = 503
    error_type = "service_unavailable"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class RequestFailedError(TrimaranError):
    """One request failed inside the engine; all others go on."""


class EngineDeadError(TrimaranError):
    """An engine process is gone. ``cause`` is its own last exception, as text."""

    error_type = "engine_dead"

    def __init__(
        self, message: str, *, rank: int = 0, incarnation: int = 0, cause: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.incarnation = incarnation
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.message}: {self.cause}" if self.cause else self.message


class OutOfMemoryError(TrimaranError):
    """The engine's process gets no more memory; the hint says what takes less of it."""


class DeadlineExceededError(TrimaranError, TimeoutError):
    """A wait ended without its event; the message says what was waited for and how long."""

    http_status = 504
    error_type = "timeout_error"


class ProtocolError(TrimaranError):
    """A peer sent what no version of ours sends: refused and counted, never fatal by itself."""


class StartupError(TrimaranError):
    """Nothing serves yet, and will not."""


_SYSTEM_HINTS = {
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENFILE: "the system has no open files left: raise fs.file-max",
    errno.EAGAIN: "raise the limit of processes: ulimit -u",
    errno.ENOMEM: "there is no memory left for another process",
    errno.EACCES: "set TMPDIR to a folder that can be written",
    errno.EROFS: "set TMPDIR to a folder that can be written",
    errno.ENOSPC: "set TMPDIR to a folder on a device with room",
}


def system_refused(what: str, error: OSError) -> StartupError:
    """What to tell of a start that the operating system did not allow."""
    file = f": {error.filename}" if error.filename else ""
    return StartupError(
        f"{what}: {error.strerror or error}{file}", hint=_SYSTEM_HINTS.get(error.errno or 0)
    )


class ConfigError(StartupError, ValueError):
    """A flag, environment variable or config-file value is wrong; the message names it."""


class CheckpointError(StartupError):
    """A model file is missing, damaged or unsupported."""

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        hint: str | None = None,
    ) -> None:
        where = ": ".join(part for part in (file, tensor) if part)
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.file = file
        self.tensor = tensor


class ChildFailedError(StartupError):
    """A child process ended before it was ready; carries the child's own exception."""

    def __init__(
        self,
        message: str,
        *,
        child: str,
        cause_type: str | None = None,
        traceback: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.child = child
        self.cause_type = cause_type
        self.traceback = traceback
