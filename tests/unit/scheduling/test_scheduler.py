"""Stopping, limits, fairness, preemption and abort: the rules one by one."""

import pytest
from tests.unit.scheduling.simulation import MIXED, Box, expected_tokens, make_request

from trimaran.errors import InvalidRequestError
from trimaran.messages import EngineCoreOutput, FinishReason

EOS, OTHER_EOS, STOP = 1, 106, 7


def generate(request, box=None):
    box = box or Box()
    stream = box.add(request)
    box.run()
    return stream


# -------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (1, 2), (4, 5)])
def test_min_tokens_counts_exactly(min_tokens, count):
    """T-A7: EOS forced; min_tokens others, then EOS, which counts."""
    stream = generate(
        make_request(
            "a", 5, 32, min_tokens=min_tokens, logit_bias={EOS: 100.0}, eos_token_ids=[EOS]
        )
    )
    assert len(stream.tokens) == count
    assert stream.tokens[-1] == EOS
    assert stream.finish_reason is FinishReason.STOP
    assert stream.outputs[-1].stop_reason is None


def test_any_of_several_eos_ids_ends():
    """T-A6."""
    stream = generate(
        make_request(
            "a", 5, 16, min_tokens=8, logit_bias={OTHER_EOS: 100.0}, eos_token_ids=[EOS, OTHER_EOS]
        )
    )
    assert len(stream.tokens) == 9
    assert not {EOS, OTHER_EOS} & set(stream.tokens[:8])
    assert stream.finish_reason is FinishReason.STOP


def test_eos_before_min_tokens_does_not_end():
    """Even if a sampler lets one through; stop ids neither."""
    box = Box()
    stream = box.add(
        make_request("a", 3, 9, min_tokens=3, eos_token_ids=[EOS], stop_token_ids=(STOP,))
    )
    for token in (EOS, STOP, EOS, STOP):
        assert stream.finish_reason is None
        plan = box.scheduler.schedule()
        output = box.executor.execute(plan)
        output.sampled_token_ids = [[token]]
        for news in box.scheduler.update(plan, output)[0]:
            stream.take(news, plan.step, 0)
    assert stream.tokens == [EOS, STOP, EOS, STOP]
    assert (stream.finish_reason, stream.outputs[-1].stop_reason) == (FinishReason.STOP, STOP)


def test_ignore_eos():
    """T-A9: no EOS ends it, the caller's own stop ids do."""
    forced = {"logit_bias": {OTHER_EOS: 100.0}, "eos_token_ids": [EOS, OTHER_EOS]}
    stream = generate(make_request("a", 5, 64, ignore_eos=True, **forced))
    assert (len(stream.tokens), stream.finish_reason) == (64, FinishReason.LENGTH)
    stream = generate(
        make_request("a", 5, 64, ignore_eos=True, stop_token_ids=(OTHER_EOS,), **forced)
    )
    assert (stream.tokens, stream.finish_reason) == ([OTHER_EOS], FinishReason.STOP)
    assert stream.outputs[-1].stop_reason == OTHER_EOS


def test_stop_token_id_is_reported():
    stream = generate(make_request("a", 5, 64, stop_token_ids=(STOP,), logit_bias={STOP: 100.0}))
    assert (stream.tokens, stream.finish_reason) == ([STOP], FinishReason.STOP)
    assert stream.outputs[-1].stop_reason == STOP


def test_eos_at_the_last_token_is_a_stop():
    stream = generate(make_request("a", 5, 1, logit_bias={EOS: 100.0}, eos_token_ids=[EOS]))
    assert (stream.tokens, stream.finish_reason) == ([EOS], FinishReason.STOP)


