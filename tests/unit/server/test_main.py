"""The process itself, started the way the supervisor starts it, with the supervisor's ends here."""

import contextlib
import select
import socket

import httpx
import pytest

from trimaran.config import resolve
from trimaran.launch.api_servers import ApiServer
from trimaran.launch.links import BoundLinks
from trimaran.launch.plan import plan_api_servers
from trimaran.messages import DeploymentState

DEADLINE_S = 30.0


@pytest.fixture
def started():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        links = BoundLinks.bind(0, (0,))
        stack.callback(links.close)
        [process] = plan_api_servers()
        server = ApiServer(resolve({}, environment={}), process, links.spec, listener.fileno())
        stack.callback(server.close)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = stack.enter_context(httpx.Client(base_url=url, timeout=DEADLINE_S))
        yield server, client


def end_of(server):
    readable, _, _ = select.select([server.child], [], [], DEADLINE_S)
    assert readable, "the process did not end"
    return server.child.end()


def test_ready_before_anything_is_there_and_sigterm_ends_it(started):
    server, client = started
    server.channel.send(DeploymentState(ready=False, phase="downloading", percent=12.5))
    # The first answer may come before the state has: both are answers of a server that starts.
    while (answer := client.get("/ready")).json()["phase"] == "starting":
        assert answer.status_code == 503
    assert answer.json() == {"ready": False, "phase": "downloading", "percent": 12.5}
    assert client.get("/health").status_code == 200
    refused = client.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert "downloading" in refused.json()["error"]["message"]
    server.child.terminate()
    end = end_of(server)
    assert end.return_code == 0


def test_a_model_that_cannot_be_read_is_told_to_the_parent(started, tmp_path):
    server, client = started
    assert client.get("/health").status_code == 200
    server.channel.send(
        DeploymentState(ready=False, phase="loading", percent=0.0, model_path=str(tmp_path))
    )
    end = end_of(server)
    assert end.return_code == 1
    assert end.failure.type_name == "CheckpointError"
    assert str(tmp_path) in end.failure.message
