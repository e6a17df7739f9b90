"""The application: every route, who may call it, and what lies around it.

Owns: ``build_app``. From the outside in: CORS, the error boundary (ids and error shape), the key
guard, routes. All are plain ASGI, so that a stream passes through them by function calls alone.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from trimaran import __version__
from trimaran.errors import InvalidRequestError
from trimaran.ids import external_id
from trimaran.server.admin import ServingAdmin
from trimaran.server.auth import Access, KeyGuard, KeyRing
from trimaran.server.errors import (
    ErrorBoundary,
    answer_http_exception,
    describe,
    error_response,
)
from trimaran.server.health import ServingHealth
from trimaran.server.openai.chat import OpenAIServingChat
from trimaran.server.openai.completions import OpenAIServingCompletion
from trimaran.server.openai.generation import to_json
from trimaran.server.openai.models import OpenAIServingModels
from trimaran.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from trimaran.server.request_book import ServingRequests
from trimaran.server.state import ServerState
from trimaran.server.tokenize import ServingTokenization

Endpoint = Callable[[Request], Awaitable[Response]]
SCHEMA_PLACE = "#/components/schemas/{model}"


def build_app(state: ServerState, keys: KeyRing) -> FastAPI:
    """The whole HTTP side of one API server."""
    app = FastAPI(
        title="trimaran",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, answer_http_exception)
    routes = _Routes(app)
    _add_routes(routes, state)
    # Added from the inside out.
    app.add_middleware(KeyGuard, keys=keys, router=app.router, levels=routes.levels)
    app.add_middleware(ErrorBoundary, book=state.requests)
    if origins := state.config.server.allowed_origins:
        app.add_middleware(
            _Cors,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


class _Cors(CORSMiddleware):
    """A refused preflight has the one error shape too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        reason = InvalidRequestError(bytes(response.body).decode())
        refusal = error_response(describe(reason, external_id("req")))
        refusal.headers["vary"] = response.headers.get("vary", "Origin")
        return refusal


class _Routes:
    """Adds routes to an application and keeps who may call them."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._bodies: list[type[BaseModel]] = []
        self.levels: dict[int, Access] = {}

    def add(
        self,
        path: str,
        endpoint: Endpoint,
        method: str = "GET",
        *,
        access: Access = Access.KEY,
        body: type[BaseModel] | None = None,
    ) -> None:
        """``body`` is only described here; the endpoint reads it."""
        extra: dict[str, Any] = {}
        if body is not None:
            self._bodies.append(body)
            schema = {"$ref": SCHEMA_PLACE.format(model=body.__name__)}
            content = {"application/json": {"schema": schema}}
            extra = {"requestBody": {"required": True, "content": content}}
        self._app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            openapi_extra=extra,
            include_in_schema=method != "HEAD",
        )
        self.levels[id(self._app.router.routes[-1])] = access

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json"""
        schema = dict(self._app.openapi())
        _, bodies = models_json_schema(
            [(body, "validation") for body in dict.fromkeys(self._bodies)],
            ref_template=SCHEMA_PLACE,
        )
        schema["components"] = {"schemas": bodies["$defs"]}
        return Response(to_json(schema), media_type="application/json")


def _add_routes(routes: _Routes, state: ServerState) -> None:
    health, models = ServingHealth(state), OpenAIServingModels(state)
    completion, chat = OpenAIServingCompletion(state), OpenAIServingChat(state)
    tokenization, admin = ServingTokenization(state), ServingAdmin(state)
    requests = ServingRequests(state.requests)
    add = routes.add
    for prefix in ("/v1", ""):
        add(f"{prefix}/completions", completion.create_completion, "POST", body=CompletionRequest)
        add(
            f"{prefix}/chat/completions",
            chat.create_chat_completion,
            "POST",
            body=ChatCompletionRequest,
        )
    add("/v1/models", models.show_available_models)
    add("/v1/models/{model:path}", models.show_model)
    add("/tokenize", tokenization.tokenize, "POST", body=TokenizeRequest)
    add("/detokenize", tokenization.detokenize, "POST", body=DetokenizeRequest)
    for method in ("GET", "HEAD"):
        add("/health", health.health, method, access=Access.OPEN)
        add("/ready", health.ready, method, access=Access.OPEN)
    add("/version", health.version)
    add("/metrics", health.metrics)
    add("/reset_prefix_cache", admin.reset_prefix_cache, "POST", access=Access.ADMIN)
    add("/requests", requests.list_requests, access=Access.ADMIN)
    add("/requests/{request_id:path}", requests.show_request, access=Access.ADMIN)
    add("/sleep", admin.sleep, "POST", access=Access.ADMIN)
    add("/wake_up", admin.wake_up, "POST", access=Access.ADMIN)
    add("/is_sleeping", admin.is_sleeping, access=Access.ADMIN)
    add("/start_profile", admin.start_profile, "POST", access=Access.ADMIN)
    add("/stop_profile", admin.stop_profile, "POST", access=Access.ADMIN)
    add("/openapi.json", routes.openapi)
