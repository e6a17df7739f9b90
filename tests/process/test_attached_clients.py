"""Clients attached to engines that somebody else launched: two front ends of one engine."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.process.test_client_contract import collect, expected_tokens, request_for

from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.errors import DeadlineExceededError, EngineDeadError
from trimaran.ipc.folder import PrivateFolder
from trimaran.ipc.sockets import Context
from trimaran.launch.core_engines import launch_core_engines
from trimaran.launch.links import BoundLinks
from trimaran.launch.plan import plan_engines
from trimaran.messages import AWAKE, FinishReason, Ping, Sleep, WakeUp

CONFIG = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))
TIMEOUT_S = 20.0
POISON = 666  # as in tests/process/children.py


@pytest.fixture
def links():
    folder = PrivateFolder(tempfile.gettempdir())
    bound = [BoundLinks.bind(folder, index, (0,)) for index in range(2)]
    yield folder, [each.spec for each in bound]
    for each in bound:
        each.close()
    folder.close()


@pytest.fixture
def clients(links):
    folder, specs = links
    context, deaths = Context(), []
    engines = launch_core_engines(
        CONFIG,
        plan_engines(CONFIG),
        specs,
        folder,
        context,
        deaths.append,
        "tests.process.children:step_fails",
    )
    clients = [SyncMPClient(CONFIG, spec) for spec in specs]
    for client in clients:
        client.wait_ready(TIMEOUT_S)
    yield clients
    for client in clients:
        client.shutdown()
    engines.close()
    context.close()


def test_each_front_end_gets_its_own_outputs_and_answers(clients):
    for index, client in enumerate(clients):
        # What a client claims to be does not matter.
        client.add_request(request_for(f"r{index}", 50, (index + 1,), client_index=1 - index))
    for index, client in enumerate(clients):
        assert collect(client, f"r{index}") == {
            f"r{index}": (expected_tokens((index + 1,), 50), FinishReason.LENGTH, None)
        }
        (stats,) = client.control(Ping(), TIMEOUT_S)
        assert stats.num_prompt_tokens == 2


def test_one_front_ends_end_is_nothing_to_the_other(clients):
    first, second = clients
    first.add_request(request_for("a", 30_000))
    first.shutdown()
    second.add_request(request_for("b", 200, (9,)))
    assert collect(second, "b")["b"][0] == expected_tokens((9,), 200)


def heard(client):
    """The statistics that have come and were not taken yet."""
    found = []
    while True:
        try:
            found.append(client.get_output(0).stats)
        except DeadlineExceededError:
            return found


def until(client, condition):
    while not condition(client.get_output(TIMEOUT_S).stats):
        pass


def test_every_front_end_hears_that_the_engine_sleeps(clients):
    first, second = clients
    first.add_request(request_for("a", 30_000))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(first.control, Sleep(1, "wait"), TIMEOUT_S)
        # The second has no requests, so no outputs tell it.
        until(second, lambda stats: stats.is_falling_asleep)
        first.abort_requests(["a"])
        assert answer.result(TIMEOUT_S) == [1]
        until(second, lambda stats: stats.sleep_level == 1)
    first.add_request(request_for("b", 30_000))
    second.control(WakeUp(), TIMEOUT_S)
    assert heard(second)[-1].sleep_level == AWAKE
    first.abort_requests(["b"])


def test_who_is_answered_has_heard_it_already(clients):
    for client in clients:
        client.control(Sleep(0, "wait"), TIMEOUT_S)
        assert heard(client)[-1].sleep_level == 0
        client.control(WakeUp(), TIMEOUT_S)
        assert heard(client)[-1].sleep_level == AWAKE


def test_a_dying_engine_tells_both_why(clients):
    first, second = clients
    first.add_request(request_for("a", prompt=(POISON,)))
    for client in (first, second):
        with pytest.raises(EngineDeadError, match="ValueError: a poisonous token"):
            while_outputs_come(client)


def while_outputs_come(client):
    while True:
        client.get_output(TIMEOUT_S)


def test_waiting_for_an_engine_that_never_comes_has_a_deadline(links):
    _, specs = links
    client = SyncMPClient(CONFIG, specs[0])
    with pytest.raises(DeadlineExceededError, match=r"not ready after 0\.2 s: engine rank 0"):
        client.wait_ready(0.2)
