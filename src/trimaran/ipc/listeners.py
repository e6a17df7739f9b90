"""Addresses that are bound before anybody is told of them.

Owns: listening descriptors, for ZMQ and for HTTP. Bound by the process that starts the others and
inherited by the one that serves, so nothing probes a port and binds it later, and a restarted
process keeps its address and its backlog. Called by launch/ and client/.
"""

import socket
from pathlib import Path
from typing import Self

_BACKLOG = 1024


class Listener:
    """A bound, listening descriptor and the ZMQ address by which peers connect to it."""

    def __init__(self, address: str, listening: socket.socket, path: str | None = None) -> None:
        self.address = address
        self._socket = listening
        self._path = path  # of the unix socket, removed by the process that made it

    @classmethod
    def bind_ipc(cls, path: str) -> Self:
        """Listen on a unix socket. Raises OSError: the path cannot be bound."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(path)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        return cls(f"ipc://{path}", listening, path)

    @classmethod
    def bind_tcp(cls, host: str, port: int) -> Self:
        """Listen on ``host``; port 0 lets the kernel choose. Raises OSError: it cannot be bound."""
        listening = bind_tcp(host, port)
        name = f"[{host}]" if ":" in host else host
        return cls(f"tcp://{name}:{listening.getsockname()[1]}", listening)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError: unknown host, or the address cannot be bound."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        # A port in TIME_WAIT after a crash is free to take; one in use is still refused.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
