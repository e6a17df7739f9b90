"""How far an engine's work is, for whoever must tell a hung engine from a busy one.

Owns: what counts as a unit of work (a layer, a piece of the head, a tensor read, a step), whether
there is work, and how long a unit may take. Knows nothing of who reads it. The engine's main thread
calls it; its executor gets ``unit_done`` as a callable.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.ipc.progress_board import EngineCells

# A unit may take this many times the longest one seen, in a batch of the same size.
_PATIENCE = 10.0
# An operation of control may read or write files; within it every unit counts anew.
OPERATION_LIMIT_S = 120.0


class WorkProgress:
    """``cells`` None: nobody watches (an engine in the caller's own process)."""

    def __init__(self, cells: EngineCells | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._cells = cells or EngineCells()
        self._clock = clock
        self._busy = False
        self._in_operation = False
        self._unit_began = clock.monotonic()
        self._longest_s = 0.0
        self._step_tokens = self._most_tokens = 1  # of this step; of any batch so far

    def set_busy(self, busy: bool) -> None:
        """Whether there is work; told before each wait for it."""
        if busy != self._busy:
            self._busy = busy
            self._unit_began = self._clock.monotonic()
            self._cells.set_pending(busy)
            self._set_limit()

    def unit_done(self, num_tokens: int = 0) -> None:
        """Of a batch of ``num_tokens``. Called per layer: a clock reading and a memory write."""
        now = self._clock.monotonic()
        elapsed, self._unit_began = now - self._unit_began, now
        self._cells.unit_done()
        if self._in_operation:
            return  # it says nothing of what a layer takes
        if elapsed > self._longest_s or num_tokens > self._most_tokens:
            self._longest_s = max(self._longest_s, elapsed)
            self._most_tokens = max(self._most_tokens, num_tokens)
            self._set_limit()

    def begin_step(self, num_tokens: int) -> None:
        self._step_tokens = num_tokens
        self._set_limit()

    def end_step(self) -> None:
        self.unit_done(self._step_tokens)
        self._cells.step_done()

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Around what has a limit of its own: operations of control, start and end."""
        self._in_operation = True
        self._cells.set_limit(OPERATION_LIMIT_S)
        try:
            yield
        finally:
            self._in_operation = False
            self._unit_began = self._clock.monotonic()
            self._set_limit()

    def _set_limit(self) -> None:
        growth = max(1.0, self._step_tokens / self._most_tokens)
        # Nothing is under way in an idle engine, so nothing excuses it from taking messages.
        self._cells.set_limit(_PATIENCE * self._longest_s * growth if self._busy else 0.0)
