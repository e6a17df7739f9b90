"""Stop strings in a growing text.

Owns: how much of each stop string the end of the text spells. Knows nothing of tokens; one per
choice that has stop strings, behind its detokenizer. Text that may not stop (below ``min_tokens``)
is simply not pushed.

The rule: the first stop string to be complete ends the text, however the text was cut into pushes;
of several that are complete at the same character the longest, so that nothing of any is shown.
"""

from collections.abc import Sequence


class _Matcher:
    """Knuth-Morris-Pratt: linear time, whatever the pushes."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of ``stop`` that the text ends with
        # fallback[k]: length of the longest proper prefix of stop[:k] that is also its suffix
        self._fallback = [0, 0]
        length = 0
        for character in stop[1:]:
            while length and stop[length] != character:
                length = self._fallback[length]
            length += stop[length] == character
            self._fallback.append(length)

    def advance(self, text: str) -> int | None:
        """Take ``text``; returns the index behind the first match in it, or None."""
        stop, fallback, matched = self.stop, self._fallback, self.matched
        position, end = 0, len(text)
        while position < end:
            if not matched:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            character = text[position]
            while matched and stop[matched] != character:
                matched = fallback[matched]
            matched += stop[matched] == character
            position += 1
            if matched == len(stop):
                return position
        self.matched = matched
        return None


class StopChecker:
    """Passes text on, keeping back only what may yet turn out to be a stop string."""

    __slots__ = ("_held", "_include_stop", "_matchers")

    def __init__(self, stop: Sequence[str], *, include_stop: bool) -> None:
        """``include_stop``: the text ends with the stop string instead of before it."""
        if not all(stop):
            raise ValueError("a stop string may not be empty")
        self._matchers = [_Matcher(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""  # longest end of the text that begins some stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to send now, and the stop string that has ended it, if one has.

        After a match nothing more may be pushed.
        """
        found: tuple[int, int, str] | None = None
        longest = 0
        for matcher in self._matchers:
            end = matcher.advance(text)
            if end is None:
                longest = max(longest, matcher.matched)
                continue
            candidate = (end, -len(matcher.stop), matcher.stop)
            if found is None or candidate < found:
                found = candidate
        if not longest and not self._held and found is None:
            return text, None
        whole = self._held + text
        if found is None:
            safe = len(whole) - longest
            self._held = whole[safe:]
            return whole[:safe], None
        end, negative_length, stop = found
        safe = len(self._held) + end + (0 if self._include_stop else negative_length)
        self._held = ""
        return whole[:safe], stop

    def flush(self) -> str:
        """What is kept back: the text has ended without a stop string. Once."""
        held, self._held = self._held, ""
        return held
