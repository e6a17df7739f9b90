"""The main job on real input: the packaged Gemma behind the API, asked as the README does."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import BadRequestError, OpenAI

pytestmark = [pytest.mark.demo, pytest.mark.timeout(300)]

PROMPT = "The capital of France is"
# What transformers writes greedily from the same weights.
TEXT = (
    " the capital of the country of France. It is the capital of the country of France. It is"
    " the capital of the country of France. It is the capital of the country of France. It is"
)
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}


def test_the_curl_of_the_readme(demo):
    answer = httpx.post(demo.url + "/v1/completions", json=BODY, timeout=60).json()
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 40,
        "total_tokens": 46,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_official_client(demo):
    client = OpenAI(base_url=demo.url + "/v1", api_key="none", timeout=60)
    assert [model.id for model in client.models.list()] == ["demo", "gemma-3-270m"]
    whole = client.completions.create(**{**BODY, "model": "gemma-3-270m"})
    assert whole.choices[0].text == TEXT
    chunks = list(client.completions.create(**BODY, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert len(chunks) > 10


def test_32_at_once_say_the_same(demo):
    def ask(_):
        return httpx.post(demo.url + "/v1/completions", json=BODY, timeout=120).json()

    with ThreadPoolExecutor(32) as pool:
        texts = {answer["choices"][0]["text"] for answer in pool.map(ask, range(32))}
    assert texts == {TEXT}


def test_a_base_model_has_no_chat(demo):
    client = OpenAI(base_url=demo.url + "/v1", api_key="none", timeout=60)
    with pytest.raises(BadRequestError, match="--chat-template"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hi"}])


def test_offline_in_one_call():
    from trimaran import LLM, SamplingParams

    with LLM("demo") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40)
        first, second = llm.generate([PROMPT, PROMPT + TEXT[:12]], params)
    assert first.outputs[0].text == TEXT
    assert second.outputs[0].text.startswith(TEXT[12:])
