"""Utility calls of engine processes: many at once, given up, refused, cut off by a death."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec
import pytest
from tests.process.conftest import descendants
from tests.process.test_client_contract import Awaited, Plain, collect, request_for

from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.errors import DeadlineExceededError, EngineDeadError, RequestFailedError
from trimaran.messages import Ping, ResetPrefixCache, SchedulerStats, Sleep, WakeUp

TIMEOUT_S = 20.0
NUM_CALLS = 400
CONFIG = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))


@pytest.fixture(params=[SyncMPClient, AsyncMPClient])
def start(request):
    """start() -> a ready client, with plain methods whatever its kind."""
    clients = []

    def begin(entry="tests.process.children:wake_fails"):
        client = request.param(CONFIG, engine_entry=entry)
        clients.append(Plain(client) if isinstance(client, SyncMPClient) else Awaited(client))
        clients[-1].wait_ready(TIMEOUT_S)
        return clients[-1]

    yield begin
    for client in clients:
        client.finish()


def at_once(client, operations, timeout_s=TIMEOUT_S):
    """The results, or the exceptions, of calls made from several threads or tasks."""
    if isinstance(client, Plain):

        def call(operation):
            try:
                return client.client.control(operation, timeout_s)
            except Exception as error:
                return error

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(call, operations))

    async def all_of_them():
        calls = [client.client.control_async(operation, timeout_s) for operation in operations]
        return await asyncio.gather(*calls, return_exceptions=True)

    return client.runner.run(all_of_them())


def test_hundreds_at_once_are_all_answered_and_never_mixed_up(start):
    client = start()
    client.add_request(request_for("a", 2000))
    operations = [Ping() if number % 2 else ResetPrefixCache() for number in range(NUM_CALLS)]
    for operation, result in zip(operations, at_once(client, operations), strict=True):
        (value,) = result
        assert type(value) is (SchedulerStats if isinstance(operation, Ping) else bool)
    assert len(collect(client, "a")["a"][0]) == 2000


def test_an_error_in_the_engine_is_the_callers_and_nobody_elses(start):
    client = start()
    client.control(Sleep(2, "abort"))
    ping, wake, reset = at_once(client, [Ping(), WakeUp(), ResetPrefixCache()])
    assert ping[0].sleep_level == 2
    assert reset == [True]
    assert isinstance(wake, RequestFailedError)
    assert str(wake) == "WakeUp: CheckpointError: m.gguf: is gone (put it back)"
    assert client.control(WakeUp()) == [None]  # the second time the file is there


class Unknown(msgspec.Struct, array_like=True, tag=99):
    result_type: ClassVar[Any] = bool


class BadlyTyped(msgspec.Struct, array_like=True, tag=3):
    level: int = 7
    result_type: ClassVar[Any] = int


@pytest.mark.parametrize("operation", [Unknown(), BadlyTyped()], ids=["unknown", "badly typed"])
def test_an_operation_the_engine_does_not_know_is_never_its_death(start, operation):
    client = start()
    with pytest.raises(DeadlineExceededError, match=r"no answer in 0\.1 s"):
        client.control(operation, 0.1)
    assert client.control(Ping())[0].sleep_level == -1


@pytest.fixture
def stopped(start):
    """(a client, its engine's pid): the engine is alive and answers nothing."""
    client = start()
    (pid,) = (pid for pid, command in descendants().items() if "engine-0" in command)
    os.kill(pid, signal.SIGSTOP)
    yield client, pid
    if descendants():
        os.kill(pid, signal.SIGCONT)


def test_answers_that_come_after_the_deadline_or_a_cancel_are_ignored(stopped):
    client, pid = stopped
    late = at_once(client, [Ping()] * 5, timeout_s=0.1)
    assert [type(error) for error in late] == [DeadlineExceededError] * 5
    if isinstance(client, Awaited):

        async def cancelled():
            task = asyncio.create_task(client.client.control_async(Ping(), TIMEOUT_S))
            await asyncio.sleep(0)  # it has sent its call
            task.cancel()
            return await asyncio.gather(task, return_exceptions=True)

        (outcome,) = client.runner.run(cancelled())
        assert isinstance(outcome, asyncio.CancelledError)
    os.kill(pid, signal.SIGCONT)
    # Answers come in order: those to the calls above have come before this one.
    assert client.control(ResetPrefixCache()) == [True]


def test_a_death_fails_every_pending_call(stopped):
    client, pid = stopped
    answers = [client.start_control(Ping()) for _ in range(5)]
    if isinstance(client, Awaited):
        client.runner.run(asyncio.sleep(0))  # they have sent their calls
    os.kill(pid, signal.SIGKILL)
    for answer in answers:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            answer()
