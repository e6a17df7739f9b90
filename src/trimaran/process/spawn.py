"""Starting, watching and ending child processes.

Owns: ``spawn`` and ``Child``. A child is a fresh interpreter (nothing is forked, nothing pickled):
its settings are a struct in an anonymous file that it inherits. Knows nothing of what the children
do. Called by launch/.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from trimaran.process.child import Bootstrap
from trimaran.process.environment import child_environment
from trimaran.process.failure import ChildFailure, read_failure
from trimaran.process.stacks import StackFile, sigusr1_blocked

# Write ends of all death pipes: a fork of this process must not keep children alive after it.
_death_fds: set[int] = set()
# After SIGKILL only an uninterruptible wait in the kernel can delay a process.
_KILL_DEADLINE_S = 5.0


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended."""

    return_code: int  # negative: minus the signal
    failure: ChildFailure | None
    fenced: str | None = None  # why we killed it

    @property
    def text(self) -> str:
        """The first cause in one line."""
        if self.failure is not None:
            return self.failure.text
        if self.fenced is not None:
            return self.fenced
        if self.return_code >= 0:
            return f"it exited with code {self.return_code}"
        return f"it was ended by {signal.Signals(-self.return_code).name}"

    @property
    def hint(self) -> str | None:
        if self.failure is not None:
            return self.failure.hint
        if self.fenced is not None:
            return None
        if self.return_code == -signal.SIGKILL:
            return "if nobody killed it, the system was out of memory: see the kernel's log"
        return None

    @property
    def explained(self) -> str:
        """The first cause, with what to do about it."""
        return f"{self.text} ({self.hint})" if self.hint else self.text


class Child:
    """One child process; its descriptor is readable once it has ended."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        *,
        pidfd: int,
        death: int,
        failure: int,
        stacks: StackFile,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._pidfd = pidfd
        self._death_fd = death  # the write end: closing it is the end of the child
        self._failure_fd = failure
        self.stacks = stacks
        self._fenced: str | None = None
        _death_fds.add(death)

    def fileno(self) -> int:
        return self._pidfd

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within ``timeout_s`` seconds."""
        return not _wait_all([self], timeout_s)

    def terminate(self) -> None:
        """Ask it to end in order (SIGTERM)."""
        if self.alive:
            self._process.terminate()

    def kill(self) -> None:
        if self.alive:
            self._process.kill()

    def fence(self, reason: str) -> None:
        """Kill it, whatever it does or does not do; ``reason`` is then how it ended."""
        self._fenced = reason
        self.kill()

    def ask_stacks(self) -> None:
        """Have it write where each of its threads is; ``stacks`` has the answer soon."""
        if self.alive:
            self._process.send_signal(signal.SIGUSR1)

    def end(self) -> ChildEnd:
        """How it ended; only for one that has."""
        return_code = self._process.wait(_KILL_DEADLINE_S)
        return ChildEnd(return_code, read_failure(self._failure_fd), self._fenced)

    def close(self) -> None:
        """Kill what is still alive, reap it, and give back the descriptors. Idempotent."""
        if self._pidfd < 0:
            return
        self.kill()
        self._process.wait(_KILL_DEADLINE_S)
        _death_fds.discard(self._death_fd)
        for descriptor in (self._pidfd, self._death_fd, self._failure_fd):
            os.close(descriptor)
        self.stacks.close()
        self._pidfd = -1


def _close_death_fds() -> None:
    while _death_fds:
        os.close(_death_fds.pop())


os.register_at_fork(after_in_child=_close_death_fds)


def spawn(
    entry: str,
    spec: msgspec.Struct,
    *,
    name: str,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start ``entry`` ("module:function") in a new process with ``spec`` as its argument.

    Descriptors in ``pass_fds`` keep their numbers, so a spec may name them. ``env`` is added to the
    child's environment. Raises OSError: no process can be started.
    """
    with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
        death_read, death_write = os.pipe()
        given.callback(os.close, death_read)
        # If anything fails from here on, this ends the child, and what follows reaps it.
        kept.callback(os.close, death_write)
        failure = os.memfd_create("trimaran-failure")
        kept.callback(os.close, failure)
        stacks = StackFile()
        kept.callback(stacks.close)
        bootstrap = os.memfd_create("trimaran-bootstrap")
        given.callback(os.close, bootstrap)
        settings = Bootstrap(
            entry=entry,
            spec_type=f"{type(spec).__module__}:{type(spec).__qualname__}",
            spec=msgspec.msgpack.encode(spec),
            death_fd=death_read,
            failure_fd=failure,
            stacks_fd=stacks.descriptor,
        )
        os.write(bootstrap, msgspec.msgpack.encode(settings))
        with sigusr1_blocked():
            process = subprocess.Popen(
                # -P: a file in the working folder must not pose as a module.
                [sys.executable, "-P", "-m", "trimaran.process.child", name, str(bootstrap)],
                stdin=subprocess.DEVNULL,
                pass_fds=(death_read, failure, bootstrap, stacks.descriptor, *pass_fds),
                env=child_environment(env),
                # Out of the terminal's foreground group, so Ctrl-C reaches only the parent, even
                # before the child gets to ignore it.
                process_group=0,
            )
        kept.callback(_kill, process)
        pidfd = os.pidfd_open(process.pid)
        kept.pop_all()
    return Child(name, process, pidfd=pidfd, death=death_write, failure=failure, stacks=stacks)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(_KILL_DEADLINE_S)


def end_children(children: Sequence[Child], grace_s: float) -> None:
    """SIGTERM to all, SIGKILL to those alive after ``grace_s`` seconds; all are reaped.

    Ctrl-C in between cuts the grace short and is raised then.
    """
    with contextlib.ExitStack() as closers:
        for child in children:
            closers.callback(child.close)
        for child in children:
            child.terminate()
        _wait_all(children, grace_s)


def _wait_all(children: Sequence[Child], timeout_s: float) -> list[Child]:
    """Wait for their ends; returns those still alive after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    alive = [child for child in children if child.alive]
    while alive:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        poll = select.poll()
        for child in alive:
            poll.register(child, select.POLLIN)
        poll.poll(remaining_s * 1000)
        alive = [child for child in alive if child.alive]
    return alive
