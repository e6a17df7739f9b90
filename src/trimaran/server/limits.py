"""Bounds on what one client, and all clients together, may ask of the server.

Owns: request bodies (media type, size, time, JSON depth) and the number of requests in flight.
Headers are bounded before they are parsed, in http_protocol.py; fields in openai/protocol.py.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from trimaran.errors import (
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)
from trimaran.metrics.recorder import MetricsRecorder
from trimaran.server.request_book import record_of

logger = logging.getLogger(__name__)

BODY_DEADLINE_S = 60.0
SHOWN_FAULTS = 3
Body = TypeVar("Body", bound=BaseModel)


class Admission:
    """Counts sequences in flight (one per prompt and choice) and refuses those above the limit."""

    def __init__(self, limit: int, metrics: MetricsRecorder) -> None:
        self._limit = limit
        self._metrics = metrics
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Until nothing is in flight."""
        await self._idle.wait()

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Hold ``sequences`` places.

        Raises InvalidRequestError: more than there will ever be. OverloadedError: none free now.
        """
        if sequences > self._limit:
            raise InvalidRequestError(
                f"prompts times n is {sequences}, this server takes {self._limit} in one request",
                param="prompt",
                hint="send fewer prompts at once, or raise --max-queued-requests",
            )
        if self._in_flight + sequences > self._limit:
            self._metrics.on_refused()
            raise OverloadedError(
                f"{self._in_flight} requests are in flight, the limit is {self._limit};"
                " try again later",
                retry_after_s=1,
            )
        self._in_flight += sequences
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= sequences
            if self._in_flight == 0:
                self._idle.set()


async def read_json(request: Request, model: type[Body], max_bytes: int) -> Body:
    """Read and check a JSON body.

    Raises UnsupportedMediaTypeError, PayloadTooLargeError, InvalidRequestError (names the field)
    and HTTPException 408 when the body does not arrive in time.
    """
    _check_media_type(request)
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            data = await _read_bounded(request, max_bytes)
    except TimeoutError:
        raise HTTPException(
            408, f"the request body did not arrive within {BODY_DEADLINE_S:.0f} s"
        ) from None
    try:
        # The parser refuses lone surrogates, and nesting deeper than 200.
        body = model.model_validate_json(data)
    except ValidationError as error:
        raise _as_invalid_request(error) from None
    if body.model_extra:
        logger.debug(
            "ignored unknown fields: %.200s",
            ", ".join(body.model_extra),
            extra={"request_id": record_of(request.scope).request_id},
        )
    return body


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError(
            "the body must be JSON, sent with the header 'Content-Type: application/json'"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaTypeError("compressed request bodies are not accepted")


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    too_large = PayloadTooLargeError(
        f"the request body is above the limit of {max_bytes} bytes (--max-request-bytes)"
    )
    declared = request.headers.get("content-length", "")
    # httptools has checked that it is a number; a chunked body has none and is counted below.
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _as_invalid_request(error: ValidationError) -> InvalidRequestError:
    """The first faults and their number; never the values, which may be anything."""
    faults = error.errors(include_input=False, include_url=False, include_context=False)
    shown = []
    for fault in faults[:SHOWN_FAULTS]:
        name = _field_name(fault["loc"])
        message = str(fault["msg"])[:200]
        shown.append(f"{name}: {message}" if name else message)
    more = len(faults) - len(shown)
    text = "; ".join(shown) + (f"; and {more} more faults" if more > 0 else "")
    field = str(faults[0]["loc"][0])[:60] if faults[0]["loc"] else None
    return InvalidRequestError(text, param=field)


def _field_name(location: tuple[int | str, ...]) -> str:
    """``messages.3.role``: without the union members that pydantic puts in as well."""
    parts = [str(part)[:60] for part in location if not _is_union_member(part)]
    return ".".join(parts)[:200]


def _is_union_member(part: int | str) -> bool:
    return isinstance(part, str) and (
        part in ("str", "int", "float") or part[:1] == "<" or "[" in part
    )
