"""GET /v1/models: the names that requests may use."""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trimaran.server.state import ServerState


class OpenAIServingModels:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._created = int(time.time())

    async def show_available_models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._state.model_names]
        return _json({"object": "list", "data": cards})

    async def show_model(self, request: Request) -> Response:
        """Raises ModelNotFoundError."""
        return _json(self._card(self._state.check_model(request.path_params["model"])))

    def _card(self, name: str) -> dict[str, object]:
        llm = self._state.llm
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "trimaran",
            "root": self._state.model_names[0],
            "parent": None,
            "max_model_len": llm.max_model_len if llm is not None else None,
        }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
