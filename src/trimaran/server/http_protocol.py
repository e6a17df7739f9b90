"""HTTP/1.1 on one connection: uvicorn's, with bounds that come before any parsing is done.

Owns: the limits on request heads (bytes and seconds) and the error shape of what is not HTTP.
"""

import asyncio
from asyncio import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from trimaran.server.errors import HTTPError

MAX_HEAD_BYTES = 64 << 10
HEAD_DEADLINE_S = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a head (request line and headers) that is too large or takes too long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._has_moved = False  # out of a head or to the next one, by the data being parsed
        self._unfinished_bytes = 0  # of the head that is being read
        self._too_large = False
        self._head_deadline: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._start_deadline()
        self._has_moved = False
        super().data_received(data)
        if self._has_moved or not self._in_head:
            self._unfinished_bytes = 0
            return
        self._unfinished_bytes += len(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._in_head, self._has_moved = False, True
        self._end_deadline()
        size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        if size > MAX_HEAD_BYTES:
            self._too_large = True
            raise ValueError("request head too large")  # the parser stops and a refusal is sent
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._has_moved = True, True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        status = 400
        if self._too_large:
            status, msg = 431, f"the request head is above the limit of {MAX_HEAD_BYTES} bytes"
        body = HTTPError(status, msg, "invalid_request_error").body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()

    def _start_deadline(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)

    def _end_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
