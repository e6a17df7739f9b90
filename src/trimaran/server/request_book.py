"""The HTTP requests of one API server: those that run, the last that ended, a log line for each.

Owns: ``RequestRecord`` (one request on its way), ``RequestBook`` (the records, bounded) and the
routes GET /requests. Knows ids, routes, counts and times; never a prompt or a text. Filled by the
error boundary (begin, end) and by openai/ (what generates).
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from trimaran.client.outputs import RequestTimeline
from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.errors import NotFoundError

logger = logging.getLogger(__name__)

MAX_SHOWN = 256  # of GET /requests; the oldest, which are those that hang if any do
MAX_FINISHED = 256
# Asked again and again by machines: no lines of theirs.
_UNLOGGED_ROUTES = ("/health", "/ready", "/metrics")
_KEY = "trimaran.request"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, from the first byte of its head to the last of its answer."""

    request_id: str
    method: str
    received: float  # wall seconds
    route: str = ""  # as registered; "" where none matches
    status: int = 0  # of the answer, 0 before it begins
    error: str | None = None  # what the client was told
    ended: float = 0.0  # wall seconds, 0 while it runs
    timelines: list[RequestTimeline] = field(default_factory=list)  # one per prompt

    @property
    def timeline(self) -> RequestTimeline:
        """Of all its prompts together; for a request that generates."""
        return RequestTimeline.merged(self.timelines)

    def summary(self, now: float) -> dict[str, Any]:
        """Where it stands, for JSON."""
        timeline = self.timeline
        return {
            "id": self.request_id,
            "route": self.route,
            "state": self._state(timeline),
            "age_s": round((self.ended or now) - self.received, 3),
            "prompt_tokens": timeline.num_prompt_tokens,
            "output_tokens": timeline.num_output_tokens,
            "last_event": timeline.last_event,
        }

    def details(self, now: float) -> dict[str, Any]:
        """All that is known of it, for JSON."""
        return {
            **self.summary(now),
            "status": self.status or None,
            "error": self.error,
            "timeline": self.timeline.as_dict(),
        }

    def _state(self, timeline: RequestTimeline) -> str:
        if self.ended:
            return "ended"
        if timeline.finished:
            return "answering"  # the client has not taken all of it
        if timeline.first_token_received:
            return "generating"
        return "waiting" if timeline.submitted else "preparing"


class RequestBook:
    """Lives on the event loop of one API server."""

    def __init__(self, *, log_requests: bool = False, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log_requests = log_requests
        self._clock = clock
        # By identity, in order of arrival: clients choose ids, and may choose one twice.
        self._running: dict[int, RequestRecord] = {}
        self._finished: deque[RequestRecord] = deque(maxlen=MAX_FINISHED)

    def begin(self, scope: Scope, request_id: str) -> RequestRecord:
        """A request came in: its record, found by ``record_of`` from now on."""
        record = RequestRecord(request_id, scope["method"], self._clock.wall())
        scope[_KEY] = record
        return record

    def track(self, request: Request) -> RequestRecord:
        """It is to generate: from now on it is found here."""
        record = record_of(request.scope)
        record.route = _route_of(request.scope)
        record.timelines = [RequestTimeline(record.received)]
        self._running[id(record)] = record
        return record

    def tokenised(self, record: RequestRecord, num_prompts: int) -> list[RequestTimeline]:
        """The timelines of its prompts, for ``AsyncLLM.generate`` to go on with."""
        now = self._clock.wall()
        record.timelines = [RequestTimeline(record.received, now) for _ in range(num_prompts)]
        return record.timelines

    def end(self, scope: Scope) -> None:
        """The answer is complete, or broken off."""
        record = record_of(scope)
        record.route, record.ended = _route_of(scope), self._clock.wall()
        if self._running.pop(id(record), None) is not None:
            self._finished.append(record)
        if self._log_requests and record.route not in _UNLOGGED_ROUTES:
            _log(record)

    def running(self) -> dict[str, Any]:
        """How many run, and the oldest of them, for JSON."""
        now = self._clock.wall()
        shown = islice(self._running.values(), MAX_SHOWN)
        return {
            "num_running": len(self._running),
            "requests": [record.summary(now) for record in shown],
        }

    def details(self, request_id: str) -> dict[str, Any]:
        """Of the latest request with this id that runs, else that ended, for JSON.

        Raises NotFoundError: none runs, nor is among the last that ended.
        """
        for record in self._newest_first():
            if record.request_id == request_id:
                return record.details(self._clock.wall())
        raise NotFoundError(
            f"no request of this id runs or is among the last {MAX_FINISHED} that ended here"
        )

    def _newest_first(self) -> Iterator[RequestRecord]:
        yield from reversed(self._running.values())
        yield from reversed(self._finished)


def record_of(scope: Scope) -> RequestRecord:
    """Of a request that the error boundary let in."""
    record: RequestRecord = scope[_KEY]
    return record


def _route_of(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", ""))


def _log(record: RequestRecord) -> None:
    fields: dict[str, Any] = {
        "route": f"{record.method} {record.route or '(none)'}",
        "status": record.status or None,
        "duration_ms": round((record.ended - record.received) * 1000, 3),
        "error": record.error,
    }
    parts = [f"request {record.request_id}: {fields['route']} {record.status or 'unanswered'}"]
    if record.timelines:
        timeline = record.timeline
        described = timeline.as_dict()
        fields["timeline"] = described
        times = [
            f"{name.removesuffix('_ms')} {value:.1f}"
            for name, value in described.items()
            if name.endswith("_ms") and value is not None
        ]
        parts += [
            timeline.finish_reason or "unfinished",
            f"tokens: prompt {timeline.num_prompt_tokens}, cached {timeline.num_cached_tokens},"
            f" output {timeline.num_output_tokens}, preemptions {timeline.num_preemptions}",
            f"ms: {', '.join(times)}, ended {fields['duration_ms']:.1f}",
        ]
    else:
        parts.append(f"{fields['duration_ms']:.1f} ms")
    if record.error is not None:
        parts.append(f"error {record.error!r}")  # on one line, whatever is in it
    logger.info("; ".join(parts), extra={"request_id": record.request_id, "fields": fields})


class ServingRequests:
    """The routes."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book

    async def list_requests(self, request: Request) -> Response:
        """GET /requests"""
        return _json(self._book.running())

    async def show_request(self, request: Request) -> Response:
        """GET /requests/{id}"""
        return _json(self._book.details(request.path_params["request_id"]))


def _json(value: object) -> Response:
    return Response(
        msgspec.json.encode(value),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )
