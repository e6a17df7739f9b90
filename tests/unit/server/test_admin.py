"""Sleep, wake_up and recordings over HTTP: what is passed on, what is refused, what /ready says."""

import pytest
from tests.unit.server.harness import serving

from trimaran.errors import ConflictError, RequestFailedError


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", (1, "abort")),
        ("?level=0", (0, "abort")),
        ("?level=2&mode=wait", (2, "wait")),
        ("?mode=abort&level=1&unknown=x", (1, "abort")),
    ],
)
def test_sleep_and_wake_up(server, query, asked):
    is_sleeping = {"is_sleeping": True}
    response = server.client.post(f"/sleep{query}")
    assert (response.status_code, response.json()) == (200, is_sleeping)
    assert server.llm.slept == [asked]
    assert server.client.get("/is_sleeping").json() == is_sleeping
    response = server.client.post("/wake_up")
    assert (response.status_code, response.json()) == (200, {"is_sleeping": False})
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=", "level"),
        ("/sleep?level=1.0", "level"),
        ("/sleep?level=" + "9" * 5000, "level"),
        ("/sleep?mode=keep", "mode"),
        ("/sleep?mode=", "mode"),
        ("/wake_up?tags=weights", "tags"),
    ],
)
def test_what_is_no_level_mode_or_meaning_is_refused(server, path, field):
    response = server.client.post(path)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert server.llm.slept == []


@pytest.mark.parametrize("phase", ["sleeping", "falling asleep"])
def test_asleep_is_healthy_and_not_ready_and_takes_requests(server, phase):
    server.llm.sleep_phase = phase
    response = server.client.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"ready": False, "phase": phase, "percent": 100.0}
    assert server.client.get("/health").status_code == 200
    # The engine holds it; this one, being a fake, answers.
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    server.llm.sleep_phase = None
    assert server.client.get("/ready").json()["phase"] == "ready"


def test_a_failed_wake_up_says_why(server):
    server.client.post("/sleep")
    server.llm.control_error = RequestFailedError("WakeUp: CheckpointError: m.gguf: is gone")
    response = server.client.post("/wake_up")
    assert response.status_code == 500
    assert "m.gguf: is gone" in response.json()["error"]["message"]
    assert server.client.get("/ready").json()["phase"] == "sleeping"


def test_recordings(server):
    for path in ("/start_profile", "/stop_profile"):
        response = server.client.post(path)
        assert response.json() == {"files": ["/profiles/one", "/profiles/two"]}
    server.llm.control_error = ConflictError("no folder", hint="start with --profile-dir FOLDER")
    for path in ("/start_profile", "/stop_profile"):
        response = server.client.post(path)
        assert response.status_code == 409
        assert "--profile-dir FOLDER" in response.json()["error"]["message"]
