"""Engines that hang: alive, with work pending and no progress. Told from slow ones, and ended.

Owns: the judgement (``HangWatch``, without processes or memory) and what follows from it
(``EngineFence``). Gone engines are somebody else's: their process descriptors say so. Called by
``core_engines``. See docs/decisions/003-gone-hung-slow.md.
"""

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from trimaran.clock import Clock
from trimaran.ipc.progress_board import EngineReading, ProgressBoard
from trimaran.launch.processes import CoreEngineProcManager, EngineId, log_stacks

logger = logging.getLogger(__name__)

# Looks come twice a second or more often. Whoever looks this much later was suspended or starved,
# and so, perhaps, was everybody else.
LATE_S = 4.0
# Between the question for its stacks and the end of an engine.
STACKS_WAIT_S = 0.5


class _Standstill(NamedTuple):
    """Work was pending and nothing moved at every look since."""

    progress: int
    since: float


class HangWatch:
    """Judges readings; ``timeout_s`` is the least time without progress that means anything."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_at = clock.monotonic()
        self._standstills: dict[tuple[EngineId, str], _Standstill] = {}

    def look(self, readings: Mapping[EngineId, EngineReading]) -> dict[EngineId, str]:
        """The hung ones of these engines, each with the reason in words."""
        now = self._clock.monotonic()
        was_late, self._looked_at = now - self._looked_at > LATE_S, now
        before = {} if was_late else self._standstills
        self._standstills = {}
        hung: dict[EngineId, str] = {}
        for engine, reading in readings.items():
            for text, activity in (
                ("no progress for {:.3g} s with work pending", reading.computing),
                ("it has taken no message for {:.3g} s", reading.receiving),
            ):
                if not activity.pending:
                    continue
                known = before.get((engine, text))
                if known is None or known.progress != activity.progress:
                    known = _Standstill(activity.progress, now)
                self._standstills[engine, text] = known
                seconds = now - known.since
                if seconds >= max(self._timeout_s, activity.limit_s) and engine not in hung:
                    hung[engine] = f"hung: {text.format(seconds)} (step {reading.steps})"
        return hung


class EngineFence:
    """Asks hung engines for their stacks and then kills them, which makes them gone."""

    def __init__(
        self, board: ProgressBoard, manager: CoreEngineProcManager, timeout_s: float, clock: Clock
    ) -> None:
        self._board = board
        self._manager = manager
        self._clock = clock
        self._watch = HangWatch(timeout_s, clock)
        self._asked_at: dict[EngineId, float] = {}

    def tick(self, ready_ranks: Collection[int]) -> None:
        """Look once. Nothing is judged that is not ready: what starts has a deadline of its own."""
        watched = {
            engine: child
            for child, engine in self._manager.engines.items()
            if engine.rank in ready_ranks and child.alive
        }
        hung = self._watch.look({engine: self._board.read(*engine) for engine in watched})
        now = self._clock.monotonic()
        self._asked_at = {engine: self._asked_at.get(engine, now) for engine in hung}
        for engine, reason in hung.items():
            child = watched[engine]
            if self._asked_at[engine] == now:
                logger.error("%s %s: asking for its stacks, then it is ended", child.name, reason)
                child.ask_stacks()
            elif now - self._asked_at[engine] >= STACKS_WAIT_S:
                log_stacks(child, at_once=True)
                child.fence(reason)
