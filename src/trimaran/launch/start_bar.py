"""The progress bar of a start, on terminals.

Owns: one line on stderr. Knows nothing of what is loading. The cursor is left at the line's start,
so whatever else is logged meanwhile, also by children, writes over the bar and stays readable.
Called by ``supervisor`` and ``core_engines``.
"""

import sys
from typing import TextIO

from trimaran.clock import SYSTEM_CLOCK, Clock

_WIDTH = 24
_MIN_INTERVAL_S = 0.05


class StartBar:
    """``update`` as often as one likes; ``close`` leaves no trace."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        enabled: bool = True,
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = clock.monotonic()
        self._shown_at = float("-inf")
        self._on = enabled and self._stream.isatty()

    def update(self, phase: str, percent: float, detail: str = "") -> None:
        """``detail`` such as "120 of 235 MiB"."""
        now = self._clock.monotonic()
        if not self._on or now - self._shown_at < _MIN_INTERVAL_S:
            return
        self._shown_at = now
        done = round(_WIDTH * min(max(percent, 0.0), 100.0) / 100.0)
        bar = "━" * done + "╌" * (_WIDTH - done)
        seconds = f"{now - self._began:.1f} s"
        parts = [f"{phase:<12}", bar, f"{percent:3.0f} %", *([detail] if detail else []), seconds]
        self._stream.write("  ".join(parts) + "\x1b[K\r")
        self._stream.flush()

    def close(self) -> None:
        """Take the bar away. Idempotent."""
        if self._on:
            self._on = False
            self._stream.write("\x1b[2K\r")
            self._stream.flush()
