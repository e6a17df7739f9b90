"""Ends of requests that are not the usual one: clients gone, engines dead, overload, shutdown."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.server.fake_llm import FakeLLM
from tests.unit.server.harness import DEADLINE_S, serving

from trimaran.server.errors import ErrorBoundary
from trimaran.server.request_book import RequestBook

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def send(server, path, body):
    """A raw connection with a request on it."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return connection


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 3])
def test_a_client_that_leaves_aborts_its_request(path, stream, hold_after):
    """T-P4: before the first token and in the middle, streamed or not."""
    llm = FakeLLM()
    llm.hold_after = hold_after if stream else 0
    with serving(llm) as server:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 20, "stream": stream}
        requests = 2
        if path == CHAT:
            body |= {"prompt": None, "messages": MESSAGES}
            requests = 1
        connection = send(server, path, body)
        for _ in range(requests):
            assert llm.holding.acquire(timeout=DEADLINE_S)
        connection.close()
        for _ in range(requests):
            assert llm.aborted.acquire(timeout=DEADLINE_S)
        llm.hold_after = None
        server.still_works()


def test_a_client_that_leaves_while_others_stream():
    llm = FakeLLM()
    llm.step_s = 0.002
    with serving(llm) as server, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "a", "max_tokens": 300}
        futures = [pool.submit(server.events, COMPLETIONS, body) for _ in range(4)]
        leaving = send(server, COMPLETIONS, {**body, "stream": True})
        assert leaving.recv(10)
        leaving.close()
        assert llm.aborted.acquire(timeout=DEADLINE_S)
        for future in futures:
            events = future.result(DEADLINE_S)
            assert events[-1] == "[DONE]"
        assert not llm.aborted.acquire(blocking=False)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("prompts", [1, 3])
def test_an_engine_that_dies_in_the_middle(path, prompts):
    """T-O5: an error event and the end; never [DONE], never a finish_reason."""
    llm = FakeLLM()
    llm.fail_after = 5
    with serving(llm) as server:
        body = {"prompt": ["a"] * prompts, "messages": MESSAGES, "max_tokens": 20}
        if path == CHAT:
            del body["prompt"]
        events = server.events(path, body)
        assert "[DONE]" not in events
        assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])
        assert set(events[-1]) == {"error"}
        assert events[-1]["error"]["type"] == "engine_dead"
        assert "secret" not in json.dumps(events)


def test_an_engine_that_dies_before_the_first_token():
    for stream in (False, True):
        llm = FakeLLM()
        llm.fail_after = 0
        with serving(llm) as server:
            body = {"prompt": "a", "max_tokens": 20, "stream": stream}
            response = server.post(COMPLETIONS, body)
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "engine_dead"
            assert "secret" not in response.text
            assert server.post(COMPLETIONS, body).status_code == 503


def test_one_prompt_of_several_is_wrong():
    """Nothing of the batch runs."""
    with serving() as server:
        for stream in (False, True):
            body = {"prompt": [[1], [600]], "max_tokens": 20, "stream": stream}
            assert server.post(COMPLETIONS, body).status_code == 400
            body = {"prompt": [[1], [2]], "stop_token_ids": [999], "stream": stream}
            assert server.post(COMPLETIONS, body).status_code == 400
        assert server.llm.requests == []
        server.still_works()


def refusals(server):
    text = server.client.get("/metrics").text
    [line] = [x for x in text.splitlines() if x.startswith("trimaran:requests_refused_total{")]
    return float(line.split()[-1])


def test_overload_is_refused_at_once():
    """T-O8: limit 4, 50 at once; the surplus gets 429, the others finish."""
    llm = FakeLLM()
    llm.hold_after = 0
    with serving(llm, max_queued_requests=4) as server, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "a", "max_tokens": 5}
        gone = [send(server, COMPLETIONS, body) for _ in range(4)]
        for _ in gone:
            assert llm.holding.acquire(timeout=DEADLINE_S)
        for path in (COMPLETIONS, CHAT):
            for stream in (False, True):
                response = server.post(path, {**body, "messages": MESSAGES, "stream": stream})
                assert response.status_code == 429
                assert response.json()["error"]["type"] == "overloaded_error"
                assert int(response.headers["retry-after"]) >= 1
        assert refusals(server) == 4
        assert server.client.get("/health").status_code == 200
        gone.pop().close()
        assert llm.aborted.acquire(timeout=DEADLINE_S)
        llm.hold_after = None
        assert server.post(COMPLETIONS, body).status_code == 200
        # n and prompts count, and more than the limit can never be served
        assert server.post(COMPLETIONS, {**body, "n": 2}).status_code == 429
        assert server.post(COMPLETIONS, {**body, "prompt": ["a"] * 5}).status_code == 400
        for connection in gone:
            connection.close()
            assert llm.aborted.acquire(timeout=DEADLINE_S)
        statuses = list(pool.map(lambda _: server.post(COMPLETIONS, body).status_code, range(20)))
        assert statuses == [200] * 20


def test_draining_lets_running_requests_end():
    """S38: new requests get 503 meanwhile."""
    llm = FakeLLM()
    llm.step_s = 0.002
    with serving(llm) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a", "max_tokens": 300}
        running = pool.submit(server.events, COMPLETIONS, body)
        while not llm.requests:
            assert server.client.get("/health").status_code == 200
        server.drain(grace_s=DEADLINE_S)
        while server.client.get("/ready").status_code == 200:
            pass
        response = server.post(COMPLETIONS, body)
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
        assert running.result(DEADLINE_S)[-1] == "[DONE]"


def test_what_outlasts_the_drain_gets_an_error():
    llm = FakeLLM()
    llm.hold_after = 3
    answers = {}
    with serving(llm) as server:

        def call(stream):
            body = {"prompt": "a", "max_tokens": 20, "stream": stream}
            answers[stream] = server.post(COMPLETIONS, body)

        threads = [threading.Thread(target=call, args=(stream,)) for stream in (False, True)]
        llm.hold_after = 0
        threads[0].start()
        assert llm.holding.acquire(timeout=DEADLINE_S)
        llm.hold_after = 3
        threads[1].start()
        assert llm.holding.acquire(timeout=DEADLINE_S)
        server.drain(grace_s=0.05)
        for thread in threads:
            thread.join(DEADLINE_S)
    assert answers[False].status_code == 503
    assert "stopped" in answers[False].json()["error"]["message"]
    assert answers[True].status_code == 200
    last = answers[True].text.strip().split("\n\n")[-1]
    assert "stopped" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in answers[True].text


def test_a_slow_reader_costs_only_itself():
    """T-P6: the others finish while one client does not read at all."""
    with serving() as server:
        server.llm.max_model_len = 200_000
        body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
        slow = send(server, COMPLETIONS, body)
        for _ in range(4):
            assert server.events(COMPLETIONS, {"prompt": "a", "max_tokens": 200})[-1] == "[DONE]"
        slow.close()
        assert server.llm.aborted.acquire(timeout=DEADLINE_S)
        server.still_works()


def test_an_answer_that_has_begun_is_not_begun_again():
    """The boundary leaves it to the server to cut the connection."""
    sent = []

    async def broken(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("too late")

    async def send(message):
        sent.append(message["type"])

    async def run():
        scope = {"type": "http", "method": "GET", "headers": []}
        await ErrorBoundary(broken, book=RequestBook())(scope, None, send)

    with pytest.raises(RuntimeError, match="too late"):
        asyncio.run(run())
    assert sent == ["http.response.start"]
