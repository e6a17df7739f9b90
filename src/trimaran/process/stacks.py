"""The stacks of a process, asked for with SIGUSR1.

Owns: the anonymous file into which a process writes where each of its threads is. The signal's
handler does it, not a thread: a process that is busy in C or in pure Python, or deadlocked, answers
too (a stopped one does not). Called by ``child`` (answers), ``spawn`` and the supervisor (read).
"""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_SETFL, fcntl

_MAX_BYTES = 1 << 20


class StackFile:
    """What a process has answered. Raises OSError: no descriptor is left."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("trimaran-stacks")
        # Of the open file, so it holds for the child too: what is written goes to the end, wherever
        # that is by now.
        fcntl(self.descriptor, F_SETFL, os.O_APPEND)
        self._seen_bytes = 0

    def take(self, *, at_once: bool = False) -> str:
        """What is new, once no more comes: nothing was added since the last look (``at_once``:
        whatever is there)."""
        size = os.fstat(self.descriptor).st_size
        growing, self._seen_bytes = size != self._seen_bytes, size
        if size == 0 or (growing and not at_once and size < _MAX_BYTES):
            return ""
        text = os.pread(self.descriptor, _MAX_BYTES, 0).decode("utf-8", "replace")
        os.ftruncate(self.descriptor, 0)
        self._seen_bytes = 0
        return text.rstrip()

    def close(self) -> None:
        os.close(self.descriptor)


def answer_sigusr1(descriptor: int, *, chain: bool = False) -> None:
    """From now on SIGUSR1 writes all threads' stacks there; ``chain``: then do as before it."""
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=chain)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@contextmanager
def sigusr1_blocked() -> Iterator[None]:
    """For starting a child: it inherits this, so a signal waits until the child can answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
