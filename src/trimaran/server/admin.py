"""Routes that change the deployment; they need the admin key where one is set."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trimaran.errors import InvalidRequestError
from trimaran.messages import ResetPrefixCache
from trimaran.server.state import ServerState

CONTROL_DEADLINE_S = 30.0


class ServingAdmin:
    """The routes. Where there are several engines, all of them do it."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def reset_prefix_cache(self, request: Request) -> Response:
        """{"reset": false} while running requests hold blocks of the cache."""
        llm = self._state.serving_llm()
        done = await llm.control(ResetPrefixCache(), timeout_s=CONTROL_DEADLINE_S)
        return _json({"reset": all(done)})

    async def sleep(self, request: Request) -> Response:
        """?level=0|1|2&mode=wait|abort; answers once asleep. Requests sent meanwhile wait."""
        asked = request.query_params.get("level", "1")
        # What is no level or mode is refused where the operation is made.
        level: Any = int(asked) if asked in ("0", "1", "2") else asked
        mode: Any = request.query_params.get("mode", "abort")
        await self._state.serving_llm().sleep(level, mode)
        return _json({"is_sleeping": True})

    async def wake_up(self, request: Request) -> Response:
        """Answers once awake; weights may have to be read again."""
        if "tags" in request.query_params:
            raise InvalidRequestError("parts cannot be woken up by themselves", param="tags")
        await self._state.serving_llm().wake_up()
        return _json({"is_sleeping": False})

    async def is_sleeping(self, request: Request) -> Response:
        return _json({"is_sleeping": await self._state.serving_llm().is_sleeping()})

    async def start_profile(self, request: Request) -> Response:
        """Needs --profile-dir; 409 without it, and while a recording is under way."""
        return _json({"files": await self._state.serving_llm().start_profile()})

    async def stop_profile(self, request: Request) -> Response:
        """The files: Chrome traces, one per engine."""
        return _json({"files": await self._state.serving_llm().stop_profile()})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
