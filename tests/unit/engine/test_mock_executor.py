"""The fake model: foretellable, forceable, and as slow as told."""

import math

import pytest
from tests.unit.scheduling.simulation import expected_tokens

from trimaran.clock import ManualClock
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.executor.mock import FIRST_TOKEN, NUM_TOKENS, MockExecutor
from trimaran.messages import NewRequestData, SchedulerOutput
from trimaran.sampling_params import SamplingParams


def new(request_id, token_ids, prompt_len=None, eos=(), choice_index=0, **params):
    return NewRequestData(
        request_id=request_id,
        token_ids=token_ids,
        prompt_len=prompt_len or len(token_ids),
        sampling_params=SamplingParams(**params),
        eos_token_ids=list(eos),
        block_ids=[[], []],
        choice_index=choice_index,
    )


def plan(rows, entering=(), leaving=()):
    """``rows``: (request id, computed, scheduled)."""
    ids, computed, scheduled = (list(column) for column in zip(*rows, strict=True))
    return SchedulerOutput(
        step=1, left_request_ids=list(leaving), new_requests=list(entering), request_ids=ids,
        num_computed_tokens=computed, num_scheduled_tokens=scheduled,
        new_block_ids=[None] * len(ids), total_num_scheduled_tokens=sum(scheduled),
    )  # fmt: skip


def run(data, count, chunks=None):
    """``count`` tokens of one request, its prompt computed in the given chunks."""
    executor = MockExecutor(EngineConfig())
    tokens, computed, entering = [], 0, [data]
    for chunk in chunks or [len(data.token_ids)]:
        output = executor.execute(plan([(data.request_id, computed, chunk)], entering))
        computed, entering = computed + chunk, []
        tokens += output.sampled_token_ids[0]
    while len(tokens) < count:
        output = executor.execute(plan([(data.request_id, computed, 1)]))
        computed += 1
        tokens += output.sampled_token_ids[0]
    return tokens


def test_tokens_depend_on_the_sequence_alone():
    prompt = [5, 6, 7, 8, 9]
    whole = run(new("a", prompt, seed=3), 10)
    assert whole == expected_tokens(prompt, 10, seed=3)
    assert run(new("b", prompt, seed=3), 10, chunks=[2, 1, 2]) == whole
    resumed = run(new("c", prompt + whole[:4], len(prompt), seed=3), 6)
    assert whole[:4] + resumed == whole
    assert run(new("d", prompt, seed=4), 10) != whole
    assert run(new("e", prompt, seed=3, choice_index=1), 10) != whole
    assert run(new("f", [*prompt[:-1], 10], seed=3), 10) != whole


def test_tokens_spread_over_their_range():
    tokens = run(new("a", [5], max_tokens=3000), 3000)
    assert all(FIRST_TOKEN <= token < FIRST_TOKEN + NUM_TOKENS for token in tokens)
    assert len(set(tokens)) > 2500


def test_ends_come_only_when_forced():
    chance = run(new("a", [5]), 20)
    other = run(new("a", [5], eos=chance[:1], stop_token_ids=tuple(chance[1:2])), 20)
    assert not set(chance[:2]) & set(other)
    assert run(new("a", [5], eos=[1], min_tokens=2, logit_bias={1: 100.0}), 4)[2:] == [1, 1]


def test_logprobs_have_the_shape_of_real_ones():
    executor = MockExecutor(EngineConfig())
    entering = [new("a", [5, 6, 7, 8], logprobs=2, prompt_logprobs=1), new("b", [5])]
    output = executor.execute(plan([("a", 0, 3), ("b", 0, 1)], entering))
    assert output.logprobs is None
    assert [row[0] for row in output.prompt_logprobs["a"].token_ids] == [6, 7, 8]
    output = executor.execute(plan([("a", 3, 1), ("b", 1, 1)]))
    assert output.prompt_logprobs == {}
    first, second = output.logprobs
    assert second is None
    assert first.token_ids[0][0] == output.sampled_token_ids[0][0]
    assert len(first.token_ids[0]) == len(first.logprobs[0]) == 3
    assert first.ranks == [1]
    assert sum(math.exp(value) for value in first.logprobs[0][1:]) == pytest.approx(0.75)


def test_a_step_takes_the_time_it_is_told_and_shows_that_it_goes_on():
    clock, units = ManualClock(), []
    executor = MockExecutor(
        EngineConfig(executor=ExecutorConfig(mock_step_s=60.0)),
        lambda tokens: units.append((clock.monotonic(), tokens)),
        sleep=clock.advance,
        clock=clock,
    )
    executor.execute(plan([("a", 0, 3)], [new("a", [5, 6, 7])]))
    assert clock.monotonic() == pytest.approx(60.0)
    times = [time for time, _ in units]
    assert max(b - a for a, b in zip([0.0, *times], times, strict=False)) <= 0.1 + 1e-6
    assert {tokens for _, tokens in units} == {3}


def test_who_left_is_forgotten():
    executor = MockExecutor(EngineConfig())
    executor.execute(plan([("a", 0, 1)], [new("a", [5])]))
    executor.execute(plan([("b", 0, 1)], [new("b", [5])], leaving=["a"]))
    with pytest.raises(KeyError):
        executor.execute(plan([("a", 1, 1)]))
