"""A child's end, bound to its parent's by the kernel.

Owns: the pipe whose write end only the parent holds. When the parent is gone, however it went, the
kernel signals SIGKILL to the owner of the read end: no thread of the child has to run for it, so it
ends a child that is busy in C or in pure Python alike. Called by ``child``, before anything else.
"""

import fcntl
import os
import select
import signal


def die_with_parent(descriptor: int) -> None:
    """Arm the read end of a death pipe. Kills this process if the parent is gone already."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    # The parent may have died before the pipe was armed; that end sends no signal any more.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if poll.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)
