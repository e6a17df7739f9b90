# ruff: noqa: F811  (the fixtures of another file)
"""Embeddings in the place of a prompt's tokens: the rows of those tokens give their output.

The rows come from transformers' own embedding, scaled where the family scales (Gemma).
"""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.model.test_engine_real import (
    LENGTHS,
    OUTPUT,
    Engine,
    Model,
    expected,  # noqa: F401
    model,  # noqa: F401
    prompt,
    request,
    run_all,
    small_engine,
    tokens_of,
)

from trimaran import LLM, SamplingParams
from trimaran.bench.tiny_model import HIDDEN, write_tiny_model
from trimaran.client.async_llm import AsyncLLM
from trimaran.config import resolve
from trimaran.errors import InvalidRequestError
from trimaran.ipc.codec import Buffer
from trimaran.messages import EngineCoreRequest, FinishReason, Tensor

NO_TOKENS = 0


def rows_of(model: Model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.reference.get_input_embeddings()(torch.tensor(tokens)).clone()


def with_embeds(request: EngineCoreRequest, rows: torch.Tensor) -> EngineCoreRequest:
    """The same request, its tokens unknown."""
    if rows.dtype == torch.bfloat16:
        data = rows.contiguous().view(torch.uint16).numpy()
    else:
        data = rows.contiguous().numpy()
    name = str(rows.dtype).removeprefix("torch.")
    request.prompt_embeds = Tensor(name, tuple(rows.shape), Buffer(data.tobytes()))
    request.prompt_token_ids = [NO_TOKENS] * len(rows)
    return request


def embeds_request(model: Model, length: int, output: int = OUTPUT) -> EngineCoreRequest:
    tokens = prompt(length)
    return with_embeds(request(str(length), tokens, output), rows_of(model, tokens))


def all_requests(model: Model) -> list[EngineCoreRequest]:
    return [embeds_request(model, length) for length in LENGTHS]


@pytest.mark.parametrize("budget", [256, 11])
def test_as_the_tokens_themselves(model, expected, budget):
    """Whole, and in chunks that no border fits; then once more, from no cache."""
    engine = Engine(model, budget=budget)
    for _ in range(2):
        results = engine.run(all_requests(model))
        assert tokens_of(results) == expected
        assert {result.num_cached for result in results.values()} == {0}


def test_beside_prompts_of_tokens(model, expected):
    engine = Engine(model)
    run_all(engine)  # fills the cache, with placeholders' tokens among others
    engine.run([request("zeros", [NO_TOKENS] * 64)])
    mixed = [
        embeds_request(model, length) if length % 2 else request(str(length), prompt(length))
        for length in LENGTHS
    ]
    assert tokens_of(engine.run(mixed)) == expected


def test_preempted(model):
    lengths, output = (9, 17, 25, 33), 40
    engine = small_engine(model)
    results = engine.run([embeds_request(model, n, output) for n in lengths])
    assert tokens_of(results) == {n: model.greedy(prompt(n), output)[0] for n in lengths}
    assert engine.core.stats().num_preemptions > 0


def test_continued(model, expected):
    for cut in (1, 7, OUTPUT - 1):
        resumed = embeds_request(model, 33)
        resumed.prior_output_ids = expected[33][:cut]
        tokens = []
        engine = Engine(model)
        engine.core.add_request(resumed)
        while engine.core.has_work():
            for message in engine.core.step().values():
                for output in message.outputs:
                    assert output.first_index == cut + len(tokens)
                    tokens += output.new_token_ids
        assert tokens == expected[33][cut:]


def test_the_rows_matter(model, expected):
    rows = rows_of(model, prompt(33))
    rows[3] = -rows[3]
    (result,) = Engine(model).run([with_embeds(request("33", []), rows)]).values()
    assert result.tokens != expected[33]


def test_bfloat16_rows_are_what_float32_rows_of_them_are(model):
    rows = rows_of(model, prompt(33)).bfloat16()
    engine = Engine(model)
    half, whole = (
        engine.run([with_embeds(request("a", []), each)])["a"] for each in (rows, rows.float())
    )
    assert half.tokens == whole.tokens
    assert half.logprobs == whole.logprobs


def test_rows_that_are_not_numbers_fail_their_request_alone(model, expected):
    engine, rows = Engine(model), rows_of(model, prompt(33))
    rows[5, 5] = float("nan")
    engine.core.add_request(with_embeds(request("bad", []), rows))
    engine.core.add_request(request("33", prompt(33)))
    tokens, ends = {"bad": [], "33": []}, {}
    while engine.core.has_work():
        for message in engine.core.step().values():
            for output in message.outputs:
                tokens[output.request_id] += output.new_token_ids
                ends[output.request_id] = output.finish_reason, output.error
    assert tokens == {"bad": [], "33": expected[33]}
    assert ends["bad"][0] is FinishReason.ERROR
    assert "not numbers" in ends["bad"][1]


def test_rows_of_another_width_are_refused(model):
    with pytest.raises(InvalidRequestError, match="model rows of 64") as caught:
        Engine(model).core.add_request(with_embeds(request("a", []), torch.zeros(3, 63)))
    assert caught.value.param == "prompt_embeds"


# ------------------------------------------------------------------------- the library's surface

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SETTINGS = {"dtype": "float32", "threads": 1, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def table(folder):
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), multiprocess=False, **SETTINGS) as llm:
        yield llm


