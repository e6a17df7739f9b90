"""Who gets which answer, and what becomes of callers that are gone, late or wrong."""

import random

import msgspec
import pytest

from trimaran.client.utility_calls import UtilityCalls
from trimaran.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    ProtocolError,
    RequestFailedError,
)
from trimaran.messages import Ping, ResetPrefixCache, SchedulerStats, UtilityOutput

encode = msgspec.msgpack.encode


def test_each_call_gets_its_own_answer_in_whatever_order_they_come():
    calls = UtilityCalls()
    started = [calls.start(number % 3, Ping()) for number in range(300)]
    answers = [
        (number % 3, UtilityOutput(call_id, encode(SchedulerStats(step=number))))
        for number, (call_id, _) in enumerate(started)
    ]
    random.Random(1).shuffle(answers)
    for rank, answer in answers:
        assert calls.complete(rank, answer)
    assert [future.result(0).step for _, future in started] == list(range(300))


@pytest.mark.parametrize(
    ("error_type", "raised", "text"),
    [
        ("CheckpointError", RequestFailedError, "ResetPrefixCache: CheckpointError: it is gone"),
        ("KeyError", RequestFailedError, "ResetPrefixCache: KeyError: it is gone"),
        ("InvalidRequestError", InvalidRequestError, "ResetPrefixCache: it is gone"),
        ("ConflictError", ConflictError, "ResetPrefixCache: it is gone"),
    ],
)
def test_an_error_names_operation_type_and_text(error_type, raised, text):
    calls = UtilityCalls()
    call_id, future = calls.start(0, ResetPrefixCache())
    calls.complete(0, UtilityOutput(call_id, error="it is gone", error_type=error_type))
    error = future.exception(0)
    assert type(error) is raised
    assert str(error) == text


@pytest.mark.parametrize("result", [b"", b"\xc1", encode("yes"), encode([1, 2])])
def test_a_malformed_result_fails_its_call_alone(result):
    calls = UtilityCalls()
    call_id, future = calls.start(0, ResetPrefixCache())
    other_id, other = calls.start(0, ResetPrefixCache())
    calls.complete(0, UtilityOutput(call_id, result))
    with pytest.raises(ProtocolError, match="ResetPrefixCache: its result is malformed"):
        future.result(0)
    calls.complete(0, UtilityOutput(other_id, encode(True)))
    assert other.result(0) is True


def test_answers_nobody_waits_for_are_ignored():
    calls = UtilityCalls()
    call_id, future = calls.start(0, Ping())
    cancelled_id, cancelled = calls.start(0, Ping())
    failed_id, failed = calls.start(0, Ping())
    calls.forget([future])
    assert cancelled.cancel()
    assert failed.cancel()
    calls.complete(0, UtilityOutput(call_id, encode(SchedulerStats())))
    calls.complete(0, UtilityOutput(cancelled_id, encode(SchedulerStats())))
    calls.complete(0, UtilityOutput(failed_id, error="late", error_type="KeyError"))
    calls.complete(0, UtilityOutput(cancelled_id, encode(SchedulerStats())))  # twice
    calls.complete(0, UtilityOutput(4711, encode(SchedulerStats())))  # never asked
    assert not future.done()
    assert cancelled.cancelled()


def test_a_death_fails_the_calls_to_that_engine_only():
    calls = UtilityCalls()
    (_, first), (second_id, second) = calls.start(0, Ping()), calls.start(1, Ping())
    calls.fail(EngineDeadError("engine rank 0 died"), 0)
    assert isinstance(first.exception(0), EngineDeadError)
    assert not second.done()
    assert not calls.complete(0, UtilityOutput(second_id, encode(SchedulerStats())))
    calls.complete(1, UtilityOutput(second_id, encode(SchedulerStats(step=3))))
    assert second.result(0).step == 3
    _, third = calls.start(1, Ping())
    calls.fail(EngineDeadError("all are gone"))
    assert isinstance(third.exception(0), EngineDeadError)
