"""The timeline in an answer, GET /requests, and the line that --log-requests writes."""

import logging

import pytest
from tests.unit.server.fake_llm import FakeLLM
from tests.unit.server.harness import DEADLINE_S, serving

from trimaran.client.outputs import ChoiceTimeline
from trimaran.clock import ManualClock
from trimaran.errors import NotFoundError
from trimaran.server.request_book import MAX_FINISHED, MAX_SHOWN, RequestBook

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


class _Request:
    """As much of a request as the book looks at."""

    def __init__(self, book, request_id):
        self.scope = {"method": "POST"}
        self.record = book.begin(self.scope, request_id)
        book.track(self)


# ---------------------------------------------------------------------------------- in the answer


@pytest.mark.parametrize("path", BODIES)
def test_a_timeline_is_given_where_it_is_asked_for(server, path):
    body = BODIES[path]
    assert "timeline" not in server.post(path, body).json()
    answer = server.post(path, {**body, "timeline": True}).json()
    timeline = answer["timeline"]
    # The fake says 1 s after the request came: submitted; 2 s: tokens; 3 s: the end.
    assert timeline["submitted_ms"] == pytest.approx(1000.0, abs=0.01)
    assert timeline["first_token_received_ms"] == pytest.approx(2000.0, abs=0.01)
    assert timeline["finished_ms"] == pytest.approx(3000.0, abs=0.01)
    assert 0 < timeline["tokenised_ms"] < DEADLINE_S * 1000
    assert timeline["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (timeline["output_tokens"], timeline["finish_reason"]) == (2, "length")
    assert "choices" not in timeline


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("usage", [False, True])
def test_in_a_stream_it_comes_last_beside_the_usage(server, path, usage):
    body = {**BODIES[path], "timeline": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    *chunks, last, done = server.events(path, body)
    assert done == "[DONE]"
    assert all("timeline" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["timeline"]["finished_ms"] == pytest.approx(3000.0, abs=0.01)
    assert ("usage" in last) is usage
    if usage:
        assert last["usage"]["completion_tokens"] == last["timeline"]["output_tokens"] == 2


def test_choices_of_several_prompts_are_numbered_as_in_the_answer(server):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "timeline": True}
    answer = server.post(COMPLETIONS, body).json()
    timeline = answer["timeline"]
    assert [choice["index"] for choice in timeline["choices"]] == [0, 1, 2, 3]
    assert [choice["output_tokens"] for choice in timeline["choices"]] == [3] * 4
    assert timeline["output_tokens"] == 12
    assert timeline["prompt_tokens"] == answer["usage"]["prompt_tokens"] == 4


# --------------------------------------------------------------------------------------- /requests


def test_what_runs_and_what_became_of_it():
    llm = FakeLLM()
    llm.hold_after = 1
    with serving(llm) as server:
        body = {**BODIES[COMPLETIONS], "max_tokens": 5, "stream": True}
        headers = {"content-type": "application/json", "x-request-id": "a/b"}
        with server.client.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
            pieces = response.iter_text()
            assert next(pieces)
            assert llm.holding.acquire(timeout=DEADLINE_S)
            listed = server.client.get("/requests")
            assert listed.headers["cache-control"] == "no-store"
            assert listed.json()["num_running"] == 1
            [request] = listed.json()["requests"]
            assert request.pop("age_s") >= 0
            assert request == {
                "id": "a/b",
                "route": COMPLETIONS,
                "state": "generating",
                "prompt_tokens": 2,
                "output_tokens": 1,
                "last_event": "last_token",
            }
            running = server.client.get("/requests/a/b").json()
            assert (running["state"], running["status"], running["error"]) == (
                "generating", 200, None,
            )  # fmt: skip
            assert running["timeline"]["finished_ms"] is None
        assert llm.aborted.acquire(timeout=DEADLINE_S)
        # The answer to a later request on the same loop comes after the end of the first.
        while server.client.get("/requests").json()["num_running"]:
            pass
        assert server.client.get("/requests/a/b").json()["state"] == "ended"


def test_a_refused_request_is_kept_with_what_it_was_told(server):
    body = {"prompt": "a", "temperature": -1}
    response = server.post(COMPLETIONS, body, headers={"x-request-id": "bad-1"})
    kept = server.client.get("/requests/bad-1").json()
    assert (kept["status"], kept["state"], kept["last_event"]) == (400, "ended", "received")
    assert kept["error"] == response.json()["error"]["message"]


def test_who_is_not_known_is_a_404(server):
    server.client.get("/v1/models", headers={"x-request-id": "models-1"})
    for request_id in ("models-1", "nobody"):
        response = server.client.get(f"/requests/{request_id}")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


def test_states_in_order_and_the_latest_of_an_id():
    clock = ManualClock(100.0)
    book = RequestBook(clock=clock)
    old = _Request(book, "twice")
    book.end(old.scope)
    older = _Request(book, "twice")
    clock.advance(1.0)
    request = _Request(book, "twice")

    def state():
        return book.details("twice")["state"]

    assert state() == "preparing"
    [timeline] = book.tokenised(request.record, 1)
    timeline.submitted = clock.wall()
    assert state() == "waiting"
    timeline.choices = [ChoiceTimeline(0, first_token_received=102.0)]
    assert state() == "generating"
    timeline.choices[0].finished = 103.0
    assert state() == "answering"
    clock.advance(2.5)
    assert [one["age_s"] for one in book.running()["requests"]] == [3.5, 2.5]
    book.end(older.scope)
    book.end(request.scope)
    clock.advance(9.0)
    assert state() == "ended"
    assert book.details("twice")["age_s"] == 2.5


def test_both_lists_are_bounded():
    book = RequestBook()
    requests = [_Request(book, f"r{n}") for n in range(MAX_SHOWN + 10)]
    shown = book.running()
    assert shown["num_running"] == MAX_SHOWN + 10
    assert [one["id"] for one in shown["requests"]] == [f"r{n}" for n in range(MAX_SHOWN)]
    for request in requests:
        book.end(request.scope)
    assert book.running() == {"num_running": 0, "requests": []}
    assert book.details(f"r{MAX_FINISHED + 9}")["state"] == "ended"
    with pytest.raises(NotFoundError):
        book.details("r9")


# ---------------------------------------------------------------------------------- --log-requests


def records_of(caplog, request_id):
    return [r for r in caplog.records if getattr(r, "request_id", None) == request_id]


def test_a_line_for_every_request_that_ends(caplog):
    caplog.set_level(logging.INFO, logger="trimaran")
    with serving(log_requests=True, api_key="key") as server:
        key = {"authorization": "Bearer key"}

        def line(path, body, request_id, **headers):
            server.post(path, body, headers={"x-request-id": request_id, **headers})
            server.client.get("/health")  # whose answer comes after that line
            [record] = records_of(caplog, request_id)
            return record

        record = line(CHAT, BODIES[CHAT], "good", **key)
        assert record.fields["route"] == f"POST {CHAT}"
        assert record.fields["status"] == 200
        assert record.fields["timeline"]["output_tokens"] == 2
        message = record.getMessage()
        assert message.startswith(f"request good: POST {CHAT} 200; length; tokens: prompt ")
        assert "output 2, preemptions 0; ms: tokenised " in message
        assert "submitted 1000.0, " in message
        assert "secret words" not in message + str(record.fields)

        record = line(COMPLETIONS, {"prompt": "a", "n": 0}, "bad", **key)
        assert record.fields["status"] == 400
        assert "; error 'n: " in record.getMessage()
        record = line(COMPLETIONS, BODIES[COMPLETIONS], "no-key")
        assert record.fields["status"] == 401
        assert record.fields["route"] == f"POST {COMPLETIONS}"
        record = line("/a%0Ab", {}, "nowhere", **key)
        assert (record.fields["route"], record.fields["status"]) == ("POST (none)", 404)
        assert "\n" not in record.getMessage()

        for quiet in ("/health", "/ready", "/metrics"):
            server.client.get(quiet, headers={"x-request-id": "quiet", **key})
        assert not records_of(caplog, "quiet")


def test_a_stream_that_fails_is_logged_with_its_cause(caplog):
    llm = FakeLLM()
    llm.fail_after = 1
    with serving(llm, log_requests=True) as server:
        caplog.set_level(logging.INFO, logger="trimaran")
        body = {**BODIES[COMPLETIONS], "max_tokens": 5, "stream": True}
        server.post(COMPLETIONS, body, headers={"x-request-id": "dies"})
    failure, line = records_of(caplog, "dies")
    assert "boom" in failure.getMessage(), "the log has the cause"
    assert line.fields["status"] == 200
    assert "the engine that served this request has ended" in line.fields["error"]
    assert "boom" not in line.fields["error"], "this is what the client was told"


def test_without_the_flag_there_is_none(caplog, server):
    caplog.set_level(logging.INFO, logger="trimaran")
    server.post(COMPLETIONS, BODIES[COMPLETIONS], headers={"x-request-id": "silent"})
    assert not records_of(caplog, "silent")