def test_no_token_wanted():
    """T-B6: max_tokens 0 computes the prompt and ends, with its log-probabilities."""
    box = Box(max_num_batched_tokens=8)
    stream = generate(make_request("a", range(20), 0, prompt_logprobs=1, logprobs=1), box)
    assert (stream.tokens, stream.finish_reason) == ([], FinishReason.LENGTH)
    (output,) = stream.outputs
    assert output.logprobs is None
    assert [row[0] for row in output.prompt_logprobs.token_ids] == list(range(1, 20))
    assert box.scheduler.stats().num_generation_tokens == 0


# ------------------------------------------------------------------------------------------- limits


def test_prompt_at_the_limit():
    """T-F3: limit + 1 and limit are refused, limit - 1 gets one token."""
    for length in (65, 64):
        with pytest.raises(InvalidRequestError, match=rf"{length} tokens.* 64 "):
            Box(max_model_len=64).add(make_request("a", length, 5))
    stream = generate(make_request("a", 63, 5), Box(max_model_len=64))
    assert (len(stream.tokens), stream.finish_reason) == (1, FinishReason.LENGTH)
    assert generate(make_request("a", 64, 0), Box(max_model_len=64)).tokens == []


def test_length_limit_bounds_the_output():
    for max_tokens in (1000, None):
        stream = generate(make_request("a", 20, max_tokens), Box(max_model_len=64))
        assert (len(stream.tokens), stream.finish_reason) == (44, FinishReason.LENGTH)


def test_what_can_never_fit_is_refused_with_the_numbers():
    """T-F5: 20 blocks of 16; 400 tokens need 25."""
    box = Box(num_blocks=21, block_size=16, max_model_len=1000)
    with pytest.raises(InvalidRequestError, match=r"cannot ever fit.*400 prompt.*26.*16.*20"):
        box.add(make_request("a", 400, 8))
    assert not box.scheduler.has_work()
    # The last token's keys and values are never stored: 320 slots serve 321 tokens.
    assert len(generate(make_request("b", 300, 21), box).tokens) == 21
    with pytest.raises(InvalidRequestError, match="cannot ever fit"):
        box.add(make_request("c", 300, 22))


def test_empty_prompt_and_used_id_are_refused():
    box = Box()
    with pytest.raises(InvalidRequestError, match="empty"):
        box.add(make_request("a", [], 5))
    box.add(make_request("a", 5, 5))
    with pytest.raises(InvalidRequestError, match="in use"):
        box.add(make_request("a", 5, 5))
    box.run()


# ----------------------------------------------------------------------------------------- resuming


def test_prior_output_continues_within_the_original_limits():
    prompt = list(range(10))
    whole = generate(make_request("a", prompt, 12, min_tokens=3)).tokens
    for cut in (1, 5, 11):
        request = make_request("a", prompt, 12, min_tokens=3, prior_output_ids=whole[:cut])
        stream = generate(request)
        assert stream.outputs[0].first_index == cut
        assert whole[:cut] + stream.tokens == whole
    # All was sent, only the end was not.
    stream = generate(make_request("a", prompt, 12, prior_output_ids=whole))
    assert (stream.tokens, stream.finish_reason) == ([], FinishReason.LENGTH)
    with pytest.raises(InvalidRequestError, match="prior output"):
        Box(max_model_len=16).add(make_request("a", prompt, 12, prior_output_ids=whole))


def test_prior_output_counts_towards_min_tokens():
    prompt = list(range(10))
    request = make_request(
        "a", prompt, 12, min_tokens=4, prior_output_ids=[50, 51, 52],
        logit_bias={EOS: 100.0}, eos_token_ids=[EOS],
    )  # fmt: skip
    stream = generate(request)
    assert len(stream.tokens) == 2
    assert stream.tokens[-1] == EOS


# --------------------------------------------------------------------------------- prompt logprobs


