"""GET /health, /ready, /version and /metrics."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trimaran import __version__
from trimaran.server.state import ServerState


class ServingHealth:
    """The routes. /health and /ready never need a key and never wait for an engine."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """200 while the deployment serves or can recover, 503 once it has given up."""
        failed = self._state.has_given_up
        return _json({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def ready(self, request: Request) -> Response:
        """200 when requests are worked on; answers from the first second of the start-up."""
        ready = self._state.is_ready and self._state.sleep_phase is None
        phase, percent = self._state.progress()
        answer = {"ready": ready, "phase": phase, "percent": round(percent, 1)}
        return _json(answer, 200 if ready else 503)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__}, 200)

    async def metrics(self, request: Request) -> Response:
        content, content_type = self._state.metrics.render()
        return Response(content, media_type=content_type)


def _json(value: object, status: int) -> Response:
    headers = {"cache-control": "no-store"}
    if status == 503:
        headers["retry-after"] = "1"
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )
