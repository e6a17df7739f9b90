"""Merged outputs say what the single ones said."""

from trimaran.engine.outputs import append_or_merge
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
    UtilityOutput,
)


def logprobs(*tokens):
    return TokenLogprobs([[t] for t in tokens], [[-1.0] for _ in tokens], [1 for _ in tokens])


def test_deltas_of_one_request_become_one_and_others_are_kept():
    backlog = []
    append_or_merge(
        backlog,
        EngineCoreOutputs(
            0,
            1,
            [
                EngineCoreOutput("a", 0, [], queued_at=5.0, num_cached_tokens=3, num_preemptions=1),
                EngineCoreOutput("b", 7, [70], logprobs=logprobs(70)),
            ],
            stats=SchedulerStats(step=1),
        ),
    )
    later = EngineCoreOutput("b", 8, [71, 72], logprobs=logprobs(71, 72))
    append_or_merge(backlog, EngineCoreOutputs(0, 1, [later]))
    append_or_merge(
        backlog,
        EngineCoreOutputs(
            0,
            1,
            [
                EngineCoreOutput("c", 0, [1]),
                EngineCoreOutput("a", 0, [9], FinishReason.STOP, stop_reason=9, first_token_at=6.0),
            ],
            stats=SchedulerStats(step=3),
            timestamp=2.0,
        ),
    )
    (merged,) = backlog
    a, b, c = merged.outputs
    assert a == EngineCoreOutput(
        "a", 0, [9], FinishReason.STOP, stop_reason=9, queued_at=5.0, num_cached_tokens=3,
        first_token_at=6.0, num_preemptions=1,
    )  # fmt: skip
    assert b == EngineCoreOutput("b", 7, [70, 71, 72], logprobs=logprobs(70, 71, 72))
    assert c == EngineCoreOutput("c", 0, [1])
    assert (merged.stats, merged.timestamp) == (SchedulerStats(step=3), 2.0)


def test_engines_lives_and_answers_are_never_merged():
    backlog = []
    messages = [
        EngineCoreOutputs(0, 1, [EngineCoreOutput("a", 0, [1])]),
        EngineCoreOutputs(1, 1, [EngineCoreOutput("b", 0, [1])]),
        EngineCoreOutputs(1, 2, [EngineCoreOutput("b", 0, [1])]),
        EngineCoreOutputs(1, 2, utility=UtilityOutput(1)),
        EngineCoreOutputs(1, 2, utility=UtilityOutput(2)),
        EngineCoreOutputs(1, 2, [EngineCoreOutput("b", 1, [2])]),
    ]
    for message in messages:
        append_or_merge(backlog, message)
    assert backlog == messages


def test_what_does_not_follow_stays_apart():
    """A gap, a resend, something behind an end: for its reader to judge."""
    for earlier, later in [
        (EngineCoreOutput("a", 0, [1]), EngineCoreOutput("a", 2, [3])),
        (EngineCoreOutput("a", 0, [1, 2]), EngineCoreOutput("a", 1, [2, 3])),
        (EngineCoreOutput("a", 0, [1]), EngineCoreOutput("a", -1, [1])),
        (EngineCoreOutput("a", 0, [1], FinishReason.STOP), EngineCoreOutput("a", 1, [])),
    ]:
        backlog = []
        for output in (earlier, later):
            append_or_merge(backlog, EngineCoreOutputs(0, 1, [output]))
        assert [message.outputs for message in backlog] == [[earlier], [later]]
