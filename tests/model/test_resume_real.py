"""Cut and continued on real arithmetic: tokens and log-probabilities, bit for bit.

With --batch-invariant, so that the company of the other cuts changes nothing either.
"""

import pytest

from trimaran.bench.tiny_model import VOCAB_SIZE, write_tiny_model
from trimaran.client.inproc import InprocClient
from trimaran.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from trimaran.messages import EngineCoreRequest, FinishReason
from trimaran.sampling_params import SamplingParams

PROMPT = list(range(40, 61))
OUTPUT = 8


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    client = InprocClient(
        EngineConfig(
            model=ModelConfig(model=str(folder), dtype="float32", batch_invariant=True),
            cache=CacheConfig(block_size=8, kv_cache_memory_bytes=64 << 20),
            executor=ExecutorConfig(threads=1),
        )
    )
    yield client
    client.shutdown()


def run(client, requests):
    """id -> (tokens, rows of log-probabilities, finish reason, stop reason)."""
    results = {}
    for request in requests:
        results[request.request_id] = ([], [], [])
        client.add_request(request)
    while not all(end for *_, end in results.values()):
        for output in client.get_output().outputs:
            tokens, rows, end = results[output.request_id]
            assert output.error is None
            request = next(r for r in requests if r.request_id == output.request_id)
            assert output.first_index == len(request.prior_output_ids) + len(tokens)
            tokens += output.new_token_ids
            if output.logprobs is not None:
                columns = output.logprobs
                rows += zip(columns.token_ids, columns.logprobs, columns.ranks, strict=True)
            if output.finish_reason is not None:
                end += [output.finish_reason, output.stop_reason]
    return results


def request_of(name, prior=(), *, sampling, bad_words=(), choice_index=0, eos=()):
    params = {"seed": 7, "max_tokens": OUTPUT, "logprobs": 2, "temperature": 1.0} | sampling
    return EngineCoreRequest(
        name,
        list(PROMPT),
        SamplingParams(**params),
        list(eos),
        choice_index=choice_index,
        prior_output_ids=list(prior),
        bad_words_token_ids=[list(word) for word in bad_words],
    )


FEW_TOKENS = tuple(range(100, 108))  # so that penalties and bad words have something to do

SCENARIOS = {
    "greedy": {"sampling": {"temperature": 0.0}},
    "seeded": {"sampling": {}},
    "another choice": {"sampling": {"n": 4}, "choice_index": 3},
    "nucleus": {"sampling": {"top_p": 0.7, "top_k": 50, "min_p": 0.01, "temperature": 1.4}},
    "penalties": {
        "sampling": {
            "temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 1.0,
            "frequency_penalty": 0.7, "allowed_token_ids": FEW_TOKENS,
        }
    },
    "logit_bias": {"sampling": {"logit_bias": {300: 5.0, 301: 5.0, 302: 4.0}}},
    "bad words": {
        "sampling": {"allowed_token_ids": FEW_TOKENS},
        "bad_words": [[101, 102], [103], [100, 104, 105]],
    },
    "min_tokens, then the end": {
        "sampling": {"min_tokens": 4, "logit_bias": {9: 100.0}}, "eos": [9],
    },
    "a stop token of the user's": {
        "sampling": {"min_tokens": 2, "stop_token_ids": (9,), "logit_bias": {9: 100.0}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_wherever_it_is_cut(client, name):
    scenario = SCENARIOS[name]
    tokens, rows, end = run(client, [request_of("whole", **scenario)])["whole"]
    assert len(tokens) > 2
    cuts = range(len(tokens) + 1)
    results = run(client, [request_of(f"{cut}", tokens[:cut], **scenario) for cut in cuts])
    for cut in cuts:
        assert results[str(cut)] == (tokens[cut:], rows[cut:], end), cut


def test_the_scenarios_do_what_they_are_named_for(client):
    tokens = {
        name: run(client, [request_of("a", **scenario)])["a"]
        for name, scenario in SCENARIOS.items()
    }
    assert len({tuple(found) for found, *_ in tokens.values()}) == len(SCENARIOS)
    assert len(set(tokens["penalties"][0])) == len(FEW_TOKENS)  # none comes twice
    pairs = list(zip(tokens["bad words"][0], tokens["bad words"][0][1:], strict=False))
    assert (101, 102) not in pairs
    assert 103 not in tokens["bad words"][0]
    assert (len(tokens["min_tokens, then the end"][0]), FinishReason.STOP) == (
        5,
        tokens["min_tokens, then the end"][2][0],
    )
    assert tokens["a stop token of the user's"][2] == [FinishReason.STOP, 9]


EDGES = {
    "temperature": (5e-324, 1e-6, 100.0),
    "top_p": (0.0, 5e-324, 1.0),
    "top_k": (-1, 0, 1, VOCAB_SIZE, (1 << 31) - 1),
    "min_p": (5e-324, 1.0),
    "repetition_penalty": (1e-6, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "min_tokens": (OUTPUT,),
    "logit_bias": (dict.fromkeys(range(VOCAB_SIZE), -100.0), dict.fromkeys(range(900), 100.0)),
    "allowed_token_ids": ((0,), (5, 5, 5), tuple(range(VOCAB_SIZE))),
    "stop_token_ids": (tuple(range(VOCAB_SIZE)), (3, 3)),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "bad_words_token_ids": ([[]], [[1 << 63, 5]], [[-5]], [[(1 << 64) - 1]], [[5]] * 5000),
}


@pytest.mark.parametrize("field", EDGES)
def test_the_edges_of_what_is_accepted_are_computed(client, field):
    requests = []
    for index, value in enumerate(EDGES[field]):
        sampling = {} if field == "bad_words_token_ids" else {field: value}
        request = request_of(f"{index}", sampling=sampling)
        if field == "bad_words_token_ids":
            request.bad_words_token_ids = value
        requests.append(request)
    for tokens, _, end in run(client, requests).values():
        assert tokens
        assert all(0 <= token < VOCAB_SIZE for token in tokens)
        assert end[0] in (FinishReason.LENGTH, FinishReason.STOP)


def test_all_edges_at_once(client):
    everything = {
        field: values[-1]
        for field, values in EDGES.items()
        if field not in ("bad_words_token_ids", "top_k", "allowed_token_ids")
    }
    ((tokens, rows, _),) = run(client, [request_of("a", sampling=everything)]).values()
    assert len(tokens) == len(rows) == OUTPUT


def test_a_seed_is_the_front_ends_to_set(client):
    client.add_request(request_of("a", sampling={"seed": None}))
    (output,) = client.get_output().outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "seed" in output.error
