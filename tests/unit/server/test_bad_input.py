"""Whatever is sent, the answer is a 4xx in one small JSON shape, and the next request works."""

import contextlib
import http.client
import json
import socket

import pytest
from tests.unit.server.fake_llm import FakeLLM
from tests.unit.server.harness import DEADLINE_S, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
INTEGERS = (
    "max_tokens", "n", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs", "best_of",
    "truncate_prompt_tokens", "priority",
)  # fmt: skip
OTHERS = (
    "prompt", "model", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output",
    "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens", "add_special_tokens",
    "cache_salt", "return_token_ids", "stream", "stream_options", "echo",
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running
        running.still_works()


def refused(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 8192
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', '"0.5"', "true", "[]", "{}", "1e9"]
)
def test_numbers(server, name, value):
    error = refused(server.post(COMPLETIONS, f'{{"prompt":"a","{name}":{value}}}'))
    assert error["param"] == name


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    "value", ["NaN", "1.5", "1e3", '"1"', "true", "[1]", "{}", "1" + "0" * 30, "-" + "9" * 30]
)
def test_integers(server, name, value):
    body = f'{{"prompt":"a","{name}":{value}}}'
    error = refused(server.post(COMPLETIONS, body))
    assert error["param"] == name


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("value", ["5.5", '{"a":[1]}', '[{"a":1}]', "[[[[1]]]]", "NaN"])
def test_wrong_types(server, name, value):
    if name == "stream_options" and value.startswith("{"):
        return  # an object is right, and unknown options are ignored as unknown fields are
    body = {"prompt": '"a"', name: value}
    raw = "{" + ",".join(f'"{key}":{text}' for key, text in body.items()) + "}"
    assert refused(server.post(COMPLETIONS, raw))["param"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [260]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 1, "best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"top_p": 1.0000001}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop_token_ids": [99999999], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"99999999": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 5}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1_000_000}, "cache_salt"),
        ({"suffix": "return x"}, "suffix"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"n": 128, "max_tokens": 10**6}, "max_tokens"),
    ],
)
def test_values_out_of_range(server, fields, param):
    error = refused(server.post(COMPLETIONS, {"prompt": "a", **fields}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0}, {"top_p": 1}, {"top_k": 0}, {"top_k": -1}, {"top_k": 10**6}, {"min_p": 1},
        {"temperature": 0, "top_k": 3, "top_p": 0.1, "min_p": 0.9, "seed": 1}, {"foo": 1},
        {"suffix": None}, {"best_of": 1}, {"seed": -5}, {"prompt": ""}, {"prompt": [""]},
    ],
)  # fmt: skip
def test_values_in_range(server, fields):
    response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text


def test_an_empty_prompt_without_a_start_token():
    """T-E1"""
    with serving(FakeLLM(adds_bos=False)) as server:
        for prompt in ("", [""], ["a", ""]):
            error = refused(server.post(COMPLETIONS, {"prompt": prompt}))
            assert "empty" in error["message"]
            assert error["param"] == "prompt"
        server.still_works()


def test_lengths(server):
    """T-F1, T-F3: with the right numbers."""
    limit = server.llm.max_model_len
    error = refused(server.post(COMPLETIONS, {"prompt": [5] * 8, "max_tokens": limit - 4}))
    assert error["param"] == "max_tokens"
    for number in (limit, 8, limit - 4):
        assert f" {number}" in error["message"]
    for length in (limit, limit + 1):
        error = refused(server.post(COMPLETIONS, {"prompt": [5] * length}))
        assert error["param"] == "prompt"
        assert f" {length} tokens" in error["message"]
        assert f" {limit} tokens" in error["message"]
    answer = server.post(COMPLETIONS, {"prompt": [5] * (limit - 1)}).json()
    assert answer["usage"]["completion_tokens"] == 1


def test_choices_times_tokens():
    with serving(max_total_choice_tokens=100) as server:
        error = refused(server.post(COMPLETIONS, {"prompt": "a", "n": 4, "max_tokens": 26}))
        assert error["param"] == "max_tokens"
        assert "100" in error["message"]
        answer = server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2}).json()
        assert answer["usage"]["completion_tokens"] == 100
        server.still_works()


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"nonsense", b"[]", b"null", b"5", b'"text"', b"\xff\xfe", b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud83d"}', b'{"prompt":"a"}x', b"{'prompt':'a'}", b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000, b'{"prompt":"a","x":' + b'{"a":' * 5000,
        b'{"prompt":"a","n":1' + b"0" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(server, raw):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        refused(server.post(path, raw))