def test_prompt_logprobs_skip_the_cache_and_come_once():
    """T-B9."""
    box = Box(max_num_batched_tokens=8)
    streams = [generate(make_request(n, range(33), 3, prompt_logprobs=1), box) for n in "ab"]
    for stream in streams:
        first, *others = stream.outputs
        assert [row[0] for row in first.prompt_logprobs.token_ids] == list(range(1, 33))
        assert first.num_cached_tokens == 0
        assert all(output.prompt_logprobs is None for output in others)
    assert streams[0].outputs[0].prompt_logprobs == streams[1].outputs[0].prompt_logprobs
    # They fill the cache all the same.
    assert generate(make_request("c", range(33), 1), box).outputs[0].num_cached_tokens == 32


def test_prompt_logprobs_of_one_token_are_empty_not_missing():
    output = generate(make_request("a", [5], 1, prompt_logprobs=1)).outputs[0]
    assert output.prompt_logprobs.token_ids == []


def test_prompt_logprobs_survive_preemption():
    box = Box(num_blocks=16, max_model_len=64, max_num_batched_tokens=8)
    streams = [box.add(make_request(n, 24, 20, prompt_logprobs=0)) for n in "abc"]
    box.run()
    assert box.scheduler.stats().num_preemptions > 0
    for name, stream in zip("abc", streams, strict=True):
        rows = [o.prompt_logprobs for o in stream.outputs if o.prompt_logprobs is not None]
        prompt = box.requests[name].prompt_token_ids
        assert [[row[0] for row in part.token_ids] for part in rows] == [prompt[1:]]


def test_prompt_logprobs_once_sent_leave_the_cache_readable():
    """A request that is preempted after its first output resumes from its own blocks."""
    box = Box(num_blocks=9, max_model_len=64, max_num_batched_tokens=16)
    for name in "ab":
        box.add(make_request(name, 8, 16, prompt_logprobs=0))
    box.run()
    resumed = [plan for plan in box.plans if plan.new_requests][1:]
    assert resumed
    assert all(plan.num_computed_tokens[-1] > 0 for plan in resumed)


# ----------------------------------------------------------------------------------------- fairness


def test_long_prompt_beside_a_stream_and_a_short_one():
    """T-L10: 40 times the budget. The stream gets a token in every step, the short one passes."""
    box = Box(max_model_len=2000, num_blocks=600, max_num_batched_tokens=32)
    stream = box.add(make_request("stream", 4, 150))
    box.step()
    long = box.add(make_request("long", 40 * 32, 4))
    for _ in range(5):
        box.step()
    short = box.add(make_request("short", 12, 4))
    box.step()
    assert short.tokens, "one step later"
    box.run()
    assert long.steps[0] > short.steps[-1]
    assert stream.steps[:100] == list(range(1, 101))


def test_short_prompt_passes_a_crowd_of_long_ones():
    """Each step starts one waiting prompt at least, whatever is under way."""
    box = Box(max_model_len=1000, num_blocks=2000, max_num_batched_tokens=32)
    crowd = [box.add(make_request(f"long{n}", 640, 2)) for n in range(4)]
    short = box.add(make_request("short", 12, 2))
    box.run()
    assert short.steps[0] <= 5
    assert min(long.steps[0] for long in crowd) > 20
    # First come, first served among the long ones, and none starves.
    ends = [long.steps[0] for long in crowd]
    assert ends == sorted(ends)
    assert ends[-1] <= 4 * 640 / 32 + 5


def test_lone_long_prompt_takes_the_whole_budget():
    box = Box(max_model_len=1000, num_blocks=600, max_num_batched_tokens=32)
    box.add(make_request("long", 320, 1))
    box.run()
    assert [plan.total_num_scheduled_tokens for plan in box.plans] == [32] * 10


def test_threshold_is_a_setting():
    box = Box(
        max_model_len=1000, num_blocks=600, max_num_batched_tokens=32,
        long_prefill_token_threshold=4,
    )  # fmt: skip
    for name in "abc":
        box.add(make_request(name, 40, 1))
    assert box.step().num_scheduled_tokens == [4, 4, 24]
    box.run()


