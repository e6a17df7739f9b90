"""Hung, slow, late: who is judged, after how long, and who never is."""

import pytest

from trimaran.clock import ManualClock
from trimaran.ipc.progress_board import Activity, EngineReading
from trimaran.launch.hang_watch import LATE_S, HangWatch
from trimaran.launch.processes import EngineId

ENGINE = EngineId(0, 77)
TIMEOUT_S = 10.0
TICK_S = 1.0
IDLE = Activity(pending=False, progress=5, limit_s=0.0)


class Observer:
    """Looks once a second at one engine, and keeps what was said of it."""

    def __init__(self):
        self.clock = ManualClock(1000.0)
        self.watch = HangWatch(TIMEOUT_S, self.clock)

    def look(self, computing=IDLE, receiving=IDLE, *, engine=ENGINE, after_s=TICK_S, steps=812):
        self.clock.advance(after_s)
        return self.watch.look({engine: EngineReading(steps, computing, receiving)})

    def seconds_until_hung(self, computing=IDLE, receiving=IDLE, *, at_most=1000):
        """How long an engine that stands still like this is left alone; None: as long as we look.

        ``computing`` and ``receiving`` may be functions of the seconds that have gone by.
        """
        for second in range(at_most):
            current = [a(second) if callable(a) else a for a in (computing, receiving)]
            if self.look(*current):
                return second
        return None


def working(progress, limit_s=0.0):
    return Activity(pending=True, progress=progress, limit_s=limit_s)


@pytest.fixture
def observer():
    return Observer()


def test_work_without_progress_is_a_hang_and_the_reason_says_so(observer):
    assert observer.seconds_until_hung(working(7)) == TIMEOUT_S
    assert observer.look(working(7)) == {
        ENGINE: "hung: no progress for 11 s with work pending (step 812)"
    }


def test_messages_that_a_stopped_engine_does_not_take(observer):
    for _ in range(100):
        assert not observer.look()
    assert observer.seconds_until_hung(receiving=working(5)) == TIMEOUT_S
    (reason,) = observer.look(receiving=working(5)).values()
    assert reason == "hung: it has taken no message for 11 s (step 812)"


def test_messages_that_are_not_there_yet_are_not_the_engines_fault(observer):
    """Its input thread turns, and its main thread has nothing to do."""
    assert observer.seconds_until_hung(receiving=working) is None


def test_idle_for_ever(observer):
    assert observer.seconds_until_hung() is None


@pytest.mark.parametrize("layer_s", [3, 9])
def test_a_long_prefill_of_18_layers_is_busy(observer, layer_s):
    assert observer.seconds_until_hung(lambda second: working(second // layer_s)) is None


@pytest.mark.parametrize(("limit_s", "left_alone_s"), [(30.0, 30), (3.0, TIMEOUT_S)])
def test_a_unit_may_take_the_larger_of_both_limits(observer, limit_s, left_alone_s):
    assert observer.seconds_until_hung(working(7, limit_s)) == left_alone_s


def test_progress_or_an_end_of_the_work_starts_the_time_anew(observer):
    for moved in (working(8), IDLE, working(2), working((1 << 64) - 1), working(0)):
        for _ in range(int(TIMEOUT_S) - 1):
            assert not observer.look(working(7))
        assert not observer.look(moved)


def test_a_standstill_that_ended_is_not_held_against_it(observer):
    assert observer.seconds_until_hung(working(7)) == TIMEOUT_S
    assert not observer.look(working(8))


@pytest.mark.parametrize("late_s", [LATE_S + 0.1, 3600.0])
def test_an_observer_that_was_late_judges_nobody(observer, late_s):
    for _ in range(int(TIMEOUT_S) - 1):
        assert not observer.look(working(7))
    assert not observer.look(working(7), after_s=late_s)
    assert observer.seconds_until_hung(working(7)) == TIMEOUT_S - 1  # the late look was the first


def test_an_observer_that_is_always_late_judges_nobody_ever(observer):
    assert not any(observer.look(working(7), after_s=LATE_S + 1) for _ in range(100))


def test_a_look_more_than_needed_changes_nothing(observer):
    looks = int(TIMEOUT_S / 0.25)
    assert not any(observer.look(working(7), after_s=0.25) for _ in range(looks))
    assert observer.look(working(7), after_s=0.25)


def test_the_next_engine_of_a_rank_begins_anew_whatever_the_last_one_did(observer):
    for _ in range(int(TIMEOUT_S)):
        observer.look(working(7))
    next_one = EngineId(0, 78)
    for _ in range(int(TIMEOUT_S)):
        assert not observer.look(working(7), engine=next_one)
    assert next_one in observer.look(working(7), engine=next_one)


def test_each_engine_is_judged_by_itself(observer):
    hung, fine = EngineId(1, 1), EngineId(2, 2)
    for second in range(int(TIMEOUT_S) + 1):
        observer.clock.advance(TICK_S)
        readings = {
            hung: EngineReading(1, working(7), IDLE),
            fine: EngineReading(1, working(second), IDLE),
        }
        result = observer.watch.look(readings)
    assert list(result) == [hung]
