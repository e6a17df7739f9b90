"""Sleep and wake_up of an EngineCore on the mock executor: states, levels, modes, what waits."""

import pytest
from tests.unit.scheduling.simulation import expected_tokens, make_request

from trimaran.config import EngineConfig, ExecutorConfig, SchedulerConfig
from trimaran.engine.engine_core import EngineCore
from trimaran.errors import CheckpointError, ConflictError, InvalidRequestError
from trimaran.executor.mock import MockExecutor
from trimaran.messages import (
    AWAKE,
    FinishReason,
    Ping,
    Profile,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)

CONFIG = EngineConfig(
    executor=ExecutorConfig(distributed_executor_backend="mock"),
    scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
)


class SpyingExecutor(MockExecutor):
    """Notes what it is asked; its file can go missing."""

    def __init__(self):
        super().__init__(CONFIG)
        self.asked = []
        self.file_is_gone = False

    def sleep(self, level):
        super().sleep(level)
        self.asked.append(level)

    def wake_up(self, on_progress):
        if self.file_is_gone:
            raise CheckpointError("no such file", file="m.gguf")
        super().wake_up(on_progress)
        self.asked.append("wake")


@pytest.fixture
def executor():
    return SpyingExecutor()


@pytest.fixture
def core(executor):
    return EngineCore(CONFIG, executor)


def steps(core, most=10_000):
    """All steps to be done: request -> (tokens, finish reason)."""
    tokens, ends = {}, {}
    for _ in range(most):
        if not core.has_work():
            break
        for message in core.step().values():
            for output in message.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.request_id not in ends, "it ended twice"
                    ends[output.request_id] = output.finish_reason
    return {name: (ids, ends.get(name)) for name, ids in tokens.items()}


def sleep(core, level=1, mode="abort"):
    done = core.control(Sleep(level, mode))
    steps(core)
    return done.result(0)


def wake_up(core):
    core.control(WakeUp()).result(0)


@pytest.mark.parametrize(
    ("level", "asked", "cached"), [(0, [], 32), (1, [1, "wake"], 0), (2, [2, "wake"], 0)]
)
def test_each_level_keeps_and_gives_what_it_says(core, executor, level, asked, cached):
    core.add_request(make_request("a", 40, 3))
    before = steps(core)["a"]
    assert sleep(core, level) == level
    assert (core.stats().sleep_level, core.has_work()) == (level, False)
    wake_up(core)
    assert core.stats().sleep_level == AWAKE
    assert executor.asked == asked
    core.add_request(make_request("a", 40, 3))
    hits = core.stats().prefix_cache_hits
    assert steps(core)["a"] == before
    assert core.stats().prefix_cache_hits - hits == cached


def test_abort_ends_running_and_waiting_requests_with_what_they_had(core):
    requests = [make_request(f"r{n}", 5, 50, client_index=n) for n in range(3)]
    for request in requests:
        core.add_request(request)
    core.step()
    core.step()
    assert (core.stats().num_running, core.stats().num_waiting) == (2, 1)
    done = core.control(Sleep(1, "abort"))
    assert not done.done()
    last = core.step()
    assert not done.done(), "the outputs go before the answer"
    assert {client: message.outputs[0].first_index for client, message in last.items()} == {
        0: 2, 1: 2, 2: 0,
    }  # fmt: skip
    for message in last.values():
        (output,) = message.outputs
        assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.ABORT)
    core.step()
    assert done.result(0) == 1
    assert core.stats().kv_cache_usage == 0.0


def test_wait_lets_what_came_before_end_and_what_comes_later_wait(core):
    before, later = make_request("before", 5, 6), make_request("later", 7, 4)
    core.add_request(before)
    core.step()
    done = core.control(Sleep(1, "wait"))
    core.add_request(later)
    stats = core.stats()
    assert (stats.is_falling_asleep, stats.sleep_level) == (True, AWAKE)
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    rest = steps(core)
    assert set(rest) == {"before"}
    assert rest["before"][1] is FinishReason.LENGTH
    assert done.result(0) == 1
    stats = core.stats()
    assert (stats.is_falling_asleep, stats.sleep_level, stats.num_waiting) == (False, 1, 1)
    assert not core.has_work()
    wake_up(core)
    assert steps(core)["later"] == (
        expected_tokens(later.prompt_token_ids, 4),
        FinishReason.LENGTH,
    )


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_idle_engine_sleeps_at_once(core, mode):
    assert sleep(core, 2, mode) == 2


