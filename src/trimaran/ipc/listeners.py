"""Addresses that are bound before anybody is told of them.

Owns: listening descriptors, for ZMQ and for HTTP. Bound by the process that starts the others and
inherited by the one that serves, so nothing probes a port and binds it later, and a restarted
process keeps its address and its backlog. Called by launch/ and client/.

A local listener has no name in the file system for longer than it takes to bind it: whoever is to
connect inherits a descriptor of the socket's file, and /proc/self/fd/N is the path to it. So only
children can connect, a path is never too long, and nothing is left of a process that was killed.
"""

import contextlib
import os
import shutil
import socket
import tempfile
from typing import Self

_BACKLOG = 1024


class Listener:
    """A bound, listening descriptor and the ZMQ address by which peers connect to it."""

    def __init__(
        self, address: str, listening: socket.socket, peer_fds: tuple[int, ...] = ()
    ) -> None:
        self.address = address
        # What a process on this host has to inherit, under this number, to reach ``address``.
        self.peer_fds = peer_fds
        self._socket = listening

    @classmethod
    def bind_ipc(cls) -> Self:
        """Listen on a unix socket. Raises OSError: no folder for temporary files takes one."""
        with contextlib.ExitStack() as passing, contextlib.ExitStack() as kept:
            folder = tempfile.mkdtemp(prefix="trimaran-")  # which only this user can enter
            passing.callback(shutil.rmtree, folder, ignore_errors=True)
            # By its descriptor: a socket's path has at most 107 bytes.
            folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            passing.callback(os.close, folder_fd)
            listening = kept.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(f"/proc/self/fd/{folder_fd}/s")
            listening.listen(_BACKLOG)
            peer_fd = os.open("s", os.O_PATH, dir_fd=folder_fd)
            kept.pop_all()
        return cls(f"ipc:///proc/self/fd/{peer_fd}", listening, (peer_fd,))

    @classmethod
    def bind_tcp(cls, host: str, port: int) -> Self:
        """Listen on ``host``; port 0 lets the kernel choose. Raises OSError: it cannot be bound."""
        listening = bind_tcp(host, port)
        name = f"[{host}]" if ":" in host else host
        return cls(f"tcp://{name}:{listening.getsockname()[1]}", listening)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        for descriptor in self.peer_fds:
            os.close(descriptor)
        self.peer_fds = ()


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
