"""What an engine says of its work: is there any, does it go on, how long may the next unit take."""

import pytest

from trimaran.clock import ManualClock
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.engine.engine_core import EngineCore, make_executor
from trimaran.engine.progress import OPERATION_LIMIT_S, WorkProgress
from trimaran.ipc.progress_board import EngineCells, ProgressBoard
from trimaran.messages import EngineCoreRequest
from trimaran.sampling_params import SamplingParams


class Watched:
    def __init__(self):
        self.board = ProgressBoard.create((0,), num_clients=1)
        self.clock = ManualClock(100.0)
        self.progress = WorkProgress(EngineCells(self.board.place, 0), self.clock)

    @property
    def steps(self):
        return self.board.read(0, 1).steps

    @property
    def now(self):
        return self.board.read(0, 1).computing

    def units(self, *seconds, tokens):
        for each in seconds:
            self.clock.advance(each)
            self.progress.unit_done(tokens)


@pytest.fixture
def watched():
    watched = Watched()
    yield watched
    watched.board.close()


def test_work_is_pending_until_there_is_none(watched):
    assert not watched.now.pending
    watched.progress.set_busy(True)
    assert watched.now.pending
    watched.progress.set_busy(False)
    assert not watched.now.pending


def test_every_unit_and_step_is_progress(watched):
    watched.progress.set_busy(True)
    seen = [watched.now.progress]
    for act in (watched.progress.unit_done, watched.progress.unit_done, watched.progress.end_step):
        act()
        seen.append(watched.now.progress)
    assert len(set(seen)) == len(seen)
    assert watched.steps == 1


def test_the_limit_is_ten_times_the_longest_unit_for_a_batch_of_that_size(watched):
    watched.progress.set_busy(True)
    watched.progress.begin_step(128)
    watched.units(2.0, 1.0, tokens=128)
    assert watched.now.limit_s == pytest.approx(20.0)
    watched.progress.end_step()
    watched.progress.begin_step(512)  # four times as many tokens as ever
    assert watched.now.limit_s == pytest.approx(80.0)
    watched.units(7.0, tokens=512)
    assert watched.now.limit_s == pytest.approx(70.0)
    watched.progress.begin_step(1)
    assert watched.now.limit_s == pytest.approx(70.0)


def test_one_slow_small_batch_allows_no_hours_to_a_large_one(watched):
    watched.progress.set_busy(True)
    watched.units(0.1, tokens=512)
    watched.progress.begin_step(1)
    watched.units(3.0, tokens=1)
    watched.progress.begin_step(512)
    assert watched.now.limit_s == pytest.approx(30.0)


def test_waiting_for_work_is_no_unit(watched):
    watched.clock.advance(1000.0)
    watched.progress.set_busy(True)
    watched.units(1.0, tokens=1)
    watched.progress.set_busy(False)
    assert watched.now.limit_s == 0.0
    watched.clock.advance(1000.0)
    watched.progress.set_busy(True)
    watched.units(1.0, tokens=1)
    assert watched.now.limit_s == pytest.approx(10.0)


def test_an_operation_has_a_limit_of_its_own_and_teaches_nothing(watched):
    watched.progress.set_busy(True)
    watched.units(1.0, tokens=1)
    with watched.progress.operation():
        before = watched.now
        assert before.limit_s == OPERATION_LIMIT_S
        watched.units(60.0, tokens=1)
        assert watched.now == (True, before.progress + 1, OPERATION_LIMIT_S)
        watched.clock.advance(60.0)
    watched.units(0.5, tokens=1)
    assert watched.now.limit_s == pytest.approx(10.0)


def test_an_engine_says_so_of_its_steps(watched):
    config = EngineConfig(
        executor=ExecutorConfig(distributed_executor_backend="mock", mock_step_s=0.001)
    )
    executor = make_executor(config, watched.progress.unit_done)
    core = EngineCore(config, executor, clock=watched.clock, progress=watched.progress)
    started = watched.now.progress
    assert started > 0  # the weights
    core.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(max_tokens=2, seed=0)))
    core.step()
    assert watched.steps == 1
    assert watched.now.progress >= started + 2  # the mock's, and the step's end