def test_more_sequences_than_budget_still_all_get_tokens():
    box = Box(max_num_batched_tokens=3, max_num_seqs=8)
    streams = [box.add(make_request(f"r{n}", 6, 6)) for n in range(8)]
    while box.scheduler.has_work():
        box.step()
        assert box.scheduler.stats().num_running <= 3, "one that runs may never starve"
    assert all(len(stream.tokens) == 6 for stream in streams)


# -------------------------------------------------------------------------- preemption and priority


@pytest.mark.parametrize("layers", [(("full", 0),), MIXED], ids=["full", "mixed"])
def test_preemption_takes_the_latest_and_changes_nothing(layers):
    box = Box(num_blocks=10 * len(layers) + 1, layers=layers, max_num_seqs=3, max_model_len=32)
    streams = [box.add(make_request(name, 8, 20)) for name in "abc"]
    box.run()
    assert box.scheduler.stats().num_preemptions > 0
    left = [name for plan in box.plans for name in plan.left_request_ids]
    assert left.count("a") <= 1, "the first comer runs through"
    for name, stream in zip("abc", streams, strict=True):
        assert stream.tokens == expected_tokens(box.requests[name].prompt_token_ids, 20)
        stamps = {output.queued_at for output in stream.outputs}
        assert stamps <= {100.0, 0.0}, "time stamps are told with few outputs"
    told = [max(output.num_preemptions for output in stream.outputs) for stream in streams]
    assert sum(told) == box.scheduler.stats().num_preemptions
    assert told[0] <= 1
    assert [stream.steps[-1] for stream in streams] == sorted(s.steps[-1] for s in streams)


def test_priority_orders_waiting_requests():
    box = Box(max_num_seqs=1, scheduling_policy="priority")
    order = {"low": 5, "high": -1, "middle": 2, "middle too": 2}
    streams = {name: box.add(make_request(name, 4, 2, priority=p)) for name, p in order.items()}
    box.run()
    by_end = sorted(streams, key=lambda name: streams[name].steps[-1])
    assert by_end == ["high", "middle", "middle too", "low"]


def test_urgent_request_takes_seat_and_blocks_of_lower_priority():
    box = Box(num_blocks=13, max_num_seqs=4, scheduling_policy="priority", max_model_len=48)
    low = box.add(make_request("low", 20, 20, priority=1))
    also_low = box.add(make_request("also low", 20, 20, priority=1))
    for _ in range(3):
        box.step()
    urgent = box.add(make_request("urgent", 30, 4, priority=0))
    plan = box.step()
    assert plan.left_request_ids == ["also low", "low"]
    assert plan.request_ids == ["urgent"]
    box.run()
    assert max(urgent.steps) < max(low.steps) < max(also_low.steps)
    for name, stream in (("low", low), ("also low", also_low), ("urgent", urgent)):
        count = len(stream.tokens)
        assert stream.tokens == expected_tokens(box.requests[name].prompt_token_ids, count)


def test_equal_priority_is_not_preempted_for_a_newcomer():
    box = Box(max_num_seqs=1, scheduling_policy="priority")
    first = box.add(make_request("first", 4, 10, priority=1))
    box.step()
    box.add(make_request("second", 4, 2, priority=1))
    box.run()
    assert first.steps == list(range(1, 11))


def test_urgent_request_does_not_wait_for_what_lower_ones_will_need():
    box = Box(
        num_blocks=16, max_model_len=60, max_num_batched_tokens=8, scheduling_policy="priority"
    )
    box.add(make_request("low", 50, 4, priority=1))  # 13 of 15 blocks in the end, 2 by now
    box.step()
    urgent = box.add(make_request("urgent", 15, 4, priority=0))
    plan = box.step()
    assert (plan.left_request_ids, [new.request_id for new in plan.new_requests]) == (
        [],
        ["urgent"],
    )
    box.run()
    assert urgent.steps[-1] <= 8


