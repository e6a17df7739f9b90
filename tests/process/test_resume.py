"""A request cut anywhere and continued gives what an undisturbed one does, through every client."""

import pytest
from tests.process.raw_peers import FrontEnd

from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.executor.mock import mock_salt, mock_token
from trimaran.messages import EngineCoreRequest, FinishReason, Ping
from trimaran.sampling_params import SamplingParams

MOCK = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))
PROMPT = [11, 12, 13, 14, 15]
EOS, STOP = 3, 77
FORCED = {"logit_bias": {EOS: 50.0, STOP: 100.0}}
EVERYTHING = {"logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1}

# name -> (sampling, fields of the request, tokens of the mock before an end, its last token,
# what is said of the end)
SCENARIOS = {
    "to max_tokens": ({"max_tokens": 9}, {}, 9, None, (FinishReason.LENGTH, None)),
    "seed and choice": (
        {"max_tokens": 7, "seed": 5, "n": 3, "temperature": 1.2, "top_p": 0.9},
        {"choice_index": 2},
        7, None, (FinishReason.LENGTH, None),
    ),
    "to a stop token": (
        {"max_tokens": 20, "min_tokens": 5, "stop_token_ids": (STOP,), **FORCED},
        {}, 5, STOP, (FinishReason.STOP, STOP),
    ),
    "to the end of the text": (
        {"max_tokens": 20, "min_tokens": 4, "logit_bias": {EOS: 100.0}},
        {"eos_token_ids": [EOS]},
        4, EOS, (FinishReason.STOP, None),
    ),
    "the end is the last token": (
        {"max_tokens": 6, "min_tokens": 5, "stop_token_ids": (STOP,), **FORCED},
        {}, 5, STOP, (FinishReason.STOP, STOP),
    ),
    "every feature": (
        {"max_tokens": 6, "min_p": 0.1, "top_k": 5, "frequency_penalty": -0.5, **EVERYTHING},
        {"bad_words_token_ids": [[1_000], [1_001, 1_002]], "cache_salt": "s", "priority": 3},
        6, None, (FinishReason.LENGTH, None),
    ),
}  # fmt: skip


@pytest.fixture(params=["inproc", "sync", "async"])
def client(request):
    client = FrontEnd(request.param, config=MOCK)
    client.wait_ready()
    yield client
    client.close()


def request_of(name, request_id, prior):
    sampling, fields, *_ = SCENARIOS[name]
    return EngineCoreRequest(
        request_id,
        list(PROMPT),
        SamplingParams(**{"seed": 0, **sampling}),
        prior_output_ids=list(prior),
        **fields,
    )


def expected_tokens(name):
    sampling, fields, count, last, _ = SCENARIOS[name]
    salt = mock_salt(sampling.get("seed", 0), fields.get("choice_index", 0))
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(mock_token(tokens[-1], len(tokens), salt))
    return tokens[len(PROMPT) :] + ([last] if last is not None else [])


def collect(client, request_ids):
    """id -> [outputs], until each has its end."""
    found, unfinished = {name: [] for name in request_ids}, set(request_ids)
    while unfinished:
        for output in client.get_output().outputs:
            found[output.request_id].append(output)
            if output.finish_reason is not None:
                unfinished.remove(output.request_id)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_wherever_it_is_cut(client, name):
    whole, end = expected_tokens(name), SCENARIOS[name][-1]
    cuts = range(len(whole) + 1)  # the last one: all was sent, only the end was not
    for cut in cuts:
        client.add_request(request_of(name, f"cut {cut}", whole[:cut]))
    results = collect(client, [f"cut {cut}" for cut in cuts])
    for cut in cuts:
        outputs, received = results[f"cut {cut}"], whole[:cut]
        for output in outputs:
            assert output.first_index == len(received), cut
            received = received + output.new_token_ids
            if SCENARIOS[name][0].get("logprobs") and output.new_token_ids:
                assert [row[0] for row in output.logprobs.token_ids] == output.new_token_ids
                assert len(output.logprobs.token_ids[0]) == 3
        assert received == whole, cut
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == end, cut
        assert outputs[-1].error is None


def test_what_is_at_its_end_already_costs_no_step(client):
    """Not even its prompt, which may be long."""
    whole = expected_tokens("to max_tokens")
    client.add_request(request_of("to max_tokens", "a", whole))
    (output,) = collect(client, ["a"])["a"]
    assert (output.first_index, output.new_token_ids) == (len(whole), [])
    (stats,) = client.control(Ping())
    assert (stats.step, stats.num_prompt_tokens) == (0, 0)


def test_more_than_was_asked_for_is_an_end_as_well(client):
    client.add_request(request_of("to max_tokens", "a", [5] * 40))
    (output,) = collect(client, ["a"])["a"]
    assert (output.first_index, output.finish_reason) == (40, FinishReason.LENGTH)


def test_cut_again_and_again(client):
    """Each time somewhere else, as where one engine after another dies."""
    whole, received = expected_tokens("every feature"), []
    for turn in range(len(whole)):
        client.add_request(request_of("every feature", f"turn {turn}", received))
        outputs = collect(client, [f"turn {turn}"])[f"turn {turn}"]
        tokens = [token for output in outputs for token in output.new_token_ids]
        received = received + tokens[:1]
    assert received == whole
