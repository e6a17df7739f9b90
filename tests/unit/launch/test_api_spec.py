"""The state socket between supervisor and API server, both ends."""

import asyncio
import os

import pytest

from trimaran.launch.api_spec import DeploymentWatch, StateChannel
from trimaran.messages import ApiServerReady, DeploymentState

TIMEOUT_S = 5.0


def state(percent, **fields):
    return DeploymentState(ready=False, phase="loading", percent=percent, **fields)


@pytest.fixture
def channel():
    channel = StateChannel()
    yield channel
    channel.close()


def watch_of(channel):
    watch = DeploymentWatch(os.dup(channel.child_fd))
    channel.given()
    return watch


def test_states_arrive_in_order_and_waiting_has_a_deadline(channel):
    async def run():
        watch = watch_of(channel).start()
        assert watch.current == DeploymentState(ready=False, phase="starting", percent=0.0)
        seen = []
        watch.on_change(seen.append)
        waiting = asyncio.create_task(watch.wait_for(lambda s: s.model_path is not None, TIMEOUT_S))
        channel.send(state(10.0))
        channel.send(state(20.0, model_path="/m"))
        assert await waiting == state(20.0, model_path="/m")
        assert seen[-1] == watch.current
        with pytest.raises(TimeoutError):
            await watch.wait_for(lambda s: s.ready, 0.01)
        watch.close()

    asyncio.run(run())


def test_the_servers_word_reaches_the_supervisor(channel):
    watch = watch_of(channel)
    assert channel.read()
    assert channel.ready is None
    watch.report_ready([("importing", 0.5)])
    assert channel.read()
    assert channel.ready == ApiServerReady([("importing", 0.5)])
    watch.close()
    assert not channel.read()
    channel.send(state(1.0))  # to nobody: no error


def test_a_server_that_does_not_read_gets_the_latest_state_when_it_does(channel):
    async def run():
        watch = watch_of(channel)
        for percent in range(5000):  # more than the socket holds
            channel.send(state(float(percent)))
        watch.start()
        async with asyncio.timeout(TIMEOUT_S):
            while watch.current.percent != 4999.0:
                await asyncio.sleep(0)
                channel.flush()
        watch.close()

    asyncio.run(run())


def test_the_end_of_the_supervisor_is_a_failure(channel):
    async def run():
        watch = watch_of(channel).start()
        channel.send(state(10.0))
        channel.close()
        last = await watch.wait_for(lambda s: s.failure is not None, TIMEOUT_S)
        assert last == state(10.0, failure="the supervisor is gone")
        watch.close()

    asyncio.run(run())
