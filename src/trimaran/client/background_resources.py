"""Everything a client started, and how it ends, however the client ends.

Owns: the order (last in, first out) and that it happens once: on failure, on close, on garbage
collection and at exit. Holds no reference to the client, so it never keeps one alive. Called by the
clients, by ``weakref.finalize`` and at exit.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundResources:
    def __init__(self) -> None:
        self._stack: list[tuple[str, Callable[[], object]]] = []
        # Who closes second waits until the first has closed all, unless it is the same thread
        # (a signal handler that closes what is being closed).
        self._lock = threading.RLock()
        self._closing = False
        self._pid = os.getpid()
        # The finalizer's own turn at exit may come behind pyzmq's, which frees the memory of
        # messages under way: ZMQ would still send them (see ipc/sockets.py).
        atexit.register(self)

    def push(self, name: str, close: Callable[[], object]) -> None:
        """Register how to end a resource; it must not refer to the client."""
        self._stack.append((name, close))

    def __call__(self) -> None:
        """End all of them; what fails to end is logged and does not stop the rest.

        A Ctrl-C meanwhile does not stop the rest either; it is raised at the end.
        """
        if os.getpid() != self._pid:
            return  # a fork of the owner, which has copies of all this and owns none of it
        atexit.unregister(self)
        interrupt: BaseException | None = None
        with self._lock:
            if self._closing:
                return
            self._closing = True
            while self._stack:
                name, close = self._stack.pop()
                try:
                    close()
                except Exception:
                    logger.exception("could not close %s", name)
                except BaseException as error:  # noqa: BLE001  raised below
                    interrupt = error
            self._closing = False
        if interrupt is not None:
            raise interrupt
