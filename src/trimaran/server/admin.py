"""Routes that change the deployment; they need the admin key where one is set."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trimaran.messages import ResetPrefixCache
from trimaran.server.state import ServerState

CONTROL_DEADLINE_S = 30.0


class ServingAdmin:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def reset_prefix_cache(self, request: Request) -> Response:
        """{"reset": false} while running requests hold blocks of the cache."""
        llm = self._state.serving_llm()
        done = await llm.control(ResetPrefixCache(), timeout_s=CONTROL_DEADLINE_S)
        # One result per engine.
        return Response(msgspec.json.encode({"reset": all(done)}), media_type="application/json")