def test_it_goes_deeper_and_never_up(core, executor):
    assert [sleep(core, level) for level in (0, 2, 1, 2)] == [0, 2, 2, 2]
    assert executor.asked == [2]
    wake_up(core)
    wake_up(core)  # awake: nothing to do
    assert executor.asked == [2, "wake"]
    assert [sleep(core, level) for level in (1, 2)] == [1, 2]
    assert executor.asked == [2, "wake", 1, 2]


def test_an_abort_completes_the_sleeps_that_wait(core):
    core.add_request(make_request("a", 5, 50))
    core.step()
    first, second = core.control(Sleep(2, "wait")), core.control(Sleep(0, "wait"))
    core.step()
    assert not first.done()
    third = core.control(Sleep(1, "abort"))
    assert steps(core)["a"][1] is FinishReason.ABORT
    assert [call.result(0) for call in (first, second, third)] == [2, 2, 2]


def test_an_abort_of_the_last_running_request_lets_it_sleep(core):
    core.add_request(make_request("a", 5, 50))
    core.step()
    done = core.control(Sleep(1, "wait"))
    core.abort_requests(["a"])
    steps(core)
    assert done.result(0) == 1


def test_wake_up_calls_off_a_sleep_that_waits(core, executor):
    core.add_request(make_request("a", 5, 6))
    core.step()
    done = core.control(Sleep(1, "wait"))
    core.add_request(make_request("later", 5, 3))
    wake_up(core)
    with pytest.raises(ConflictError, match="wake_up came before the engine slept"):
        done.result(0)
    assert {reason for _, reason in steps(core).values()} == {FinishReason.LENGTH}
    assert core.stats().sleep_level == AWAKE
    assert executor.asked == []


def test_what_an_abort_ended_hears_so_though_wake_up_came_before_the_sleep(core):
    core.add_request(make_request("a", 5, 50))
    core.step()
    done = core.control(Sleep(1, "abort"))
    core.add_request(make_request("later", 5, 50))
    wake_up(core)
    assert isinstance(done.exception(0), ConflictError)
    (message,) = core.step().values()
    (output,) = message.outputs
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ABORT)
    assert steps(core)["later"][1] is FinishReason.LENGTH


def test_held_requests_are_checked_at_once_and_can_be_aborted(core):
    sleep(core)
    core.add_request(make_request("a", 5, 3))
    core.add_request(make_request("b", 5, 3))
    for bad in (make_request("c", []), make_request("c", [-1]), make_request("a", 5, 3)):
        with pytest.raises(InvalidRequestError):
            core.add_request(bad)
    core.abort_requests(["a", "nobody"])
    assert core.stats().num_waiting == 1
    wake_up(core)
    assert set(steps(core)) == {"b"}


def test_held_requests_run_in_order_of_arrival(core):
    sleep(core, 0)
    for number in range(4):
        core.add_request(make_request(f"r{number}", 5, 2))
    wake_up(core)
    assert list(steps(core)) == ["r0", "r1", "r2", "r3"]


def test_held_requests_stay_held_when_it_goes_deeper(core):
    sleep(core, 0)
    core.add_request(make_request("a", 5, 2))
    assert sleep(core, 1, "abort") == 1
    assert core.stats().num_waiting == 1
    wake_up(core)
    assert steps(core)["a"][1] is FinishReason.LENGTH


def test_a_failed_wake_up_raises_and_can_be_tried_again(core, executor):
    sleep(core, 2)
    core.add_request(make_request("a", 5, 2))
    executor.file_is_gone = True
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"m\.gguf: no such file"):
            wake_up(core)
        assert (core.stats().sleep_level, core.has_work()) == (2, False)
    executor.file_is_gone = False
    wake_up(core)
    assert steps(core)["a"][1] is FinishReason.LENGTH


def test_other_operations_work_asleep(core):
    sleep(core, 2)
    assert core.control(Ping()).result(0).sleep_level == 2
    assert core.control(ResetPrefixCache()).result(0) is True
    with pytest.raises(ConflictError, match="mock executor computes nothing"):
        core.control(Profile("start")).result(0)


@pytest.mark.parametrize(
    ("arguments", "field"), [((3,), "level"), (("1",), "level"), ((1, "keep"), "mode")]
)
def test_what_is_no_level_or_mode_cannot_even_be_asked(arguments, field):
    with pytest.raises(InvalidRequestError, match=f"{field} must be") as caught:
        Sleep(*arguments)
    assert caught.value.param == field
