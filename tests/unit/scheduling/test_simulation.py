"""Random workloads on tiny pools: every request gets the tokens of an undisturbed run."""

import random

import pytest
from tests.unit.scheduling.simulation import (
    FULL_ONLY,
    MIXED,
    Box,
    expected_tokens,
    make_request,
)

from trimaran.messages import FinishReason

SLIDING_ONLY = (("sliding", 6), ("sliding", 6))
TWO_WINDOWS = (("full", 0), ("full", 0), ("sliding", 3), ("sliding", 17))


def random_request(rng, number):
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
    own = [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
    prompt = rng.choice([own, shared + own, shared * 3 + own[:2], shared])
    prior_count = rng.choice([0, 0, 0, 5])
    max_tokens = rng.randrange(0 if not prior_count else 6, 25)
    seed = rng.randrange(5)
    return make_request(
        f"r{number}",
        prompt,
        max_tokens,
        seed=seed,
        priority=rng.randrange(3),
        client_index=rng.randrange(2),
        cache_salt=rng.choice([None, None, "a", "b"]),
        prior_output_ids=expected_tokens(prompt, prior_count, seed=seed),
        prompt_logprobs=rng.choice([None] * 6 + [1]),
        logprobs=rng.choice([None, None, 2]),
    )


def check_stream(request, stream):
    params = request.sampling_params
    prior = request.prior_output_ids
    count = params.max_tokens - len(prior)
    prompt = request.prompt_token_ids
    assert stream.tokens == expected_tokens(prompt, count, prior=prior, seed=params.seed)
    assert stream.finish_reason is FinishReason.LENGTH
    assert [o.finish_reason for o in stream.outputs[:-1]] == [None] * (len(stream.outputs) - 1)
    if params.prompt_logprobs is not None and not prior:
        rows = stream.outputs[0].prompt_logprobs
        assert [row[0] for row in rows.token_ids] == prompt[1:]
    if params.logprobs is not None:
        rows = [o.logprobs.token_ids[0][0] for o in stream.outputs if o.new_token_ids]
        assert rows == stream.tokens
    assert stream.outputs[0].num_cached_tokens <= len(prompt) - 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    "layers", [FULL_ONLY, MIXED, SLIDING_ONLY, TWO_WINDOWS], ids=["full", "mixed", "sliding", "2w"]
)
@pytest.mark.parametrize("seed", range(6))
def test_random_workload(layers, policy, seed):
    rng = random.Random(f"{seed}{policy}{len(layers)}")
    box = Box(
        num_blocks=rng.choice([90, 120, 300]),
        layers=layers,
        block_size=rng.choice([2, 4]) if len(layers) == 1 else 4,
        max_num_seqs=rng.choice([3, 8, 64]),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 4]),
        scheduling_policy=policy,
        enable_prefix_caching=rng.random() < 0.8,
    )
    aborted = set()
    for number in range(120):
        box.add(random_request(rng, number))
        if rng.random() < 0.15:
            # In any state, several at once, and unknown ones.
            victims = rng.sample(sorted(box.requests), min(3, len(box.requests)))
            victims = [v for v in victims if box.streams[v].finish_reason is None]
            box.scheduler.abort([*victims, "unknown"])
            aborted.update(victims)
        for _ in range(rng.choice([0, 0, 1, 2, 6])):
            if box.scheduler.has_work():
                assert box.step().request_ids
    box.run()
    for request_id, stream in box.streams.items():
        if request_id in aborted:
            assert stream.finish_reason is None, "an aborted request says nothing more"
        else:
            check_stream(box.requests[request_id], stream)
    assert len(aborted) < 60


def test_the_random_workloads_do_preempt_and_hit():
    """Else the tests above would prove nothing about either."""
    rng = random.Random(1)
    box = Box(num_blocks=90, layers=MIXED, max_num_seqs=8)
    for number in range(100):
        box.add(random_request(rng, number))
    box.run()
    stats = box.scheduler.stats()
    assert stats.num_preemptions > 5
    assert stats.prefix_cache_hits > 300
    assert any(len(plan.request_ids) > 5 for plan in box.plans)


def test_two_plans_in_flight():
    """Plans may overlap: chunks run ahead, decodes wait for their token, preemption drops it."""
    box = Box(num_blocks=24, layers=FULL_ONLY, max_num_batched_tokens=8, max_num_seqs=4)
    for number in range(6):
        box.add(make_request(f"r{number}", 20, 12))
    flying = []
    while box.scheduler.has_work() or flying:
        if box.scheduler.has_work():
            plan = box.scheduler.schedule()
            flying.append((plan, box.executor.execute(plan)))
            box.kv.pool.check()
        if len(flying) == 2 or not box.scheduler.has_work():
            plan, output = flying.pop(0)
            for news in box.scheduler.update(plan, output).get(0, []):
                box.streams[news.request_id].take(news, plan.step, 0)
                gone = {name for later, _ in flying for name in later.left_request_ids}
                assert news.request_id not in gone, "it left while this plan was computed"
        assert box.executor.last_step < 2000, "no end in sight"
    for request_id, stream in box.streams.items():
        check_stream(box.requests[request_id], stream)
    assert box.scheduler.stats().num_preemptions > 0
    box.check_idle()
