"""Prefix hits and windows, group by group, against what can be counted by hand."""

import pytest
from tests.unit.scheduling.simulation import MIXED, Box, make_request

from trimaran.scheduling.kv_cache_manager import root_hash
from trimaran.scheduling.request import Request


def cached_tokens(box, request):
    stream = box.add(request)
    box.run()
    return stream.outputs[0].num_cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (32, 16), (33, 32), (1, 0)])
def test_at_least_one_token_is_recomputed(length, cached):
    """T-L8."""
    box = Box(block_size=16, num_blocks=20)
    assert cached_tokens(box, make_request("a", range(length))) == 0
    assert cached_tokens(box, make_request("b", range(length))) == cached
    assert box.streams["a"].tokens == box.streams["b"].tokens


def test_output_is_found_by_a_later_turn():
    box = Box()
    stream = box.add(make_request("a", 10, 9))
    box.run()
    # 19 tokens, of which the last has no keys and values: four blocks of four.
    follow_up = [*box.requests["a"].prompt_token_ids, *stream.tokens, 5, 6]
    assert cached_tokens(box, make_request("b", follow_up)) == 16


def test_salt_separates():
    """T-L3."""
    box = Box()
    prompt = list(range(20))
    for salt in ("a", "b", None, ""):
        assert cached_tokens(box, make_request(f"1{salt}", prompt, cache_salt=salt)) == 0
    for salt in ("a", "b", None, ""):
        assert cached_tokens(box, make_request(f"2{salt}", prompt, cache_salt=salt)) == 16
    assert len({root_hash(None), root_hash(""), root_hash("a"), root_hash("salt:a")}) == 4


def test_same_block_behind_another_beginning_is_not_found():
    box = Box()
    cached_tokens(box, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert cached_tokens(box, make_request("b", [0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0


def test_caching_can_be_switched_off():
    box = Box(enable_prefix_caching=False)
    for name in "ab":
        assert cached_tokens(box, make_request(name, range(20))) == 0
    assert box.scheduler.stats().prefix_cache_queries == 0


def test_a_burst_with_one_prefix_computes_it_once():
    box = Box(max_num_batched_tokens=64)
    for name in "abc":
        box.add(make_request(name, [*range(20), ord(name)], 2))
    plan = box.step()
    assert plan.num_computed_tokens == [0, 20, 20]
    assert plan.num_scheduled_tokens == [21, 1, 1]
    box.run()


def test_hits_are_counted():
    box = Box()
    for name in "ab":
        cached_tokens(box, make_request(name, range(30)))
    stats = box.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (60, 28)


# ------------------------------------------------------------------------------------------ windows


def test_sliding_groups_hold_no_more_than_their_window():
    # Window 10 over blocks of 4: what a token sees lies in at most 4 blocks. They are given back
    # when the next one is taken, so it is always 4.
    box = Box(layers=MIXED, max_num_batched_tokens=8)
    box.add(make_request("a", 40, 60))
    sliding = []
    for _ in range(60):
        plan = box.scheduler.schedule()
        if plan.num_computed_tokens[0] >= 40:  # decoding
            full = plan.num_computed_tokens[0] // 4 + 1
            sliding.append(box.kv.pool.num_referenced - full)
        box.scheduler.update(plan, box.executor.execute(plan))
    assert len(sliding) == 55
    assert set(sliding) == {2 * 4}


def test_a_window_of_one_token():
    box = Box(layers=(("full", 0), ("sliding", 1)))
    for name in "ab":
        assert cached_tokens(box, make_request(name, range(20), 9)) == (16 if name == "b" else 0)
    assert box.streams["a"].tokens == box.streams["b"].tokens


def test_hit_needs_only_the_window_in_sliding_groups():
    box = Box(layers=MIXED, num_blocks=200)
    cached_tokens(box, make_request("a", range(41), 1))
    stream = box.add(make_request("b", range(41), 1))
    plan = box.step()
    assert stream.outputs[0].num_cached_tokens == 40
    full, *sliding = plan.new_requests[0].block_ids
    assert all(full[:10])
    for table in sliding:
        # Token 40 sees 31 … 40: blocks 7 to 9 are the window, those before stay null.
        assert [bool(block) for block in table[:10]] == [False] * 7 + [True] * 3
    box.check_idle()


def test_hit_length_is_one_that_all_groups_hold():
    box = Box(layers=MIXED, num_blocks=200)
    cached_tokens(box, make_request("a", range(41), 1))
    request = Request(make_request("b", range(41), 1), 200, 0.0)
    prefix = box.kv.find_cached_prefix(request)
    assert prefix.num_tokens == 40
    # Lose block 8 (tokens 32 … 35) of one sliding group: hits may end at 32, not at 36 or 40.
    pool = box.kv.pool
    lost = prefix.tables[1][8]
    kept = [b for group in range(3) for b in pool.cached(group).values() if b != lost]
    pool.touch(kept)
    taken = pool.take(pool.num_free)
    assert lost in taken
    for block in kept + taken:
        pool.give(block)
    pool.check()
    assert box.kv.find_cached_prefix(request).num_tokens == 32


def test_the_end_of_a_sequence_is_evicted_first():
    box = Box(num_blocks=13, max_model_len=48)
    cached_tokens(box, make_request("a", range(40), 1))  # fills 10 of 12 blocks
    cached_tokens(box, make_request("b", range(100, 120), 1))  # needs 5: evicts 3
    assert cached_tokens(box, make_request("c", range(40), 1)) == 28


# -------------------------------------------------------------------------------------------- reset


def test_reset_waits_for_nobody():
    """T-L13: refused while blocks are in use, running requests unaffected."""
    box = Box()
    cached_tokens(box, make_request("a", range(20)))
    stream = box.add(make_request("b", range(20)))
    box.step()
    assert box.scheduler.reset_prefix_cache() is False
    box.run()
    assert stream.outputs[0].num_cached_tokens == 16
    assert stream.tokens == box.streams["a"].tokens
    assert box.scheduler.reset_prefix_cache() is True
    assert cached_tokens(box, make_request("c", range(20))) == 0