def test_a_prompt_of_embeddings_and_one_of_tokens(llm, table):
    ids = [40, 41, 42, 43]
    (expected_output,) = llm.generate(ids, GREEDY)
    for rows in (table[ids], table[ids].numpy(), table[ids].numpy().astype(np.float64)):
        (alone,) = llm.generate({"prompt_embeds": rows}, GREEDY)
        assert alone.outputs[0].token_ids == expected_output.outputs[0].token_ids
    results = llm.generate([ids, {"prompt_embeds": table[ids]}, "hello"], GREEDY)
    assert results[1].outputs[0].token_ids == expected_output.outputs[0].token_ids
    assert len(results[1].prompt_token_ids) == len(ids)
    assert results[1].prompt is None


BAD = [
    (np.zeros((3, HIDDEN - 1)), "takes"),
    (np.zeros(HIDDEN), "takes"),
    (np.zeros((0, HIDDEN)), "takes"),
    (np.zeros((2, 3, HIDDEN)), "takes"),
    (np.full((3, HIDDEN), np.nan), "finite"),
    (np.full((3, HIDDEN), 1e300), "finite"),
    ("text", "array of float32"),
    (None, "takes"),
    (torch.zeros(3, HIDDEN, dtype=torch.bfloat16), r"tensor\.detach"),
    (torch.zeros(3, HIDDEN, requires_grad=True), r"tensor\.detach"),
    (np.zeros((5000, HIDDEN)), "limit"),
]


@pytest.mark.parametrize(("rows", "text"), BAD, ids=[text for _, text in BAD])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_is_no_prompt_is_refused_by_name(llm, rows, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        llm.generate({"prompt_embeds": rows}, GREEDY)
    assert caught.value.param in ("prompt_embeds", "prompt")


@pytest.mark.parametrize("bad", [{}, {"prompt_embeds": np.zeros((1, HIDDEN)), "more": 1}])
def test_a_dict_has_that_one_key(llm, bad):
    with pytest.raises(InvalidRequestError, match="has the keys"):
        llm.generate(bad, GREEDY)


def test_log_probabilities_of_such_a_prompt_are_refused(llm, table):
    with pytest.raises(InvalidRequestError, match="prompt of tokens"):
        llm.generate({"prompt_embeds": table[:3]}, SamplingParams(prompt_logprobs=1))


async def async_tokens(folder, prompts):
    found = []
    config = resolve({"model": str(folder), **SETTINGS}).engine
    async with await AsyncLLM.create(config) as llm:
        for prompt in prompts:
            async for item in llm.generate(prompt, GREEDY):
                last = item
            found.append(last.outputs[0].token_ids)
    return found


def test_through_processes(folder, table):
    """More than the threshold of a frame of its own."""
    ids = [40 + i % 900 for i in range(200)]
    tokens, embeds = asyncio.run(async_tokens(folder, [ids, {"prompt_embeds": table[ids]}]))
    assert tokens == embeds
