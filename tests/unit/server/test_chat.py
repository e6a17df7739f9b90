"""/v1/chat/completions and /tokenize, through the official client and raw."""

import pytest
from openai import OpenAI
from tests.unit.server.fake_llm import BOS, SCRIPT, FakeLLM
from tests.unit.server.harness import serving

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PROMPT = b"user:hi\nassistant:"
FIRST = SCRIPT.encode()


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def content(events, index=0):
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_the_official_client_streaming_and_not(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    whole = client.chat.completions.create(model="demo", messages=HI, max_tokens=20, n=2)
    assert [c.index for c in whole.choices] == [0, 1]
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == FIRST[:20].decode("utf-8", "replace")
    assert whole.choices[1].finish_reason == "length"
    assert whole.usage.prompt_tokens == 1 + len(PROMPT)
    assert whole.usage.completion_tokens == 40
    texts = ["", ""]
    for chunk in client.chat.completions.create(
        model="demo", messages=HI, max_tokens=20, n=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_one_start_token(server):
    """T-K4: the template writes it, the tokenizer does not add another."""
    server.llm.requests.clear()
    answer = server.post(PATH, {"messages": HI, "max_tokens": 1}).json()
    assert server.llm.requests[0][0] == [BOS, *PROMPT]
    assert answer["usage"]["prompt_tokens"] == 1 + len(PROMPT)


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_a_stream_equals_the_whole(server, tokens_per_step):
    server.llm.tokens_per_step = tokens_per_step
    body = {"messages": HI, "n": 2, "max_tokens": 30}
    whole = server.post(PATH, body).json()
    options = {"include_usage": True}
    events = server.events(PATH, {**body, "stream_options": options})
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == whole["usage"]
    for index in (0, 1):
        mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in mine[1:])
        assert content(events, index) == whole["choices"][index]["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    server.llm.tokens_per_step = 1


def test_logprobs_hold_exact_bytes(server):
    """T-B1: the bytes of all tokens joined are the UTF-8 of the text."""
    body = {"messages": HI, "max_tokens": 7, "logprobs": True, "top_logprobs": 2}
    choice = server.post(PATH, body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [e["bytes"] for e in entries] == [[byte] for byte in FIRST[:7]]
    joined = bytes(byte for e in entries for byte in e["bytes"])
    assert joined.decode() == choice["message"]["content"] == "Hi 😊"
    assert entries[0]["token"] == "H"
    assert entries[3]["token"] == r"bytes:\xf0"
    assert [t["logprob"] for t in entries[3]["top_logprobs"]] == [-0.25, -0.5]
    streamed = [
        e
        for event in server.events(PATH, body)[:-1]
        for c in event["choices"]
        if c["logprobs"]
        for e in c["logprobs"]["content"]
    ]
    assert streamed == entries
    without = server.post(PATH, {"messages": HI, "max_tokens": 2, "logprobs": True}).json()
    assert [e["top_logprobs"] for e in without["choices"][0]["logprobs"]["content"]] == [[], []]


def test_token_ids(server):
    body = {"messages": HI, "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}
    answer = server.post(PATH, body).json()
    assert answer["prompt_token_ids"] == [BOS, *PROMPT]
    assert answer["choices"][0]["token_ids"] == [72, 105]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == 1 + len(PROMPT)


def test_what_the_template_is_given(server):
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant"},
    ]
    body = {"messages": history, "tools": tools, "tool_choice": "none", "max_tokens": 1}
    server.llm.rendered.clear()
    server.llm.requests.clear()
    kwargs = {"enable_thinking": False}
    response = server.post(PATH, {**body, "chat_template_kwargs": kwargs})
    assert response.status_code == 200, response.text
    body["continue_final_message"] = True
    assert server.post(PATH, body).status_code == 200
    (messages, first), (_, second) = server.llm.rendered
    assert messages == history
    assert first == {
        "tools": tools,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "template_kwargs": kwargs,
    }
    assert second["continue_final_message"]
    assert not second["add_generation_prompt"]
    # an answer begins a text, unless it goes on within the last message
    assert [r[2]["continues_prompt"] for r in server.llm.requests] == [False, True]


def test_max_completion_tokens_wins(server):
    """T-F6"""
    server.llm.requests.clear()
    body = {"messages": HI, "max_tokens": 50, "max_completion_tokens": 5}
    assert server.post(PATH, body).json()["usage"]["completion_tokens"] == 5
    error = server.post(PATH, {**body, "max_completion_tokens": 5000}).json()["error"]
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": -5, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tool_choice"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
    ],
)
def test_refused(server, fields, param):
    response = server.post(PATH, {"messages": HI, "max_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    streamed = server.post(PATH, {"messages": HI, "max_tokens": 1, "stream": True, **fields})
    assert streamed.status_code == 400
    assert streamed.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": [], "tool_choice": None},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True},
    ],
)
def test_accepted(server, fields):
    assert server.post(PATH, {"messages": HI, "max_tokens": 1, **fields}).status_code == 200


def test_the_templates_own_message_reaches_the_client(server):
    """T-K1"""
    body = {"messages": [{"role": "system", "content": "x"}, *HI]}
    assert "System role not supported" in server.post(PATH, body).json()["error"]["message"]


def test_a_base_model_names_the_flag():
    with serving(FakeLLM(has_template=False)) as server:
        for path in (PATH, "/chat/completions", "/tokenize"):
            response = server.post(path, {"messages": HI})
            assert response.status_code == 400
            assert "--chat-template" in response.json()["error"]["message"]
        server.still_works()


def test_a_template_in_the_request_where_it_is_trusted():
    with serving(FakeLLM(has_template=False), trust_request_chat_template=True) as server:
        template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
        body = {"messages": HI, "max_tokens": 1, "chat_template": template}
        assert server.post(PATH, body).status_code == 200
        assert server.llm.requests[0][0] == [BOS, *b"[hi]"]
        for bad in ("{% for %}", "{{ raise_exception('not so') }}", "{{ ''.__class__.mro() }}"):
            response = server.post(PATH, {**body, "chat_template": bad})
            assert response.status_code == 400, bad
        server.still_works()


def test_tokenize(server):
    answer = server.post("/tokenize", {"prompt": "é", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": server.llm.max_model_len,
        "tokens": [BOS, 0xC3, 0xA9],
        "token_strs": ["<bos>", r"bytes:\xc3", r"bytes:\xa9"],
    }
    assert server.post("/tokenize", {"prompt": "<bos>", "add_special_tokens": False}).json()[
        "tokens"
    ] == list(b"<bos>")
    chat = server.post("/tokenize", {"messages": HI}).json()
    assert chat["tokens"] == [BOS, *PROMPT]
    for bad in ({}, {"prompt": "a", "messages": HI}, {"prompt": 5}, {"messages": []}):
        assert server.post("/tokenize", bad).status_code == 400


def test_detokenize(server):
    answer = server.post("/detokenize", {"tokens": [BOS, *"é".encode()]}).json()
    assert answer == {"prompt": "<bos>é"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for bad in ([-1], [260], ["a"], [1.5], None, "abc", [2**40]):
        response = server.post("/detokenize", {"tokens": bad})
        assert response.status_code == 400, bad
        assert response.json()["error"]["param"] == "tokens"
