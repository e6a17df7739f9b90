"""What users of AsyncLLM and LLM receive.

Owns: the public result types, the timeline of a request among them. Filled by ``output_processor``
(a timeline begins where the request comes in); read by server/ and by users.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class TokenLogprob:
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    token: str  # decoded text of this token alone; lossy where it is part of a character
    bytes: bytes  # its exact bytes


@dataclass(slots=True)
class PositionLogprobs:
    """The chosen token first, then the most likely ones in order (the chosen may be among them)."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice. For DELTA streams ``text``, ``token_ids`` and ``logprobs`` hold what is new."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort" or None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    logprobs: list[PositionLogprobs] | None = None


@dataclass(slots=True)
class ChoiceTimeline:
    """What happened to one choice, in order. Wall seconds; 0.0 where it has not happened."""

    index: int
    queued: float = 0.0  # taken in by the engine
    scheduled: float = 0.0  # first in a batch
    first_token: float = 0.0  # end of the engine's step that drew it
    first_token_received: float = 0.0  # by the front end
    last_token: float = 0.0  # so far, received by the front end
    finished: float = 0.0  # the front end knew the end, of whatever kind
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None  # "stop", "length", "abort", "error"


# In the order in which they happen; those of choices, and those before there are any.
_CHOICE_EVENTS = (
    "queued", "scheduled", "first_token", "first_token_received", "last_token", "finished",
)  # fmt: skip
_EVENTS = ("tokenised", "submitted", *_CHOICE_EVENTS)


@dataclass(slots=True)
class RequestTimeline:
    """What happened to a request, in wall seconds; 0.0 where it has not happened.

    Events of several choices are summed up: the first one's for what begins (queued, scheduled,
    first token), the last one's for what ends (last token, finished).
    """

    received: float
    tokenised: float = 0.0
    submitted: float = 0.0  # given to the engines' links
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, when its first choice was scheduled
    choices: list[ChoiceTimeline] = field(default_factory=list)

    @classmethod
    def merged(cls, timelines: Sequence["RequestTimeline"]) -> "RequestTimeline":
        """One of several prompts that came together; their choices are numbered through."""
        choices: list[ChoiceTimeline] = []
        for timeline in timelines:
            first = len(choices)
            choices += [replace(one, index=first + one.index) for one in timeline.choices]
        return cls(
            received=min(one.received for one in timelines),
            tokenised=max(one.tokenised for one in timelines),
            submitted=max(one.submitted for one in timelines),
            num_prompt_tokens=sum(one.num_prompt_tokens for one in timelines),
            num_cached_tokens=sum(one.num_cached_tokens for one in timelines),
            choices=choices,
        )

    @property
    def queued(self) -> float:
        return min((one.queued for one in self.choices if one.queued), default=0.0)

    @property
    def scheduled(self) -> float:
        return min((one.scheduled for one in self.choices if one.scheduled), default=0.0)

    @property
    def first_token(self) -> float:
        return min((one.first_token for one in self.choices if one.first_token), default=0.0)

    @property
    def first_token_received(self) -> float:
        received = [one.first_token_received for one in self.choices if one.first_token_received]
        return min(received, default=0.0)

    @property
    def last_token(self) -> float:
        return max((one.last_token for one in self.choices), default=0.0)

    @property
    def finished(self) -> float:
        """When the last choice ended; 0.0 while one still runs."""
        ends = [one.finished for one in self.choices]
        return max(ends) if ends and all(ends) else 0.0

    @property
    def last_event(self) -> str:
        """The name of what happened last: ``"received"``, …, ``"finished"``."""
        happened = ("received", *(event for event in _EVENTS if getattr(self, event)))
        return happened[-1]

    @property
    def finish_reason(self) -> str | None:
        """Of all choices, once they have ended: ``"length"``, ``"length, stop"``."""
        reasons = {one.finish_reason for one in self.choices if one.finish_reason is not None}
        return ", ".join(sorted(reasons)) if self.finished else None

    @property
    def num_output_tokens(self) -> int:
        return sum(one.num_output_tokens for one in self.choices)

    @property
    def num_preemptions(self) -> int:
        return sum(one.num_preemptions for one in self.choices)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: ``received`` in wall seconds, events in ms after it (null: not happened)."""
        answer: dict[str, Any] = {
            "received": self.received,
            **self._milliseconds(self, _EVENTS),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.num_prompt_tokens,
            **_counts(self),
        }
        if len(self.choices) > 1:
            answer["choices"] = [
                {
                    "index": one.index,
                    **self._milliseconds(one, _CHOICE_EVENTS),
                    "finish_reason": one.finish_reason,
                    **_counts(one),
                }
                for one in self.choices
            ]
        return answer

    def _milliseconds(self, source: object, events: Sequence[str]) -> dict[str, float | None]:
        return {
            f"{event}_ms": round((at - self.received) * 1000, 3) if at else None
            for event in events
            for at in (getattr(source, event),)
        }


def _counts(source: "RequestTimeline | ChoiceTimeline") -> dict[str, int]:
    return {
        "cached_tokens": source.num_cached_tokens,
        "output_tokens": source.num_output_tokens,
        "preemptions": source.num_preemptions,
    }


@dataclass(slots=True)
class RequestOutput:
    """One item of a stream, or the whole result.

    DELTA streams yield items in which ``outputs`` holds only the choices with news; FINAL_ONLY and
    the offline API yield one item with all choices in index order.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0  # over all choices, so far
    # Per prompt position; None for the first, which nothing predicts. Once, with the first item.
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    # Goes on while the request runs: one object for all items of a stream.
    timeline: RequestTimeline = field(default_factory=lambda: RequestTimeline(0.0))
