"""/v1/completions against arithmetic on the fake's script, and through the official client."""

import pytest
from openai import OpenAI
from tests.unit.server.fake_llm import BOS, SCRIPT, FakeLLM
from tests.unit.server.harness import serving

from trimaran.formats.architecture import GenerationDefaults

PATH = "/v1/completions"
FIRST = SCRIPT.encode()


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def joined(events, index=0):
    return "".join(
        choice["text"]
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_the_official_client_streaming_and_not(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    whole = client.completions.create(model="demo", prompt="a", max_tokens=20, temperature=0)
    assert whole.choices[0].text == FIRST[:20].decode("utf-8", "replace")
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == 2  # bos and a
    assert whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == 22
    stream = list(
        client.completions.create(
            model="gemma-3-270m",
            prompt="a",
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "length"
    assert stream[-1].choices == []
    assert stream[-1].usage.completion_tokens == 20


def test_prompts_in_every_form_and_order(server):
    for prompt, ids in (
        ("ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        server.llm.requests.clear()
        answer = server.post(PATH, {"prompt": prompt, "max_tokens": 3, "n": 2}).json()
        assert sorted(r[0] for r in server.llm.requests) == sorted(ids)
        assert [c["index"] for c in answer["choices"]] == list(range(2 * len(ids)))
        texts = [FIRST[:3].decode(), FIRST[1:4].decode("utf-8", "replace")]
        assert [c["text"] for c in answer["choices"]] == texts * len(ids)
        assert answer["usage"]["completion_tokens"] == 6 * len(ids)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
def test_a_stream_equals_the_whole(server, tokens_per_step):
    server.llm.tokens_per_step = tokens_per_step
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 45}
    whole = server.post(PATH, body).json()
    events = server.events(PATH, body)
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    for choice in whole["choices"]:
        mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        assert joined(events, choice["index"]) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert mine[-1]["finish_reason"] == "length"
        assert all(c["logprobs"] is None for c in mine)
    assert {e["id"] for e in events[:-1]} == {events[0]["id"]}
    server.llm.tokens_per_step = 1


def test_usage_in_streams(server):
    server.llm.cached_tokens = 1
    body = {"prompt": "ab", "n": 2, "max_tokens": 5}
    plain = server.events(PATH, body)
    assert all("usage" not in e for e in plain[:-1])
    once = server.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert all(e["usage"] is None for e in once[:-2])
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert once[-2]["choices"] == []
    assert once[-2]["usage"] == usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    running = server.events(PATH, {**body, "stream_options": options})
    counts = [e["usage"]["completion_tokens"] for e in running[:-1]]
    assert counts == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
    assert running[-2]["usage"] == usage
    server.llm.cached_tokens = 0


def test_echo(server):
    for prompt, text in (("The sky", "The sky"), ([84, 104], "Th"), ([BOS, 104], "h")):
        for tokens in (0, 3):
            body = {"prompt": prompt, "echo": True, "max_tokens": tokens}
            expected = text + FIRST[:tokens].decode()
            answer = server.post(PATH, body).json()
            assert answer["choices"][0]["text"] == expected
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == tokens
            assert joined(server.events(PATH, body)) == expected


def test_scoring_a_prompt(server):
    """T-B6: echo, logprobs 1 and max_tokens 0: one entry per prompt token, the first null."""
    body = {"prompt": "The sky", "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    answer = server.post(PATH, body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "The sky"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", *"The sky"]
    assert logprobs["token_logprobs"] == [None] + [-0.25] * 7
    assert logprobs["top_logprobs"][:2] == [None, {"T": -0.25}]
    # the start token is not in the text, so the first letter begins where it begins
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert answer["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 0,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    events = server.events(PATH, body)
    assert events[0]["choices"][0]["logprobs"] == logprobs
    assert joined(events) == "The sky"


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_legacy_logprobs_of_partial_characters(server, tokens_per_step):
    """T-B4, T-B12: 'Hi 😊' is 3 letters and 4 tokens that are a quarter of a character each."""
    server.llm.tokens_per_step = tokens_per_step
    body = {"prompt": "a", "max_tokens": 8, "logprobs": 2}
    whole = server.post(PATH, body).json()["choices"][0]["logprobs"]
    emoji = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x8a"]
    assert whole["tokens"] == ["H", "i", " ", *emoji, " "]
    assert whole["text_offset"] == [0, 1, 2, 3, 3, 3, 3, 4]
    assert whole["token_logprobs"] == [-0.25] * 8
    assert whole["top_logprobs"][0] == {"H": -0.25, "I": -0.5}
    assert whole["top_logprobs"][3] == {r"bytes:\xf0": -0.25, r"bytes:\xf1": -0.5}
    parts = [
        c["logprobs"] for e in server.events(PATH, body)[:-1] for c in e["choices"] if c["logprobs"]
    ]
    for column, values in whole.items():
        assert [value for part in parts for value in part[column]] == values
    server.llm.tokens_per_step = 1


def test_the_chosen_logprob_does_not_depend_on_how_many_are_asked_for(server):
    for count in (0, 1, 5, 20):
        body = {"prompt": "a", "max_tokens": 12, "logprobs": count}
        logprobs = server.post(PATH, body).json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-0.25] * 12
        assert all(
            top[token] == -0.25
            for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True)
        )


def test_extensions(server):
    body = {"prompt": "ab", "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}
    choice = server.post(PATH, body).json()["choices"][0]
    assert choice["token_ids"] == [72, 105]
    assert choice["prompt_token_ids"] == [BOS, 97, 98]
    assert choice["prompt_logprobs"] == [
        None,
        {"97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"}},
        {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
    ]
    del body["prompt_logprobs"]
    events = server.events(PATH, body)
    assert events[0]["choices"][0]["prompt_token_ids"] == [BOS, 97, 98]
    assert [i for e in events[:-1] for c in e["choices"] for i in c["token_ids"]] == [72, 105]
    assert all("prompt_token_ids" not in c for e in events[1:-1] for c in e["choices"])


def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 2.0,
        "seed": 11, "max_tokens": 9, "min_tokens": 3, "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 4,
    }  # fmt: skip
    lists = {"stop_token_ids": [5, 6], "allowed_token_ids": [1, 2], "bad_words": ["no"]}
    body = {"prompt": [1], **fields, **lists, "stop": "x", "logit_bias": {"7": -3}}
    body |= {"cache_salt": "s", "best_of": 2, "user": "me", "foo": 1}
    server.llm.requests.clear()
    response = server.post(PATH, body, headers={"x-request-id": "mine-1"})
    assert response.status_code == 200, response.text
    [(_, params, options)] = server.llm.requests
    for name, value in fields.items():
        assert getattr(params, name) == value, name
    for name, value in lists.items():
        assert getattr(params, name) == tuple(value), name
    assert params.stop == ("x",)
    assert params.logit_bias == {7: -3.0}
    assert options.pop("timeline").received > 0
    assert options == {
        "request_id": "mine-1",
        "priority": 0,
        "cache_salt": "s",
        "continues_prompt": True,
    }
    assert response.json()["id"] == "cmpl-mine-1"


def test_null_is_absent(server):
    server.llm.requests.clear()
    names = ("max_tokens", "n", "temperature", "stop", "suffix", "logprobs", "seed", "stream")
    body = {"prompt": "a", **dict.fromkeys(names)}
    assert server.post(PATH, body).status_code == 200
    [(_, params, _)] = server.llm.requests
    assert params.temperature == 1.0
    assert params.max_tokens == server.llm.max_model_len - 2


def test_the_models_generation_defaults():
    """T-G11: max_new_tokens is the default and no ceiling."""
    llm = FakeLLM()
    llm.source.generation = GenerationDefaults(
        max_new_tokens=20, sampling={"temperature": 0.25, "top_k": 64, "do_sample": 1}
    )
    with serving(llm) as server:
        assert server.post(PATH, {"prompt": "a"}).status_code == 200
        assert server.post(PATH, {"prompt": "a", "max_tokens": 50, "top_k": 3}).status_code == 200
        first, second = (params for _, params, _ in llm.requests)
    assert (first.max_tokens, first.temperature, first.top_k) == (20, 0.25, 64)
    assert (second.max_tokens, second.temperature, second.top_k) == (50, 0.25, 3)


def test_truncation(server):
    for keep, ids in ((2, [98, 99]), (9, [BOS, 97, 98, 99])):
        server.llm.requests.clear()
        body = {"prompt": "abc", "truncate_prompt_tokens": keep, "max_tokens": 1, "echo": True}
        answer = server.post(PATH, body).json()
        assert server.llm.requests[0][0] == ids
        assert answer["choices"][0]["text"] == "abc"[-keep:] + "H"
    server.llm.requests.clear()
    body = {"prompt": [5] * 600, "truncate_prompt_tokens": -1, "max_tokens": 12}
    assert server.post(PATH, body).status_code == 200
    assert len(server.llm.requests[0][0]) == server.llm.max_model_len - 12


def test_special_tokens_in_text(server):
    """T-K4: a text cannot spell special tokens unless it is allowed to; one rule."""
    for options, ids in (
        ({}, [BOS, *b"<bos>a"]),
        ({"add_special_tokens": False}, [*b"<bos>a"]),
        ({"add_special_tokens": False, "allow_special_tokens": True}, [BOS, 97]),
    ):
        server.llm.requests.clear()
        server.post(PATH, {"prompt": "<bos>a", "max_tokens": 1, **options})
        assert server.llm.requests[0][0] == ids
