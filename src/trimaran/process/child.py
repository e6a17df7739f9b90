"""The main of every child process: ``python -P -m trimaran.process.child NAME DESCRIPTOR``.

Owns: the order of a child's first and last acts. Imports next to nothing before the death pipe is
armed, so that a child never outlives its parent, not even while it loads a model. Knows nothing of
what it runs: the entry point and the type of its settings are named in the bootstrap.
"""

import faulthandler
import os
import signal
import sys
from importlib import import_module
from operator import attrgetter
from typing import Any

import msgspec

from trimaran.process.death_pipe import die_with_parent
from trimaran.process.failure import arm_failure_report, report_failure
from trimaran.process.stacks import answer_sigusr1

_MAX_BOOTSTRAP_BYTES = 16 << 20


class Bootstrap(msgspec.Struct, array_like=True):
    """What the parent wrote into the descriptor named on the command line."""

    entry: str  # "module:function", called with the decoded spec
    spec_type: str  # "module:Class"
    spec: bytes
    death_fd: int
    failure_fd: int
    stacks_fd: int


def resolve(reference: str) -> Any:
    """The object that ``"module:name.of.it"`` names."""
    module, _, name = reference.partition(":")
    return attrgetter(name)(import_module(module))


def _read_bootstrap(descriptor: int) -> Bootstrap:
    data = os.pread(descriptor, _MAX_BOOTSTRAP_BYTES, 0)
    os.close(descriptor)
    return msgspec.msgpack.decode(data, type=Bootstrap)


def main() -> None:
    # The terminal's Ctrl-C is the parent's business; it ends its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bootstrap = _read_bootstrap(int(sys.argv[2]))
    die_with_parent(bootstrap.death_fd)
    answer_sigusr1(bootstrap.stacks_fd)
    for descriptor in (bootstrap.death_fd, bootstrap.failure_fd, bootstrap.stacks_fd):
        os.set_inheritable(descriptor, False)
    # Of the thread that crashed only: to walk the stacks of running ones can crash again, and then
    # the parent hears of another signal than the first.
    faulthandler.enable(all_threads=False)
    arm_failure_report(bootstrap.failure_fd)
    try:
        entry = resolve(bootstrap.entry)
        spec = msgspec.msgpack.decode(bootstrap.spec, type=resolve(bootstrap.spec_type))
        entry(spec)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  the main of a process: its parent is told
        report_failure(error)
        # Straight out: no destructor or thread of a broken process may delay or hide the cause.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
