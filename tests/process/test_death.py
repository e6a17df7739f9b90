"""Engines that die once they were ready, in every way and state: who hears, in which words."""

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.process import children
from tests.process.conftest import (
    TIMEOUT_S,
    descendants,
    engine_pid,
    entry,
    mock_config,
    request_for,
)

from trimaran import LLM, SamplingParams
from trimaran.bench.tiny_model import write_tiny_model
from trimaran.client.death_policy import RaiseOnDeath
from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.errors import DeadlineExceededError, EngineDeadError
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Encoder
from trimaran.ipc.sockets import Context, Sent
from trimaran.launch.links import BoundLinks
from trimaran.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineDeath,
    Ping,
    UtilityOutput,
)

both_clients = pytest.mark.parametrize("client_type", [SyncMPClient, AsyncMPClient])
POISONED = request_for("poisoned", prompt=(children.POISON,))
# All at once, and each until it fails.
CALLS = [("get_output",), ("get_output",), ("control", Ping()), ("control", Ping())]


class Recording(RaiseOnDeath):
    """Also of whom it was asked."""

    def __init__(self):
        self.deaths = []

    def engine_died(self, death):
        self.deaths.append((death.rank, death.incarnation))
        return super().engine_died(death)


class GoingOn(Recording):
    def engine_died(self, death):
        super().engine_died(death)


def check_all_heard(driver, errors, said):
    # What came before the death is still to be had; then get_output raises like all others.
    later = (("add_request", request_for("late")), ("abort_requests", ["a"]), *CALLS)
    errors = errors + [driver.errors_of([call])[0] for call in later]
    for error in errors:
        assert isinstance(error, EngineDeadError)
        assert re.search(said, str(error))
        assert error.rank == 0
    # Nobody's traceback grows by what others do with theirs.
    assert len({id(error) for error in errors}) == len(errors)


# ------------------------------------------------------------------------------ killed from outside


@both_clients
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
@pytest.mark.parametrize("state", ["idle", "prefill", "decode"])
def test_killed(drive, client_type, number, state):
    policy = Recording()
    driver = drive(
        client_type, mock_config(step_s=60.0 if state == "prefill" else 0.001), death_policy=policy
    )
    driver.run("wait_ready")
    if state != "idle":
        driver.run("add_request", request_for("a"))
    if state == "decode":
        driver.run("get_output")
    # In a prefill that lasts, calls of control are pending; else they are answered, up to then.
    pid = engine_pid()
    errors = driver.errors_of(CALLS, lambda: os.kill(pid, number))
    check_all_heard(driver, errors, f"engine rank 0 died: it was ended by {number.name}")
    assert policy.deaths == [(0, errors[0].incarnation)]


# ------------------------------------------------------------------------------- its own last words


@both_clients
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("prefill:raise", "ValueError: as it was told"),
        ("decode:raise", "ValueError: as it was told"),
        ("input thread:raise", "ValueError: as it was told"),
        ("output thread:raise", "ValueError: as it was told"),
        ("decode:need memory", r"OutOfMemoryError: no memory left .*--kv-cache-memory-bytes"),
        ("decode:take all memory", r"OutOfMemoryError: no memory left .*--kv-cache-memory-bytes"),
        ("prefill:exit 0", "it exited with code 0"),
        ("decode:exit 3", "it exited with code 3"),
        ("decode:abort", "it was ended by SIGABRT"),
    ],
)
def test_ends_by_itself(drive, monkeypatch, client_type, fault, said):
    monkeypatch.setenv(children.FAULT, fault)
    policy = Recording()
    driver = drive(
        client_type, mock_config(), engine_entry=entry(children.faulty), death_policy=policy
    )
    driver.run("wait_ready")
    driver.run("add_request", POISONED)
    errors = driver.errors_of(CALLS)
    check_all_heard(driver, errors, said)
    # By the last message and by the end of the process, but once.
    assert policy.deaths == [(0, errors[0].incarnation)]


