"""Hung engines are ended with the reason; slow ones, and idle ones, never are."""

import os
import signal
from pathlib import Path

import pytest
from tests.process import children
from tests.process.conftest import engine_pid, entry, mock_config, request_for, wait_until

from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
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
    driver.run("add_request", request_for("a"))
    (error,) = driver.errors_of([("get_output",)])
    assert "hung: no progress for" in str(error)
    assert "in step_hangs" in caplog.text or "children.py" in caplog.text


def test_a_step_longer_than_the_time_is_busy_as_long_as_it_gets_on(ready):
    driver = ready(SyncMPClient, step_s=2.5 * HANG_S)
    driver.run("add_request", request_for("a", max_tokens=1))
    outputs = driver.run("get_output")
    while not outputs.outputs:
        outputs = driver.run("get_output")
    assert len(outputs.outputs[0].new_token_ids) == 1
