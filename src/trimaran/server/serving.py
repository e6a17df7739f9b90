"""uvicorn, set up for one application on one inherited listener.

Owns: socket and connection settings, and the orderly end: new requests get 503 while running ones
finish, then what is left is ended with an error. Signals are the business of main.py.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from trimaran.server.http_protocol import BoundedHttpProtocol
from trimaran.server.state import ServerState

# A client that takes nothing for this long is cut; one that reads slowly is not.
STALLED_CLIENT_MS = 60_000
KEEP_ALIVE_S = 75
CANCEL_AFTER_S = 0.2  # once draining is over


class HTTPServer(uvicorn.Server):
    """Serves until ``stop`` or ``drain``; does not touch signals."""

    def __init__(
        self, app: FastAPI, state: ServerState, on_listening: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CANCEL_AFTER_S,  # type: ignore[arg-type]
            )
        )
        self._state = state
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    async def run_on(self, listener: socket.socket) -> None:
        """Serve on a bound and listening socket until told to stop; then it is closed."""
        set_connection_options(listener)
        await self.serve(sockets=[listener])

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests with 503, let running ones end, then stop."""
        self._state.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._state.admission.wait_idle()
        self.stop()

    def stop(self) -> None:
        """End what runs with an error, and everything else."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def set_connection_options(listener: socket.socket) -> None:
    """Accepted connections inherit these: a vanished or stuck client does not stay for ever."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, STALLED_CLIENT_MS // 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_CLIENT_MS)