@both_clients
def test_the_supervisors_word_wakes_who_waits_whatever_thread_brings_it(drive, client_type):
    driver = drive(client_type, mock_config())
    driver.run("wait_ready")
    # Later, when nothing else moves: the engine lives, and is idle.
    word = threading.Timer(0.2, driver.client.fail, ["engine-0 failed: it was ended by SIGKILL"])
    errors = driver.errors_of([("get_output",), ("get_output",)], word.start)
    check_all_heard(driver, errors, "the deployment failed: engine-0 failed")


@both_clients
def test_a_request_sent_into_the_death_hears_the_cause(drive, client_type):
    """The link breaks before anybody knows why."""
    driver = drive(client_type, mock_config())
    driver.run("wait_ready")
    os.kill(engine_pid(), signal.SIGKILL)
    (error,) = driver.errors_of([("add_request", request_for("a"))])
    assert "SIGKILL" in str(error)


def test_a_call_pending_in_a_stopped_engine_has_a_deadline(drive):
    driver = drive(SyncMPClient, mock_config(shutdown_grace_s=0.2))
    driver.run("wait_ready")
    os.kill(engine_pid(), signal.SIGSTOP)
    with pytest.raises(DeadlineExceededError, match=r"Ping: no answer in 0\.2 s"):
        driver.run("control", Ping(), 0.2)


def test_a_death_is_known_as_soon_as_it_happens(drive):
    """Not by a poll: well within the second that is promised."""
    driver = drive(SyncMPClient, mock_config())
    driver.run("wait_ready")
    began = time.monotonic()
    os.kill(engine_pid(), signal.SIGKILL)
    driver.errors_of([("get_output",)])
    assert time.monotonic() - began < 10.0


@both_clients
def test_an_idle_engine_and_client_hardly_ever_wake(drive, client_type):
    """How often, not how long: what a wake-up costs is the machine's affair (milliseconds where
    idle memory is taken away, else microseconds)."""
    driver = drive(client_type, mock_config())
    driver.run("wait_ready")
    driver.run("control", Ping())  # behind it the start is over
    processes = engine_pid(), os.getpid()

    def num_waits(process):
        return sum(
            int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
            for status in Path(f"/proc/{process}/task").glob("*/status")
        )

    before = [num_waits(process) for process in processes]
    time.sleep(2.0)  # what is measured: two seconds in which nothing is asked
    for process, known in zip(processes, before, strict=True):
        assert num_waits(process) - known < 30


def test_llm_hears_the_cause(tmp_path, monkeypatch):
    """And after it: every later call, none of which hangs."""
    with LLM(
        str(write_tiny_model(tmp_path / "m")),
        distributed_executor_backend="mock",
        mock_step_s=0.001,
    ) as llm:
        pid = engine_pid()
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        step = llm.engine.step

        def kill_then_step():
            monkeypatch.setattr(llm.engine, "step", step)
            items = step()
            os.kill(pid, signal.SIGKILL)
            return items

        monkeypatch.setattr(llm.engine, "step", kill_then_step)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                llm.generate([[1, 2, 3]] * 3, params)
    assert not descendants()


# ------------------------------------------------------------- two ranks, played by the test itself


