"""``trimaran serve --log-format json``: every line is JSON, and requests are found by their id."""

import json
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from tests.process.conftest import wait_until

from trimaran.bench.tiny_model import write_tiny_model

TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
# The mock draws the token with the highest bias; without one, such as the tiny model has not.
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "logit_bias": {"40": 100}}
EVENTS = (
    "tokenised_ms", "submitted_ms", "queued_ms", "scheduled_ms", "first_token_ms",
    "first_token_received_ms", "last_token_ms", "finished_ms",
)  # fmt: skip


@pytest.fixture
def served(tmp_path):
    """(process, the lines of its stderr so far)"""
    model = write_tiny_model(tmp_path / "model")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "trimaran", "serve", str(model), "--port", "0",
            "--distributed-executor-backend", "mock", "--log-format", "json", "--log-requests",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr))
    reader.start()
    yield process, lines
    if process.poll() is None:
        process.kill()
    process.wait(TIMEOUT_S)
    reader.join(TIMEOUT_S)
    process.stderr.close()


def test_every_line_is_json_and_requests_are_found_by_their_id(served):
    process, lines = served

    def records(**fields):
        """Those that have these fields, out of what was logged so far; every line must parse."""
        parsed = [json.loads(line) for line in list(lines)]
        return [r for r in parsed if fields.items() <= r.items()]

    def ready():
        assert process.poll() is None, lines
        return [r for r in records() if r["message"].startswith("ready at ")]

    wait_until(ready, TIMEOUT_S, "the start")
    url = ready()[0]["message"].split()[2]
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        good = client.post(
            COMPLETIONS, json={**BODY, "timeline": True}, headers={"x-request-id": "good"}
        )
        assert good.status_code == 200, good.text
        bad = client.post(
            COMPLETIONS, json={"prompt": "a", "n": 0}, headers={"x-request-id": "bad"}
        )
        assert bad.status_code == 400
        kept = client.get("/requests/good").json()
    # Real clocks of real processes: in order all the same, and the same wherever it is told.
    timeline = good.json()["timeline"]
    times = [timeline[event] for event in EVENTS]
    assert times == sorted(times)
    assert kept["timeline"] == timeline
    assert (timeline["prompt_tokens"], timeline["output_tokens"]) == (3, 4)
    wait_until(lambda: records(request_id="bad"), TIMEOUT_S, "the lines of the requests")
    [line] = records(request_id="good")
    assert (line["role"], line["status"], line["timeline"]) == ("api-0", 200, timeline)
    [line] = records(request_id="bad")
    assert (line["status"], line["error"]) == (400, bad.json()["error"]["message"])

    [table] = [r for r in records() if "phases" in r]
    phases = table["phases"]
    assert set(phases) == {"supervisor", "api-0", "engine-0", "total"}
    assert set(phases["api-0"]) >= {"importing", "listening", "connecting"}
    assert set(phases["engine-0"]) >= {"process", "importing", "loading", "warming up"}
    for name in ("supervisor", "api-0", "engine-0"):
        assert 0 < sum(phases[name].values()) <= phases["total"] + 0.1

    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 0
    assert {r["role"] for r in records()} >= {"supervisor", "api-0"}
