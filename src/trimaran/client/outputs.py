"""What users of AsyncLLM and LLM receive.

Owns: the public result types. Filled by ``output_processor``; read by server/ and by users.
"""

from dataclasses import dataclass, field


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
class RequestTiming:
    """Wall seconds; 0 where it has not happened yet."""

    arrival: float = 0.0
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


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
    timing: RequestTiming = field(default_factory=RequestTiming)
