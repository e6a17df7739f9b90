"""The start-up as a table: which process did what, when, and for how long.

Owns: the layout, as text and as an object for JSON logs. Pure: knows nothing of who measured.
Called by ``supervisor`` and ``core_engines``.

    supervisor  starting    0.24 s   15 %  ━━━━━
    api-0       importing   0.61 s   38 %       ━━━━━━━━━━━━
                listening   0.02 s    1 %                   ╸
    engine-0    process     0.33 s   20 %       ━━━━━━
                …
    total                   1.62 s
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BAR_WIDTH = 32


class ProcessStart(NamedTuple):
    """The phases of one process, one after the other."""

    name: str
    began_s: float  # after the start of the whole
    phases: Sequence[tuple[str, float]]  # name, seconds


def start_table(starts: Iterable[ProcessStart], total_s: float) -> str:
    """One line per phase; a bar shows when in the whole it was."""
    rows = []
    for start in starts:
        at, process = start.began_s, start.name
        for phase, seconds in start.phases:
            rows.append((process, phase, seconds, at))
            at, process = at + seconds, ""
    first = max((len(row[0]) for row in rows), default=0)
    second = max((len(row[1]) for row in rows), default=0)
    lines = [
        f"  {process:<{first}}  {phase:<{second}}  {seconds:6.2f} s"
        f"  {100 * seconds / total_s:3.0f} %  {_bar(at / total_s, seconds / total_s)}"
        for process, phase, seconds, at in rows
    ]
    return "\n".join([*lines, f"  {'total':<{first + 2 + second}}  {total_s:6.2f} s"])


def _bar(at: float, share: float) -> str:
    begin = min(round(max(at, 0.0) * _BAR_WIDTH), _BAR_WIDTH - 1)
    length = min(round(share * _BAR_WIDTH), _BAR_WIDTH - begin)
    return " " * begin + ("━" * length or "╸")


def log_start(
    logger: logging.Logger, message: str, starts: Sequence[ProcessStart], total_s: float
) -> None:
    """One record: ``message``, with the table below it, or as ``phases`` in JSON."""
    phases: dict[str, object] = {
        start.name: {phase: round(seconds, 3) for phase, seconds in start.phases}
        for start in starts
    }
    phases["total"] = round(total_s, 3)
    block = start_table(starts, total_s)
    logger.info(message, extra={"fields": {"phases": phases}, "block": block})
