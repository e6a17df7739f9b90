"""Engines that hang, and the stacks of every process: who is ended, who is not, what is said."""

import asyncio
import json
import logging
import os
import re
import signal

import pytest
from tests.process import children
from tests.process.conftest import descendants, wait_until
from tests.process.test_supervisor import Served

from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import (
    Config,
    EngineConfig,
    ExecutorConfig,
    LaunchConfig,
    ObservabilityConfig,
    ServerConfig,
)
from trimaran.errors import EngineDeadError
from trimaran.messages import EngineCoreRequest, Ping
from trimaran.sampling_params import SamplingParams

TIMEOUT_S = 30.0
RUNS = "trimaran.engine.engine_core_proc:run_engine_core"


def entry(function):
    return f"tests.process.children:{function.__name__}"


def config(hang_timeout_s, step_s=0.001):
    return EngineConfig(
        executor=ExecutorConfig(distributed_executor_backend="mock", mock_step_s=step_s),
        launch=LaunchConfig(engine_hang_timeout_s=hang_timeout_s, shutdown_grace_s=0.5),
    )


def request_for(request_id, max_tokens=30_000, prompt=(1, 2, 3)):
    return EngineCoreRequest(
        request_id, list(prompt), SamplingParams(max_tokens=max_tokens, seed=0)
    )


def engine_pid():
    (pid,) = (pid for pid, command in descendants().items() if "engine-0" in command)
    return pid


@pytest.fixture
def start():
    clients = []

    def begin(*args, **options):
        client = SyncMPClient(*args, **options)
        clients.append(client)
        client.wait_ready()
        return client

    yield begin
    for client in clients:
        client.shutdown()


def drain(client):
    while True:
        client.get_output(TIMEOUT_S)


def death_of(client):
    with pytest.raises(EngineDeadError) as caught:
        drain(client)
    return str(caught.value)


def test_stopped_while_it_runs(start):
    client = start(config(1.0))
    client.add_request(request_for("a"))
    client.get_output(TIMEOUT_S)
    os.kill(engine_pid(), signal.SIGSTOP)
    assert re.search(
        r"hung: no progress for \S+ s with work pending \(step \d+\)", death_of(client)
    )
    assert not descendants()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.add_request(request_for("a")),
        lambda client: client.abort_requests(["unknown"]),
    ],
    ids=["add", "abort"],
)
def test_stopped_while_idle_and_then_asked(start, ask):
    client = start(config(0.5))
    os.kill(engine_pid(), signal.SIGSTOP)
    ask(client)
    assert re.search(r"hung: it has taken no message for \S+ s \(step 0\)", death_of(client))


def test_a_call_to_a_stopped_engine_ends_with_it(start):
    client = start(config(0.5))
    os.kill(engine_pid(), signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="hung"):
        client.control(Ping(), TIMEOUT_S)


def test_with_asyncio():
    async def run():
        client = AsyncMPClient(config(0.5))
        await client.wait_ready_async()
        os.kill(engine_pid(), signal.SIGSTOP)
        await client.add_request_async(request_for("a"))
        try:
            with pytest.raises(EngineDeadError, match="hung"):
                await asyncio.wait_for(client.get_output_async(), TIMEOUT_S)
        finally:
            await client.shutdown_async()

    asyncio.run(run())


def test_a_deadlock_shows_where_it_is(start, caplog):
    client = start(config(0.5), engine_entry=entry(children.step_hangs))
    pid = engine_pid()
    with caplog.at_level(logging.ERROR):
        client.add_request(request_for("a", prompt=(children.POISON,)))
        assert "hung: no progress for" in death_of(client)
    (stacks,) = (r.getMessage() for r in caplog.records if "stacks of" in r.getMessage())
    assert stacks.startswith(f"stacks of engine-0 (pid {pid}):\n")
    assert re.search(r'children.py", line \d+ in execute', stacks)
    assert "in _process_input_sockets" in stacks
    assert "in _process_output_sockets" in stacks


def test_a_long_step_that_goes_on_is_left_alone(start):
    client = start(config(hang_timeout_s=1.0, step_s=3.0))
    client.add_request(request_for("a", max_tokens=1))
    (output,) = client.get_output(TIMEOUT_S).outputs
    assert len(output.new_token_ids) == 1


# --------------------------------------------------------------------------------------- serving


@pytest.fixture
def serve():
    started = []

    def start(api=children.stub_api, engine=RUNS, log_format="text", hang_timeout_s=10.0):
        served = Served(
            Config(
                executor=ExecutorConfig(distributed_executor_backend="mock"),
                server=ServerConfig(port=0),
                launch=LaunchConfig(engine_hang_timeout_s=hang_timeout_s),
                observability=ObservabilityConfig(log_format=log_format, log_level="error")
                if log_format == "json"
                else ObservabilityConfig(),
            ),
            entry(api),
            engine,
        )
        started.append(served)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.end()


def test_a_hung_engine_ends_the_deployment(serve):
    served = serve(api=children.stub_api_that_asks, hang_timeout_s=0.5)
    served.line("ready at")
    os.kill(served.pids()["engine-0"], signal.SIGSTOP)
    assert served.end()[0] == 1
    assert "E supervisor: engine-0 failed: hung: " in served.lines[-1]


def test_sigusr1_to_the_supervisor_shows_the_stacks_of_all(serve):
    served = serve(engine=entry(children.load_is_busy))
    wait_until(lambda: served.state()["state"][1] == "loading", what="phase loading")
    for _ in range(2):  # it stays able to answer
        served.lines.clear()
        served.process.send_signal(signal.SIGUSR1)
        served.line(rf"E supervisor: stacks of the supervisor \(pid {served.process.pid}\):")
        for name, pid in served.pids().items():
            served.line(rf"E supervisor: stacks of {name} \(pid {pid}\):")
        served.line(r'supervisor\.py", line \d+ in run')
        served.line(r'children\.py", line \d+ in _stub_api|asyncio.* in run_forever')
        served.line(r'children\.py", line \d+ in load')  # busy in pure Python
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0


def test_sigusr1_to_one_child_shows_its_stacks_in_a_line_of_json(serve):
    served = serve(log_format="json")
    wait_until(lambda: set(served.pids()) == {"api-0", "engine-0"}, what="the children")
    pid = served.pids()["engine-0"]
    os.kill(pid, signal.SIGUSR1)  # from its first moment on
    served.line(r"stacks of engine-0")
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0
    (entry_,) = map(json.loads, served.lines)
    assert entry_["message"].startswith(f"stacks of engine-0 (pid {pid}):\n")
    assert '", line ' in entry_["message"]