def test_prompts_under_way_give_blocks_to_a_more_urgent_one():
    """Nothing decodes, both want more than there is: the later one must go, or all stands still."""
    box = Box(
        num_blocks=16, max_model_len=60, max_num_batched_tokens=8, scheduling_policy="priority"
    )
    low = box.add(make_request("low", 50, 4, priority=1))
    box.step()
    urgent = box.add(make_request("urgent", 40, 4, priority=0))
    box.run()
    assert urgent.steps[-1] < low.steps[0]
    assert box.scheduler.stats().num_preemptions == 1


def test_nobody_is_preempted_in_vain():
    """The urgent one must wait for its equal anyway: what runs below them goes on."""
    box = Box(num_blocks=13, max_num_seqs=4, scheduling_policy="priority", max_model_len=48)
    box.add(make_request("equal", 30, 6, priority=0))
    low = box.add(make_request("low", 4, 6, priority=1))
    box.step()
    box.add(make_request("urgent", 40, 4, priority=0))
    box.run()
    assert low.steps == list(range(1, 7))


def test_a_stream_to_be_continued_goes_before_new_ones():
    box = Box(max_num_seqs=1)
    for name, prior in (("first", []), ("second", []), ("replayed", [3])):
        box.add(make_request(name, 4, 3, prior_output_ids=prior))
    box.run()
    entered = [new.request_id for plan in box.plans for new in plan.new_requests]
    assert entered == ["replayed", "first", "second"]


def test_who_is_blocked_is_not_looked_up_in_every_step(monkeypatch):
    box = Box(num_blocks=13, max_model_len=48)
    box.add(make_request("a", 20, 20))
    box.step()
    box.add(make_request("b", 40, 2))
    lookups = []
    find = box.kv.find_cached_prefix
    monkeypatch.setattr(box.kv, "find_cached_prefix", lambda r: lookups.append(r) or find(r))
    box.run()
    assert len(lookups) <= 2, "once when it came, once when room had grown"


def test_token_of_who_was_preempted_meanwhile_is_dropped():
    """Plans 2 and 3 overlap: the late one waits already when its token arrives."""
    box = Box(num_blocks=7, max_model_len=24)
    box.add(make_request("early", 8, 8))
    first = box.scheduler.schedule()
    first_output = box.executor.execute(first)
    late = box.add(make_request("late", 16, 4))
    second = box.scheduler.schedule()
    second_output = box.executor.execute(second)
    assert second.request_ids == ["late"]
    box.scheduler.update(first, first_output)
    third = box.scheduler.schedule()
    assert (third.request_ids, third.left_request_ids) == (["early"], ["late"])
    third_output = box.executor.execute(third)
    assert box.scheduler.update(second, second_output) == {}
    box.scheduler.update(third, third_output)
    box.streams["early"].tokens = expected_tokens(box.requests["early"].prompt_token_ids, 2)
    box.run()
    assert late.tokens == expected_tokens(box.requests["late"].prompt_token_ids, 4)


# -------------------------------------------------------------------------------------------- abort


def aborted_in(state):
    """A box with request "x" in that state, and how many steps it took."""
    box = Box(num_blocks=16, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=60)
    if state == "unknown":
        return box
    if state in ("waiting", "preempted"):
        box.add(make_request("other", 20, 30))
        box.add(make_request("another", 12, 30))
    if state == "waiting":
        box.step()
    box.add(make_request("x", 30, 8))
    if state == "chunk":
        box.step()
    elif state == "running":
        while not box.streams["x"].tokens:
            box.step()
    elif state == "finished":
        box.run()
    elif state == "preempted":
        while "another" not in box.step().left_request_ids:
            assert box.scheduler.has_work()
        box.scheduler.abort(["another"])
    return box


@pytest.mark.parametrize(
    "state", ["unknown", "waiting", "chunk", "running", "finished", "preempted"]
)
def test_abort_in_any_state(state):
    """T-P2, T-P4 and the kind."""
    box = aborted_in(state)
    seen = len(box.streams["x"].outputs) if "x" in box.streams else 0
    box.scheduler.abort(["x", "x"])
    box.run()
    if "x" in box.streams:
        assert len(box.streams["x"].outputs) == seen, "an aborted request says nothing more"
    # The id may be used again at once.
    box.streams.pop("x", None)
    stream = generate(make_request("x", 30, 8), box)
    assert stream.tokens == expected_tokens(box.requests["x"].prompt_token_ids, 8)