class Peer:
    """An engine as far as its front end can tell."""

    def __init__(self, context, links, rank, incarnation):
        self.rank, self.incarnation = rank, incarnation
        self._encoder = Encoder()
        self.requests = context.dealer(links.input_address, engine_identity(rank))
        self._outputs = context.push(links.output_address)

    def greet(self, incarnation=None):
        ready = EngineCoreReadyResponse(
            rank=self.rank,
            incarnation=incarnation or self.incarnation,
            num_kv_blocks=10,
            block_size=16,
            max_model_len=100,
            vocab_size=7,
            dtype="float32",
            kv_cache_bytes=1,
            weight_bytes=1,
            num_threads=1,
            kernels="none",
        )
        assert self.requests.try_send([self._encoder.encode(ready)]) is Sent.OK

    def die(self, incarnation=None, cause="ValueError: boom"):
        death = EngineDeath(self.rank, incarnation or self.incarnation, cause)
        self.send(ENGINE_CORE_DEAD, self._encoder.encode(death))

    def put_out(self, token, incarnation=None):
        output = EngineCoreOutput("r", 0, [token])
        incarnation = incarnation or self.incarnation
        self.send(self._encoder.encode(EngineCoreOutputs(self.rank, incarnation, [output])))

    def answer(self, call_id, result):
        utility = UtilityOutput(call_id, self._encoder.encode(result))
        self.send(
            self._encoder.encode(EngineCoreOutputs(self.rank, self.incarnation, utility=utility))
        )

    def send(self, *frames):
        assert self._outputs.try_send(frames) is Sent.OK

    def close(self):
        self.requests.close()
        self._outputs.close()


@pytest.fixture
def two_ranks(drive):
    """two_ranks(client_type, policy) -> (driver, both peers, greeted)."""
    context = Context()
    bound = BoundLinks.bind(0, (0, 1))
    peers = [Peer(context, bound.spec, rank, 10 + rank) for rank in range(2)]

    def make(client_type, policy):
        driver = drive(client_type, mock_config(), links=bound.spec, death_policy=policy)
        for peer in peers:
            peer.greet()
        driver.run("wait_ready")
        return driver, peers

    yield make
    for peer in peers:
        peer.close()
    context.close()
    bound.close()


def take(driver):
    outputs = driver.run("get_output")
    return outputs.rank, outputs.outputs[0].new_token_ids


@both_clients
def test_a_client_that_goes_on_uses_who_is_left(two_ranks, client_type):
    policy = GoingOn()
    driver, (first, second) = two_ranks(client_type, policy)
    first.die()
    first.die()  # a second report of the same death
    first.put_out(1)  # behind them on its link, so that both have been heard
    second.put_out(2)
    assert sorted([take(driver), take(driver)]) == [(0, [1]), (1, [2])]
    assert policy.deaths == [(0, 10)]
    driver.run("add_request", request_for("a"))
    driver.run("abort_requests", ["a"])
    assert second.requests.receive(TIMEOUT_S)[0] == b"\x00"
    assert second.requests.receive(TIMEOUT_S)[0] == b"\x01"
    assert first.requests.try_receive() is None
    second.die(cause="OSError: the last one")
    second.put_out(3)
    assert take(driver) == (1, [3])
    with pytest.raises(EngineDeadError, match="rank 1 died: OSError: the last one"):
        driver.run("add_request", request_for("b"))
    assert policy.deaths == [(0, 10), (1, 11)]


@both_clients
def test_a_word_of_an_older_life_is_nothing(two_ranks, client_type):
    policy = Recording()
    driver, (first, second) = two_ranks(client_type, policy)
    first.die(incarnation=9)
    first.put_out(1, incarnation=9)
    second.put_out(2)
    assert take(driver) == (1, [2])
    first.put_out(3)
    assert take(driver) == (0, [3])
    assert policy.deaths == []
    assert driver.client.num_dropped_messages == 2


@both_clients
def test_one_death_fails_the_calls_to_all(two_ranks, client_type):
    driver, (first, _) = two_ranks(client_type, RaiseOnDeath())
    errors = driver.errors_of([*CALLS, ("control", Ping(), TIMEOUT_S)], first.die)
    check_all_heard(driver, errors, "engine rank 0 died: ValueError: boom")


@both_clients
def test_nonsense_on_either_link_is_dropped_and_counted(two_ranks, client_type, caplog):
    caplog.set_level(logging.ERROR, "trimaran")
    driver, (first, _) = two_ranks(client_type, RaiseOnDeath())
    first.send(b"\xff" * 100)
    first.send(ENGINE_CORE_DEAD, b"\x90")
    first.send(b"")
    first.put_out(1)
    assert take(driver) == (0, [1])
    assert driver.client.num_dropped_messages == 3
