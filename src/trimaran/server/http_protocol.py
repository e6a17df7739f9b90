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
        self._head_bytes = 0
        self._head_deadline: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Body bytes of one read may be counted as well; a read is no larger than 256 KiB.
        was_in_head = self._in_head
        if was_in_head and self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)
        super().data_received(data)
        if not (was_in_head and self._in_head):
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the request head is above the limit of {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        body = HTTPError(status, message, "invalid_request_error").body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()

    def _end_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
