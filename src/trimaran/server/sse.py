"""Server-sent events: the way tokens leave the server.

Owns: the streamed response, what a failed stream looks like, and the notice that a client is gone.
Does not know what the events say: openai/ hands over bytes, one item per engine step. This is the
hot path: 256 streams give some 17,000 events a second, so an event is one ``send`` and no more.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimaran.errors import UnavailableError
from trimaran.server.errors import STOPPED, ClientGoneError, describe_to

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def cancelled_when_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body of this block when the client disconnects; then raise ClientGoneError.

    The request body must have been read. A cancellation from elsewhere passes through.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("needs a running task")
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


class EventStream(Response):
    """Streams events; ``events`` is closed whatever happens, which aborts its request.

    The answer starts with the first event, so that what fails before it is an ordinary error
    with its own status. What fails later becomes an error event, and [DONE] never comes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events, cancelled_when_gone(receive):
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                last = b""
            except asyncio.CancelledError:
                # The server is stopped, or the client is gone; then nobody sees the event. The
                # task ends in both cases, so the cancellation need not travel further.
                last = _error_event(UnavailableError(STOPPED), scope)
            except Exception as error:  # noqa: BLE001 -- the HTTP boundary
                last = _error_event(error, scope)
            await send(_last(last))


def _error_event(error: Exception, scope: Scope) -> bytes:
    return b"data: " + describe_to(scope, error).body() + b"\n\n"


def _last(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": False}


async def merge(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the stream, item) as they come; the first failure ends all.

    One stream, the usual case, is passed through without a task of its own.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()
    # One place per stream: a slow reader makes the producers wait, and they merge what comes.
    places = asyncio.Semaphore(len(streams))

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await places.acquire()
                queue.put_nowait((index, item))

    async def pump_all() -> None:
        async with asyncio.TaskGroup() as group:
            for index, stream in enumerate(streams):
                group.create_task(pump(index, stream))

    pumps = asyncio.create_task(pump_all())
    pumps.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (entry := await queue.get()) is not None:
            places.release()
            yield entry
        try:
            await pumps
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    finally:
        pumps.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await pumps
