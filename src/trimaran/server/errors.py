"""One mapper from exceptions to HTTP answers, for every route, status and stream.

Owns: the error shape {"error": {"message", "type", "param", "code"}}, request ids, and the boundary
behind which nothing escapes. Messages of requests' own faults are passed on; those of the server's
faults are fixed texts with the request id, and the details are in the log under it.
"""

import asyncio
import logging
import re
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimaran.errors import (
    AuthenticationError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    TrimaranError,
    UnavailableError,
)
from trimaran.ids import external_id
from trimaran.server.request_book import RequestBook, record_of

logger = logging.getLogger(__name__)

STOPPED = "the server was stopped before the answer was complete"
MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_HTTP_MESSAGES = {
    404: ("there is no such route", "not_found_error"),
    405: ("this route does not take this method", "invalid_request_error"),
}


class ClientGoneError(Exception):
    """The client closed its connection: nobody is left to answer."""


@dataclass(frozen=True)
class HTTPError:
    """What a client is told."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The JSON document, below 8 kB whatever was put in."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message[:MAX_MESSAGE_CHARS],
                    "type": self.type,
                    "param": self.param[:MAX_PARAM_CHARS] if self.param is not None else None,
                    "code": self.code,
                }
            }
        )


def describe(error: Exception, request_id: str) -> HTTPError:
    """Map any exception; log those that are the server's own fault."""
    if isinstance(error, InvalidRequestError):
        return HTTPError(
            error.http_status, str(error), error.error_type, error.param, type(error).code
        )
    if isinstance(error, AuthenticationError):
        headers = {"www-authenticate": "Bearer"}
        return HTTPError(error.http_status, str(error), error.error_type, None, error.code, headers)
    if isinstance(error, OverloadedError | UnavailableError):
        headers = {"retry-after": str(max(1, round(error.retry_after_s)))}
        return HTTPError(error.http_status, str(error), error.error_type, None, error.code, headers)
    if isinstance(error, HTTPException):
        message, kind = _HTTP_MESSAGES.get(
            error.status_code, (str(error.detail), "invalid_request_error")
        )
        return HTTPError(error.status_code, message, kind, headers=dict(error.headers or {}))
    return _describe_internal(error, request_id)


def _describe_internal(error: Exception, request_id: str) -> HTTPError:
    extra = {"request_id": request_id}
    if not isinstance(error, TrimaranError):
        logger.error("request %s failed", request_id, exc_info=error, extra=extra)
        message = f"internal error (request id {request_id})"
        return HTTPError(500, message, "internal_error")
    logger.error("request %s failed: %s", request_id, error, extra=extra)
    if isinstance(error, RequestFailedError):
        message = error.message
    elif isinstance(error, EngineDeadError):
        message = "the engine that served this request has ended; the request may be sent again"
    elif isinstance(error, DeadlineExceededError):
        message = "the server did not finish a step of this request in time"
    else:
        message = "internal error"
    return HTTPError(
        error.http_status,
        f"{message} (request id {request_id})",
        error.error_type,
        None,
        error.code,
    )


def error_response(described: HTTPError) -> Response:
    return Response(
        described.body(),
        status_code=described.status,
        headers=described.headers,
        media_type="application/json",
    )


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Handler for what the framework raises by itself: unknown routes and methods."""
    return _answer(error, request.scope)


def describe_to(scope: Scope, error: Exception) -> HTTPError:
    """What the client of this request is told; kept in its record."""
    record = record_of(scope)
    described = describe(error, record.request_id)
    record.error = described.message[:MAX_MESSAGE_CHARS]
    return described


def _answer(error: Exception, scope: Scope) -> Response:
    return error_response(describe_to(scope, error))


class ErrorBoundary:
    """Outermost but for CORS: gives requests their id and turns every exception into an answer."""

    def __init__(self, app: ASGIApp, *, book: RequestBook) -> None:
        self._app = app
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _choose_request_id(scope)
        record = self._book.begin(scope, request_id)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode("ascii")),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except asyncio.CancelledError:
            if record.status:
                raise
            # The server is stopped: the task ends here anyway, but not without an answer.
            await _answer(UnavailableError(STOPPED), scope)(scope, receive, send_marked)
        except ClientGoneError:
            logger.debug("client gone", extra={"request_id": request_id})
        except Exception as error:
            if record.status:
                raise  # uvicorn cuts the connection, so that the answer never looks whole
            await _answer(error, scope)(scope, receive, send_marked)
        finally:
            self._book.end(scope)


def _choose_request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return external_id("req")
