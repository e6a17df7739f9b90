"""BlockPool against a plain model of itself, and the order in which blocks are taken."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trimaran.messages import NULL_BLOCK_ID
from trimaran.scheduling.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """References as a list of holders; the cache as a map that takes may only shrink."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9, num_groups=2)
        self.held: list[int] = []  # one entry per reference
        self.known: dict[tuple[int, bytes], int] = {}

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(1, self.pool.num_free))
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert NULL_BLOCK_ID not in blocks
        assert not set(blocks) & set(self.held), "a block in use was given out"
        self.known = {key: b for key, b in self.known.items() if b not in blocks}
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data):
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.give(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), group=st.integers(0, 1), content=st.integers(0, 5))
    def register(self, data, group, content):
        block, key = data.draw(st.sampled_from(self.held)), (group, bytes([content]))
        self.pool.register(block, *key)
        if key not in self.known and block not in self.known.values():
            self.known[key] = block

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def touch(self, data):
        group, content = data.draw(st.sampled_from(sorted(self.known)))
        block = self.pool.cached(group)[content]
        self.pool.touch([NULL_BLOCK_ID, block])
        self.held.append(block)

    @rule()
    def reset(self):
        assert self.pool.reset_cache() == (not self.held)
        if not self.held:
            self.known = {}

    @invariant()
    def accounts(self):
        self.pool.check()
        assert self.pool.num_referenced == len(set(self.held))
        assert self.pool.num_free + len(set(self.held)) + 1 == self.pool.num_blocks
        found = {(g, h): b for g in range(2) for h, b in self.pool.cached(g).items()}
        assert found == self.known


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_unused_blocks_go_before_cached_ones_and_those_least_recently_used_first():
    pool = BlockPool(6)
    blocks = pool.take(4)  # one is left unused
    for block in blocks:
        pool.register(block, 0, b"%d" % block)
    for block in blocks:
        pool.give(block)
    pool.touch([blocks[0]])
    pool.give(blocks[0])  # used again: now the most recent
    spare = pool.take(1)
    assert not set(spare) & set(blocks)
    assert pool.take(4) == [blocks[1], blocks[2], blocks[3], blocks[0]]
    assert pool.cached(0) == {}


def test_same_content_twice_is_found_once_and_groups_are_apart():
    pool = BlockPool(4, num_groups=2)
    first, second, third = pool.take(3)
    pool.register(first, 0, b"x")
    pool.register(second, 0, b"x")
    pool.register(third, 1, b"x")
    assert (pool.cached(0), pool.cached(1)) == ({b"x": first}, {b"x": third})
    pool.give(second)
    pool.check()
    assert pool.take(1) == [second]


def test_misuse_is_an_assertion():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.take(2)
    pool.give(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.give(block)
    with pytest.raises(AssertionError, match="while free"):
        pool.register(block, 0, b"x")
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)
