"""Ctrl-C, held back for as long as something half made would be lost by it.

Owns: one context manager. KeyboardInterrupt can come between any two instructions of the main
thread, so between "started" and "noted for closing" too. Called by client/, around what starts
processes and threads, which takes milliseconds; never around a wait.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT's handler (which by default raises KeyboardInterrupt) runs at the end of the block.

    Other threads than the main one are never interrupted: there it does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(signal.SIGINT, received[0])