def test_abort_and_add_again_at_once():
    """T-P2: in the batch under the same id, old out and new in, in one plan."""
    box = Box()
    box.add(make_request("x", 10, 8))
    box.step()
    box.scheduler.abort(["x"])
    box.streams.pop("x")
    stream = box.add(make_request("x", [9, 8, 7], 8))
    plan = box.step()
    assert (plan.left_request_ids, plan.request_ids) == (["x"], ["x"])
    box.run()
    assert stream.tokens == expected_tokens([9, 8, 7], 8)


def test_abort_while_the_plan_is_computed():
    box = Box()
    for name in ("x", "y"):
        box.add(make_request(name, 10, 3))
    plan = box.scheduler.schedule()
    output = box.executor.execute(plan)
    box.scheduler.abort(["x"])
    box.scheduler.add(make_request("x", 6, 3))
    news: list[EngineCoreOutput] = box.scheduler.update(plan, output)[0]
    assert [item.request_id for item in news] == ["y"]


def test_mass_abort_leaves_nothing():
    """T-P1."""
    box = Box(max_num_seqs=8)
    for number in range(20):
        box.add(make_request(f"r{number}", 20, 50, client_index=number % 2))
    for _ in range(6):
        box.step()
    box.scheduler.abort(list(box.requests))
    assert not box.scheduler.has_work()
    box.check_idle()
    generate(make_request("next", 20, 4), box)


# ------------------------------------------------------------------------------ stamps and counters


def test_first_output_carries_stamps_and_cached_tokens():
    box = Box(max_num_seqs=1)
    box.add(make_request("a", 10, 2))
    stream = box.add(make_request("b", 10, 2))
    box.run()
    first, second = stream.outputs
    assert (first.queued_at, first.scheduled_at) == (100.0, pytest.approx(100.02))
    assert first.first_token_at == first.scheduled_at, "no time passes within a step here"
    assert second.first_token_at == 0.0
    assert (second.queued_at, second.scheduled_at, second.num_cached_tokens) == (0.0, 0.0, 0)


def test_counters():
    box = Box(max_num_batched_tokens=8)
    generate(make_request("a", 21, 5), box)
    stats = box.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (21, 5)
    assert stats.step == len(box.plans) == 3 + 4


def test_outputs_go_to_the_client_that_asked():
    box = Box()
    for client in (0, 3):
        box.add(make_request(f"c{client}", 4, 1, client_index=client))
    plan = box.scheduler.schedule()
    outputs = box.scheduler.update(plan, box.executor.execute(plan))
    assert {c: [o.request_id for o in news] for c, news in outputs.items()} == {
        0: ["c0"],
        3: ["c3"],
    }


def test_one_request_that_cannot_go_on_ends_alone(caplog):
    box = Box()
    broken, whole = (
        box.add(make_request(name, 5, 4, external_id=f"theirs-{name}")) for name in ("a", "b")
    )
    plan = box.scheduler.schedule()
    output = box.executor.execute(plan)
    output.errors = {"a": "not a number", "unknown": "nobody's"}
    for news in box.scheduler.update(plan, output)[0]:
        (broken if news.request_id == "a" else whole).take(news, plan.step, 0)
    assert broken.finish_reason is FinishReason.ERROR
    assert broken.outputs[-1].error == "not a number"
    [record] = caplog.records
    assert record.request_id == "theirs-a", "the log names it as its client does"
    assert "not a number" in record.getMessage()
    assert broken.tokens == []
    box.run()
    assert len(whole.tokens) == 4
    assert whole.finish_reason is FinishReason.LENGTH
