"""One contract, three clients: what a front end may rely on whatever is behind it.

Most tests share one client of each kind and leave it without work. Outputs of requests that a test
aborted may still come in the next one: each test has request ids of its own and looks at no others.
"""

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.process.conftest import descendants, wait_until

from trimaran.client.core_client import EngineCoreClient
from trimaran.config import EngineConfig, ExecutorConfig, SchedulerConfig
from trimaran.errors import (
    ConflictError,
    InvalidRequestError,
    UnavailableError,
)
from trimaran.executor.mock import mock_token
from trimaran.messages import (
    AWAKE,
    EngineCoreRequest,
    FinishReason,
    Ping,
    Profile,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from trimaran.sampling_params import SamplingParams

TIMEOUT_S = 20.0
FOREVER = 30_000  # tokens: half a minute and more of steps, which is never waited for
BUDGET, BLOCK = 16, 16  # tokens in a step, tokens in a block
CONFIG = EngineConfig(
    executor=ExecutorConfig(distributed_executor_backend="mock", mock_step_s=0.001),
    scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=BUDGET),
)
_numbers = itertools.count()


class Plain:
    """Clients with plain methods, as they are."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)

    def start_control(self, operation):
        """For a call that is not answered at once: what returns its results."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self.client.control, operation, TIMEOUT_S)
        pool.shutdown(wait=False)
        return lambda: future.result(TIMEOUT_S)

    def finish(self):
        self.client.shutdown()


class Awaited:
    """The asyncio client, each call run to its end."""

    def __init__(self, client):
        self.client = client
        self.runner = asyncio.Runner()

    def __getattr__(self, name):
        if name in ("ready", "fail"):
            return getattr(self.client, name)
        method = getattr(self.client, f"{name}_async")

        async def call(*args):
            return await asyncio.wait_for(method(*args), TIMEOUT_S)

        return lambda *args: self.runner.run(call(*args))

    def start_control(self, operation):
        task = self.runner.get_loop().create_task(self.client.control_async(operation, TIMEOUT_S))
        return lambda: self.runner.run(asyncio.wait_for(task, TIMEOUT_S))

    def finish(self):
        self.runner.run(self.client.shutdown_async())
        self.runner.close()


def start(kind, config=CONFIG):
    client = EngineCoreClient.make_client(kind != "inproc", kind == "async", config)
    wrapped = Awaited(client) if kind == "async" else Plain(client)
    wrapped.wait_ready()
    return wrapped


KINDS = ["inproc", "sync", "async"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def shared(kind):
    client = start(kind)
    yield client
    client.finish()
    assert not descendants()


@pytest.fixture
def client(shared):
    yield shared
    (stats,) = shared.control(Ping())
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert (stats.sleep_level, stats.is_falling_asleep) == (AWAKE, False)


@pytest.fixture
def fresh(kind):
    """For tests that end their client."""
    client = start(kind)
    yield client
    client.finish()


def new_id(name):
    return f"{name}-{next(_numbers)}"


def request_for(request_id, max_tokens=5, prompt=(1, 2, 3), **fields):
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=0),
        **fields,
    )


def add(client, name, *args, **fields):
    """Submit a request; returns its id."""
    request = request_for(new_id(name), *args, **fields)
    client.add_request(request)
    return request.request_id


