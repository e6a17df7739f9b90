"""The real application on a real uvicorn and a loopback port, in a thread of its own."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvloop
from fastapi import FastAPI
from tests.unit.server.fake_llm import FakeLLM

from trimaran.config import Config, resolve
from trimaran.messages import DeploymentState
from trimaran.server.app import build_app
from trimaran.server.auth import load_keys
from trimaran.server.serving import HTTPServer
from trimaran.server.state import ServerState

READY = DeploymentState(ready=True, phase="ready", percent=100.0)
DEADLINE_S = 10.0


@dataclass
class Server:
    """A running server and a client for it."""

    url: str
    port: int
    state: ServerState
    llm: FakeLLM
    client: httpx.Client
    http: HTTPServer
    app: FastAPI
    loop: asyncio.AbstractEventLoop
    deployment: list[DeploymentState] = field(default_factory=lambda: [READY])

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        if not isinstance(body, str | bytes):
            body = json.dumps(body)
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.client.post(path, content=body, headers=headers, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream: parsed JSON, or "[DONE]"."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines.pop() == "", "the last event must be complete"
        assert all(line.startswith("data: ") for line in lines)
        payloads = [line.removeprefix("data: ") for line in lines]
        return [p if p == "[DONE]" else json.loads(p) for p in payloads]

    def still_works(self) -> None:
        response = self.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert response.status_code == 200, response.text
        assert self.client.get("/health").status_code == 200
        assert self.llm.num_running == 0

    def drain(self, grace_s: float) -> None:
        asyncio.run_coroutine_threadsafe(self.http.drain(grace_s), self.loop)


@contextmanager
def serving(llm: FakeLLM | None = None, **flags: Any) -> Iterator[Server]:
    """``flags`` are those of ``trimaran serve``."""
    config: Config = resolve(flags, environment={})
    llm = llm or FakeLLM()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    deployment = [READY]
    state = ServerState.create(config, lambda: deployment[0])
    state.llm = llm
    app = build_app(state, load_keys(config.server))
    server = HTTPServer(app, state)
    loop = uvloop.new_event_loop()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.run_on(listener))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
            yield Server(url, port, state, llm, client, server, app, loop, deployment)
    finally:
        server.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not end"
        assert not failures, failures
        assert llm.num_running == 0, "requests are left"
