"""What a dying child tells its parent.

Owns: ``ChildFailure``, the one struct that crosses a process outside messages.py (which this
package, being below it, cannot import), and the anonymous file by which it travels: it never
blocks the child, has no capacity to exceed, and is there after any kind of death. Called by
``child`` and by whoever in a child has to do something between an error and the process's end
(``report_failure``), and by ``spawn`` (reads).
"""

import contextlib
import os
import traceback
from dataclasses import dataclass

import msgspec

_MAX_TEXT_CHARS = 16 << 10
_MAX_FILE_BYTES = 1 << 20


class ChildFailure(msgspec.Struct, array_like=True, frozen=True):
    """An exception as text: printed last, by the parent."""

    type_name: str
    message: str
    hint: str | None
    traceback: str

    @property
    def text(self) -> str:
        """``"CheckpointError: tensor x is missing"``; the hint is apart."""
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


def failure_of(error: BaseException) -> ChildFailure:
    """The first cause of an exception, in words."""
    trace = "".join(traceback.format_exception(error))[-_MAX_TEXT_CHARS:]
    return msgspec.structs.replace(_without_traceback(error), traceback=trace)


def _without_traceback(error: BaseException) -> ChildFailure:
    """Needs next to no memory: a traceback reads the sources that it quotes."""
    hint = getattr(error, "hint", None)
    return ChildFailure(
        type_name=type(error).__name__,
        message=str(getattr(error, "message", error))[:_MAX_TEXT_CHARS],
        hint=hint if isinstance(hint, str) else None,
        traceback="",
    )


@dataclass
class _Report:
    """Of this process; a process has one end."""

    descriptor: int = -1  # not a child: nobody to tell
    told: bool = False
    # Given back when there is something to tell: no memory may be the thing to tell.
    reserve: bytearray | None = None


_report = _Report()


def arm_failure_report(descriptor: int) -> None:
    """From now on ``report_failure`` writes here."""
    _report.descriptor, _report.told, _report.reserve = descriptor, False, bytearray(1 << 20)


def report_failure(error: BaseException) -> None:
    """Tell the parent why this process ends. The first call counts: what follows, follows from it.

    Never raises: there is nobody else to tell.
    """
    if _report.descriptor < 0 or _report.told:
        return
    _report.told, _report.reserve = True, None
    # The short forms first: they stay if the memory does not suffice for the longer ones.
    brief = ChildFailure(type(error).__name__, "", None, "")
    with contextlib.suppress(Exception):
        os.pwrite(_report.descriptor, msgspec.msgpack.encode(brief), 0)
        os.pwrite(_report.descriptor, msgspec.msgpack.encode(_without_traceback(error)), 0)
        os.pwrite(_report.descriptor, msgspec.msgpack.encode(failure_of(error)), 0)


def read_failure(descriptor: int) -> ChildFailure | None:
    """None: the child did not get to say anything, or not all of it."""
    data = os.pread(descriptor, _MAX_FILE_BYTES, 0)
    try:
        return msgspec.msgpack.decode(data, type=ChildFailure) if data else None
    except msgspec.DecodeError:
        return None
