"""One contract, three clients: what a front end may rely on whatever is behind it."""

import asyncio

import pytest

from trimaran.client.core_client import EngineCoreClient
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.errors import UnavailableError
from trimaran.executor.mock import mock_token
from trimaran.messages import EngineCoreRequest, FinishReason, Ping, ResetPrefixCache
from trimaran.sampling_params import SamplingParams

TIMEOUT_S = 20.0
MOCK = ExecutorConfig(distributed_executor_backend="mock")


class Plain:
    """Clients with plain methods, as they are."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)

    def finish(self):
        self.client.shutdown()


class Awaited:
    """The asyncio client, each call run to its end."""

    def __init__(self, client, runner):
        self.client = client
        self.runner = runner

    def __getattr__(self, name):
        if name in ("ready", "fail"):
            return getattr(self.client, name)
        method = getattr(self.client, f"{name}_async")

        async def call(*args):
            return await asyncio.wait_for(method(*args), TIMEOUT_S)

        return lambda *args: self.runner.run(call(*args))

    def finish(self):
        self.runner.run(self.client.shutdown_async())
        self.runner.close()


def make(kind, **settings):
    config = EngineConfig(executor=MOCK, **settings)
    if kind == "async":
        return Awaited(EngineCoreClient.make_client(True, True, config), asyncio.Runner())
    return Plain(EngineCoreClient.make_client(kind == "sync", False, config))


@pytest.fixture(params=["inproc", "sync", "async"])
def client(request):
    client = make(request.param)
    client.wait_ready()
    yield client
    client.finish()


def request_for(request_id, max_tokens=5, prompt=(1, 2, 3), **fields):
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=0),
        **fields,
    )


def expected_tokens(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(mock_token(tokens[-1], len(tokens), 0))
    return tokens[len(prompt) :]


def collect(client, *request_ids):
    """Take outputs until all these have finished: id -> (tokens, reason, error)."""
    tokens, ends = {request_id: [] for request_id in request_ids}, {}
    while len(ends) < len(request_ids):
        for output in client.get_output().outputs:
            known = tokens[output.request_id]
            if output.new_token_ids:
                assert output.first_index == len(known), "a token was lost or doubled"
            known += output.new_token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = (output.finish_reason, output.error)
    return {request_id: (tokens[request_id], *ends[request_id]) for request_id in request_ids}


def test_a_request_runs_to_its_end(client):
    client.add_request(request_for("a", 7))
    assert collect(client, "a") == {
        "a": (expected_tokens((1, 2, 3), 7), FinishReason.LENGTH, None),
    }


def test_many_requests_each_get_their_own(client):
    prompts = {f"r{i}": (i + 1, 2 * i + 1, 7) for i in range(40)}
    for request_id, prompt in prompts.items():
        client.add_request(request_for(request_id, 11, prompt))
    results = collect(client, *prompts)
    for request_id, prompt in prompts.items():
        assert results[request_id] == (expected_tokens(prompt, 11), FinishReason.LENGTH, None)


def test_a_resumed_request_continues_where_it_was(client):
    whole = expected_tokens((1, 2, 3), 9)
    client.add_request(request_for("a", 9, prior_output_ids=whole[:4]))
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += client.get_output().outputs
    assert outputs[0].first_index == 4
    assert [token for output in outputs for token in output.new_token_ids] == whole[4:]


def test_an_aborted_request_says_no_more_and_others_go_on(client):
    client.add_request(request_for("a", 30_000))
    client.add_request(request_for("b", 400, (9,)))
    client.abort_requests(["a", "nobody"])
    # What "a" brought before the abort arrived may still come; nothing after the answer to a call
    # that was sent behind it.
    assert client.control(Ping())[0].num_running + client.control(Ping())[0].num_waiting <= 1
    tokens = []
    while True:
        for output in client.get_output().outputs:
            if output.request_id == "b":
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    assert tokens == expected_tokens((9,), 400)
                    stats = client.control(Ping())[0]
                    assert (stats.num_running, stats.num_waiting) == (0, 0)
                    assert stats.kv_cache_usage == 0.0
                    return
            else:
                assert output.finish_reason is None


def test_a_request_the_engine_refuses_is_answered_with_the_reason(client):
    client.add_request(request_for("bad", prompt=(10_000_000,)))
    client.add_request(request_for("good", 3))
    results = collect(client, "bad", "good")
    tokens, reason, error = results["bad"]
    assert (tokens, reason) == ([], FinishReason.ERROR)
    assert "vocabulary" in error
    assert results["good"][0] == expected_tokens((1, 2, 3), 3)


def test_control_operations_return_their_results(client):
    assert client.control(ResetPrefixCache()) == [True]
    client.add_request(request_for("a", 4))
    collect(client, "a")
    (stats,) = client.control(Ping())
    assert stats.num_generation_tokens == 4
    assert stats.num_prompt_tokens == 3


def test_ready_tells_what_the_engine_found(client):
    (ready,) = client.ready
    assert (ready.rank, ready.kernels, ready.block_size) == (0, "mock", 16)
    assert ready.num_kv_blocks > 0
    assert "loading" in dict(ready.phases)


def test_use_after_close_and_closing_twice(client):
    client.shutdown()
    client.shutdown()
    for call in (
        lambda: client.add_request(request_for("a")),
        lambda: client.abort_requests(["a"]),
        lambda: client.control(Ping()),
        lambda: client.get_output(),
    ):
        with pytest.raises(UnavailableError, match="closed"):
            call()


def test_the_supervisors_word_fails_everything(client):
    client.fail("engine-0 failed: it was ended by SIGKILL")
    with pytest.raises(Exception, match="ended by SIGKILL"):
        client.add_request(request_for("a"))
    with pytest.raises(Exception, match="ended by SIGKILL"):
        client.get_output()


def test_asyncio_without_processes_is_refused_with_the_reason():
    with pytest.raises(NotImplementedError, match="block the event loop"):
        EngineCoreClient.make_client(False, True, EngineConfig(executor=MOCK))


def test_a_method_of_the_other_kind_says_so(client):
    wrong = "add_request" if isinstance(client, Awaited) else "add_request_async"
    method = getattr(client.client, wrong)
    with pytest.raises(NotImplementedError, match=wrong):
        (method if wrong == "add_request" else lambda r: asyncio.run(method(r)))(request_for("a"))
