"""Time as an object, so that tests and the simulator can hold it in their hands.

Owns: the two readings everything else uses. Knows nothing of who waits. Components that measure or
wait take a ``Clock``; production code passes ``SYSTEM_CLOCK``.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings, both in seconds."""

    def monotonic(self) -> float:
        """Seconds that never go back; for durations and deadlines within one process."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for time stamps that cross a process or reach a user."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told; ships for tests and simulation."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock does not go back: advance({seconds})")
        self._now_s += seconds


SYSTEM_CLOCK: Clock = SystemClock()


class Laps:
    """Names for the stretches of time from a beginning (monotonic seconds), one after the other."""

    def __init__(self, began: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._last = began
        self._clock = clock
        self.laps: list[tuple[str, float]] = []  # name, seconds

    def done(self, name: str) -> None:
        """What went on since the last call, or since the beginning, was ``name``."""
        now = self._clock.monotonic()
        self.laps.append((name, now - self._last))
        self._last = now
