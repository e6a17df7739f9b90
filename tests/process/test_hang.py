"""Hung engines are ended with the reason; slow ones, and idle ones, never are."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from tests.process import children
from tests.process.conftest import engine_pid, entry, mock_config, request_for, wait_until
from tests.process.test_supervisor import ENGINE, Served

from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import (
    Config,
    ExecutorConfig,
    LaunchConfig,
    ObservabilityConfig,
    ServerConfig,
)
from trimaran.errors import EngineDeadError
from trimaran.messages import Ping

HANG_S = 1.0

both_clients = pytest.mark.parametrize("client_type", [SyncMPClient, AsyncMPClient])


@pytest.fixture
def ready(drive):
    def make(client_type, step_s=0.001, **options):
        driver = drive(client_type, mock_config(step_s, engine_hang_timeout_s=HANG_S), **options)
        driver.run("wait_ready")
        return driver

    return make


def test_an_engine_stopped_at_work_is_hung(ready):
    driver = ready(SyncMPClient)
    driver.run("add_request", request_for("a"))
    driver.run("get_output")
    pid = engine_pid()
    errors = driver.errors_of(
        [("get_output",), ("control", Ping())], lambda: os.kill(pid, signal.SIGSTOP)
    )
    assert [type(error) for error in errors] == [EngineDeadError, EngineDeadError]
    assert all("hung: no progress for" in str(error) for error in errors), errors


@both_clients
def test_an_engine_stopped_while_idle_is_hung_once_there_is_something_to_do(ready, client_type):
    driver = ready(client_type)
    assert driver.run("control", Ping())
    pid = engine_pid()
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    # All threads are stopped then: none takes the request yet.
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the stop")
    driver.run("add_request", request_for("a"))
    (error,) = driver.errors_of([("get_output",)])
    assert isinstance(error, EngineDeadError)
    assert "hung: it has taken no message for" in str(error)


def test_a_main_thread_that_waits_for_ever_is_hung_and_its_stack_is_told(ready, caplog):
    driver = ready(SyncMPClient, engine_entry=entry(children.step_hangs))
    pid = engine_pid()
    driver.run("add_request", request_for("a"))
    (error,) = driver.errors_of([("get_output",)])
    assert "hung: no progress for" in str(error)
    (stacks,) = (r.getMessage() for r in caplog.records if "stacks of" in r.getMessage())
    assert stacks.startswith(f"stacks of engine-0 (pid {pid}):\n")
    assert re.search(r'children\.py", line \d+ in execute', stacks)
    assert "in _process_input_sockets" in stacks
    assert "in _process_output_sockets" in stacks


def test_a_step_longer_than_the_time_is_busy_as_long_as_it_gets_on(ready):
    driver = ready(SyncMPClient, step_s=2.5 * HANG_S)
    driver.run("add_request", request_for("a", max_tokens=1))
    outputs = driver.run("get_output")
    while not outputs.outputs:
        outputs = driver.run("get_output")
    assert len(outputs.outputs[0].new_token_ids) == 1


# ---------------------------------------------------------------------------------------- serving


@pytest.fixture
def serve():
    started = []

    def start(api=children.stub_api, engine=ENGINE, hang_timeout_s=10.0, **observability):
        config = Config(
            executor=ExecutorConfig(distributed_executor_backend="mock"),
            server=ServerConfig(port=0),
            launch=LaunchConfig(engine_hang_timeout_s=hang_timeout_s),
            observability=ObservabilityConfig(**observability),
        )
        started.append(Served(config, entry(api), engine))
        return started[-1]

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
    pids = served.pids()
    assert set(pids) == {"api-0", "engine-0"}
    for _ in range(2):  # it stays able to answer
        served.lines.clear()
        served.process.send_signal(signal.SIGUSR1)
        served.line(rf"E supervisor: stacks of the supervisor \(pid {served.process.pid}\):")
        for name, pid in pids.items():
            served.line(rf"E supervisor: stacks of {name} \(pid {pid}\):")
        served.line(r'supervisor\.py", line \d+ in run')
        served.line(r'children\.py", line \d+ in stub_api')
        served.line(r'children\.py", line \d+ in load')  # busy in pure Python
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0


def test_sigusr1_to_one_child_shows_its_stacks_in_a_line_of_json(serve):
    served = serve(log_format="json", log_level="error")
    wait_until(lambda: "engine-0" in served.pids(), what="the engine")
    pid = served.pids()["engine-0"]
    os.kill(pid, signal.SIGUSR1)  # from its first moment on
    served.line("stacks of engine-0")
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0
    (record,) = map(json.loads, served.lines)
    assert record["message"].startswith(f"stacks of engine-0 (pid {pid}):\n")
    assert '", line ' in record["message"]