def expected_tokens(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(mock_token(tokens[-1], len(tokens), 0))
    return tokens[len(prompt) :]


class Seen:
    """What has come for some requests; what comes for others is passed over."""

    def __init__(self, *request_ids):
        self.tokens = {request_id: [] for request_id in request_ids}
        self.ends = {}
        self.cached = {}

    def take(self, message):
        for output in message.outputs:
            known = self.tokens.get(output.request_id)
            if known is None:
                continue
            assert output.request_id not in self.ends, "something came after the end"
            if output.new_token_ids:
                assert output.first_index == len(known), "a token was lost or doubled"
            known += output.new_token_ids
            self.cached.setdefault(output.request_id, output.num_cached_tokens)
            if output.finish_reason is not None:
                self.ends[output.request_id] = (output.finish_reason, output.error)

    def until(self, client, condition):
        while not condition(self):
            self.take(client.get_output())
        return self

    def until_ended(self, client):
        return self.until(client, lambda seen: len(seen.ends) == len(seen.tokens))


def collect(client, *request_ids):
    """Take outputs until all these have finished: id -> (tokens, reason, error)."""
    seen = Seen(*request_ids).until_ended(client)
    return {
        request_id: (seen.tokens[request_id], *seen.ends[request_id]) for request_id in seen.ends
    }


def ping(client):
    (stats,) = client.control(Ping())
    return stats


# ---------------------------------------------------------------------------------------- requests


def test_a_request_runs_to_its_end(client):
    name = add(client, "a", 7)
    assert collect(client, name) == {
        name: (expected_tokens((1, 2, 3), 7), FinishReason.LENGTH, None),
    }


def test_many_requests_each_get_their_own(client):
    prompts = {new_id("r"): (i + 1, 2 * i + 1, 7) for i in range(40)}
    for request_id, prompt in prompts.items():
        client.add_request(request_for(request_id, 11, prompt))
    results = collect(client, *prompts)
    for request_id, prompt in prompts.items():
        assert results[request_id] == (expected_tokens(prompt, 11), FinishReason.LENGTH, None)


def test_a_resumed_request_continues_where_it_was(client):
    whole = expected_tokens((1, 2, 3), 9)
    name = add(client, "a", 9, prior_output_ids=whole[:4])
    seen = Seen(name)
    seen.tokens[name] = whole[:4]
    seen.until_ended(client)
    assert seen.tokens[name] == whole


def test_a_request_the_engine_refuses_is_answered_with_the_reason(client):
    bad, good = add(client, "bad", prompt=(10_000_000,)), add(client, "good", 3)
    results = collect(client, bad, good)
    tokens, reason, error = results[bad]
    assert (tokens, reason) == ([], FinishReason.ERROR)
    assert "vocabulary" in error
    assert results[good][0] == expected_tokens((1, 2, 3), 3)


# ----------------------------------------------------------------------------------------- aborts


# Each returns the id of a request that is in this state, and what has come so far: for it, and for
# others that had to be there.


def waiting(client):
    others = [add(client, "other", FOREVER) for _ in range(2)]  # they have all the places
    name = add(client, "waiting")
    seen = Seen(name, *others).until(client, lambda seen: all(seen.tokens[o] for o in others))
    stats = ping(client)
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    return name, seen


def in_a_prefill_chunk(client):
    before = ping(client).num_prompt_tokens
    name = add(client, "long", 1, prompt=range(1, FOREVER))
    seen = Seen(name).until(client, lambda seen: ping(client).num_prompt_tokens > before)
    assert not seen.tokens[name]
    return name, seen


def running(client):
    name = add(client, "running", FOREVER)
    return name, Seen(name).until(client, lambda seen: seen.tokens[name])


def finished(client):
    name = add(client, "finished")
    return name, Seen(name).until_ended(client)


def unknown(client):
    return "nobody", Seen("nobody")


def held_while_asleep(client):
    client.control(Sleep(0, "abort"))
    name = add(client, "held")
    assert ping(client).num_waiting == 1
    return name, Seen(name)


@pytest.mark.parametrize(
    "state", [waiting, in_a_prefill_chunk, running, finished, unknown, held_while_asleep]
)
def test_an_aborted_request_is_gone_and_says_no_more(client, state):
    name, seen = state(client)
    ends = dict(seen.ends)
    client.abort_requests([name])
    client.abort_requests(list(seen.tokens))
    stats = ping(client)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    client.control(WakeUp())
    # Tokens from before the abort arrived may still come, but no end; a later request's does.
    follower = add(client, "follower", 3)
    seen.tokens[follower] = []
    seen.until(client, lambda seen: follower in seen.ends)
    assert seen.ends == {**ends, follower: (FinishReason.LENGTH, None)}


def test_others_go_on_beside_an_abort(client):
    doomed, other = add(client, "doomed", FOREVER), add(client, "other", 300, (9,))
    client.abort_requests([doomed, "nobody"])
    assert collect(client, other)[other][0] == expected_tokens((9,), 300)


# ---------------------------------------------------------------------------------------- control


def test_control_operations_return_their_results(client):
    assert client.control(ResetPrefixCache()) == [True]
    before = ping(client)
    collect(client, add(client, "a", 4))
    stats = ping(client)
    assert stats.num_generation_tokens - before.num_generation_tokens == 4
    assert stats.num_prompt_tokens - before.num_prompt_tokens == 3


def test_the_prefix_cache_is_not_reset_while_it_is_in_use(client):
    name, _ = running(client)
    assert client.control(ResetPrefixCache()) == [False]
    client.abort_requests([name])
    assert client.control(ResetPrefixCache()) == [True]


def test_an_error_in_the_engine_is_the_callers_with_its_type_and_text(client):
    with pytest.raises(ConflictError, match="Profile: the mock executor computes nothing"):
        client.control(Profile("start"))
    assert ping(client).num_running == 0


# ------------------------------------------------------------------------------------------ sleep


@pytest.mark.parametrize(("level", "cached"), [(0, 2 * BLOCK), (1, 0), (2, 0)])
def test_sleeping_and_waking_up(client, level, cached):
    prompt = range(1, 2 * BLOCK + 4)
    collect(client, add(client, "before", prompt=prompt))
    assert client.control(Sleep(level, "abort")) == [level]
    assert ping(client).sleep_level == level
    held, bad = add(client, "held", prompt=prompt), add(client, "bad", prompt=(-1,))
    assert collect(client, bad)[bad][1] is FinishReason.ERROR
    assert ping(client).num_waiting == 1
    assert client.control(ResetPrefixCache()) == [True] if level else [ping(client)]
    assert client.control(WakeUp()) == [None]
    seen = Seen(held).until_ended(client)
    assert seen.tokens[held] == expected_tokens(prompt, 5)
    assert seen.cached[held] == cached


def test_sleep_goes_deeper_and_never_up(client):
    levels = [client.control(Sleep(level, "abort")) for level in (0, 2, 1)]
    assert levels == [[0], [2], [2]]
    assert client.control(WakeUp()) == client.control(WakeUp()) == [None]


def test_sleep_by_abort_ends_all_with_what_they_had(client):
    name, seen = waiting(client)
    client.control(Sleep(1, "abort"))
    seen.until_ended(client)
    assert set(seen.ends.values()) == {(FinishReason.ABORT, None)}
    assert seen.tokens.pop(name) == []
    for tokens in seen.tokens.values():
        assert tokens == expected_tokens((1, 2, 3), len(tokens))
    client.control(WakeUp())


def test_sleep_by_waiting_lets_everything_before_it_end(kind, client):
    names = [add(client, "a", 30) for _ in range(3)]
    if kind == "inproc":
        with pytest.raises(InvalidRequestError, match="nobody takes the outputs"):
            client.control(Sleep(1, "wait"))
    else:
        assert client.control(Sleep(1, "wait")) == [1]
        assert ping(client).sleep_level == 1
    client.control(WakeUp())
    for tokens, reason, _ in collect(client, *names).values():
        assert (tokens, reason) == (expected_tokens((1, 2, 3), 30), FinishReason.LENGTH)


@pytest.fixture
def falling_asleep(kind, client):
    """(client, a request that keeps it awake, the pending call)."""
    if kind == "inproc":
        pytest.skip("mode wait needs an engine process")
    name, _ = running(client)
    answer = client.start_control(Sleep(1, "wait"))
    wait_until(lambda: ping(client).is_falling_asleep, TIMEOUT_S, "the sleep to be pending")
    return client, name, answer


def test_an_abort_completes_a_sleep_that_waits(falling_asleep):
    client, _, answer = falling_asleep
    late = add(client, "late", 3)
    assert ping(client).num_waiting == 1
    assert client.control(Sleep(0, "abort")) == answer() == [1]
    assert ping(client).num_waiting == 1, "what came while falling asleep waits"
    client.control(WakeUp())
    assert collect(client, late)[late][0] == expected_tokens((1, 2, 3), 3)


def test_wake_up_calls_off_a_sleep_that_waits(falling_asleep):
    client, name, answer = falling_asleep
    late = add(client, "late", 3)
    assert client.control(WakeUp()) == [None]
    with pytest.raises(ConflictError, match="Sleep: wake_up came before"):
        answer()
    assert collect(client, late)[late][0] == expected_tokens((1, 2, 3), 3)
    client.abort_requests([name])


def test_a_sleep_is_answered_once_the_last_request_is_aborted(falling_asleep):
    client, name, answer = falling_asleep
    client.abort_requests([name])
    assert answer() == [1]
    client.control(WakeUp())


# ---------------------------------------------------------------------------------- start and end


def test_ready_tells_what_the_engine_found(client):
    (ready,) = client.ready
    assert (ready.rank, ready.kernels, ready.block_size) == (0, "mock", BLOCK)
    assert ready.num_kv_blocks > 0
    assert "loading" in dict(ready.phases)


def test_use_after_close_and_closing_twice(fresh):
    fresh.shutdown()
    fresh.shutdown()
    for call in (
        lambda: fresh.add_request(request_for("a")),
        lambda: fresh.abort_requests(["a"]),
        lambda: fresh.control(Ping()),
        lambda: fresh.get_output(),
    ):
        with pytest.raises(UnavailableError, match="closed"):
            call()


def test_closing_asleep_with_requests_that_wait(fresh):
    fresh.control(Sleep(2, "abort"))
    add(fresh, "held")
    fresh.shutdown()


def test_the_supervisors_word_fails_everything(fresh):
    fresh.fail("engine-0 failed: it was ended by SIGKILL")
    with pytest.raises(Exception, match="ended by SIGKILL"):
        fresh.add_request(request_for("a"))
    with pytest.raises(Exception, match="ended by SIGKILL"):
        fresh.get_output()


def test_asyncio_without_processes_is_refused_with_the_reason():
    with pytest.raises(NotImplementedError, match="block the event loop"):
        EngineCoreClient.make_client(False, True, CONFIG)


def test_a_method_of_the_other_kind_says_so(client):
    wrong = "add_request" if isinstance(client, Awaited) else "add_request_async"
    method = getattr(client.client, wrong)
    with pytest.raises(NotImplementedError, match=wrong):
        (method if wrong == "add_request" else lambda r: asyncio.run(method(r)))(request_for("a"))
