"""Typed, ranged look-ups in a mapping that came from a file: config.json or GGUF metadata.

Owns: the checks and their messages, each naming file, key, value and the accepted range. An absent
key and null are the same. Knows nothing of models.
"""

from collections.abc import Mapping
from typing import Any

from trimaran.errors import CheckpointError


class Fields:
    """``values`` read as ``prefix + key``. A default of None makes a key required."""

    def __init__(self, values: Mapping[str, Any], *, file: str, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The value as it is, or None."""
        return self.values.get(self.prefix + key)

    def error(self, key: str, problem: str, *, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.prefix}{key} {problem}", file=self.file, hint=hint)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"is {show(value)}, not an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._value(key, default)
        # NaN is in no range, infinities are in none of these.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.error(key, f"is {show(value)}, not a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        return None if self.get(key) is None else self.number(key, low, high)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {show(value)}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {show(value)}, not a string")
        return value

    def section(self, key: str) -> "Fields":
        """A nested mapping; empty where absent."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, f"is {show(value)}, not an object")
        return Fields(value, file=f"{self.file}: {self.prefix}{key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def show(value: object) -> str:
    """A value from a file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