def test_an_error_never_repeats_the_input(server):
    """T-O3"""
    secret = "S3CR3T" * 10
    bodies = [
        {"messages": [{"role": secret * 5, "content": secret}] * 2000},
        {"messages": [secret] * 2000},
        {"messages": [{"role": "user", "content": {secret: 1}}] * 2000},
        {"messages": "x", secret * 100: 1, "temperature": secret},
        {"messages": [{"role": "user", "content": "a"}], "logit_bias": {secret * 2000: 1}},
    ]
    for body in bodies:
        error = refused(server.post(CHAT, body))
        assert error["message"].count("S3CR3T") <= 40
    error = refused(server.post(CHAT, bodies[1]))
    assert "1997 more" in error["message"]
    refused(server.post(COMPLETIONS, {"prompt": "a", "model": "m" * 400}), 404)
    refused(server.post(COMPLETIONS, {"prompt": "a", "model": "m" * 4000}))


def test_media_types(server):
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": ""},
        {"content-encoding": "gzip"},
    ):
        refused(server.post(COMPLETIONS, {"prompt": "a"}, headers=headers), 415)
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post(COMPLETIONS, body, headers=headers).status_code == 200


def test_routes_and_methods(server):
    for path in ("/nope", "/v1/completions/", "/v1//completions", "/V1/completions", "/docs"):
        error = refused(server.post(path, {}), 404)
        assert error["type"] == "not_found_error"
    response = server.client.get(COMPLETIONS)
    refused(response, 405)
    assert response.headers["allow"] == "POST"
    refused(server.client.delete("/health"), 405)


def test_models(server):
    cards = server.client.get("/v1/models").json()
    assert [card["id"] for card in cards["data"]] == ["demo", "gemma-3-270m"]
    assert cards["data"][0]["max_model_len"] == server.llm.max_model_len
    assert server.client.get("/v1/models/demo").json()["id"] == "demo"
    error = refused(server.client.get("/v1/models/other"), 404)
    assert error["code"] == "model_not_found"
    for path in (COMPLETIONS, CHAT):
        body = {"model": "gpt-4", "prompt": "a", "messages": [{"role": "user"}]}
        error = refused(server.post(path, body), 404)
        assert error["param"] == "model"
        assert server.post(path, {**body, "model": "gemma-3-270m"}).json()["model"] == (
            "gemma-3-270m"
        )


def test_served_model_names():
    with serving(model="org/name", served_model_name="a,b") as server:
        ids = [card["id"] for card in server.client.get("/v1/models").json()["data"]]
        assert ids == ["a", "b"]
        refused(server.post(COMPLETIONS, {"model": "org/name", "prompt": "a"}), 404)
    with serving(model="org/name") as server:
        assert server.client.get("/v1/models/org/name").json()["id"] == "org/name"
        refused(server.post(COMPLETIONS, {"model": "demo", "prompt": "a"}), 404)


def test_body_size_declared_and_chunked():
    with serving(max_request_bytes="2K") as server:
        big = json.dumps({"prompt": "a" * 3000})
        refused(server.post(COMPLETIONS, big), 413)
        pieces = (big[i : i + 100].encode() for i in range(0, len(big), 100))
        headers = {"content-type": "application/json"}
        refused(server.client.post(COMPLETIONS, content=pieces, headers=headers), 413)
        declared = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        declared.putrequest("POST", COMPLETIONS)
        declared.putheader("Content-Type", "application/json")
        declared.putheader("Content-Length", str(10**12))
        declared.endheaders()
        assert declared.getresponse().status == 413  # before a byte of it was sent
        declared.close()
        server.still_works()


def raw_answer(port, data):
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        with contextlib.suppress(OSError):  # it may be refused before all is sent
            connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_heads_that_are_no_http_or_too_large(server):
    for data, expected in (
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000, 431),
        (b"GET /" + b"y" * 100_000, 431),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ny: " + b"y" * 70_000 + b"\r\n\r\n", 431),
    ):
        status, body = raw_answer(server.port, data)
        assert status == expected, data[:40]
        assert json.loads(body)["error"]["message"]
    server.still_works()


def test_request_ids(server):
    body = {"prompt": "a", "max_tokens": 1}
    response = server.post(COMPLETIONS, body, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"
    for unusable in ("x" * 129, 'quo"te', "sp ace", ""):
        response = server.post(COMPLETIONS, body, headers={"x-request-id": unusable})
        own = response.headers["x-request-id"]
        assert own.startswith("req-")
        assert response.json()["id"] == f"cmpl-{own}"
    first, second = (server.client.get("/nope").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_the_schema_names_every_body(server):
    schema = server.client.get("/openapi.json").json()
    place = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    name = place["application/json"]["schema"]["$ref"].rpartition("/")[2]
    properties = schema["components"]["schemas"][name]["properties"]
    assert {*NUMBERS, *INTEGERS, *OTHERS} <= set(properties)
