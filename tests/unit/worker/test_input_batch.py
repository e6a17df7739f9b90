"""The vectorised batch against one built token by token, under random plans."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.worker.plans import BLOCK_SIZE, Bookkeeper

from trimaran.messages import SchedulerOutput
from trimaran.worker.input_batch import InputBatch, StepInputs

MAX_SEQUENCES = 5


def apply(batch: InputBatch, plan: SchedulerOutput) -> StepInputs:
    for name in plan.left_request_ids:
        batch.leave(name)
    for request in plan.new_requests:
        batch.enter(request)
    batch.append_blocks(plan)
    return batch.build(plan)


def check(step: StepInputs, plan: SchedulerOutput, books: Bookkeeper) -> None:
    """``books`` have counted the plan already."""
    ids, positions, starts = [], [], [0]
    slots: list[list[int]] = [[] for _ in books.layout.groups]
    for name, computed, count in zip(
        plan.request_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
    ):
        sequence = books.sequences[name]
        for position in range(computed, computed + count):
            ids.append(sequence.tokens[position])
            positions.append(position)
            for group, blocks in enumerate(sequence.blocks):
                block = blocks[position // BLOCK_SIZE]
                slots[group].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
    sequences = [books.sequences[name] for name in plan.request_ids]
    lengths = [sequence.computed for sequence in sequences]
    assert step.input_ids.tolist() == ids
    assert step.positions.tolist() == positions
    assert step.query_start.tolist() == starts
    assert step.samples.tolist() == [s.computed == len(s.tokens) for s in sequences]
    assert (step.input_ids.dtype, step.positions.dtype) == (torch.int64, torch.int64)
    for index, group in enumerate(books.layout.groups):
        metadata = step.metadata[index]
        assert metadata.window == group.window
        assert metadata.slot_mapping.tolist() == slots[index]
        assert metadata.seq_lens.tolist() == lengths
        assert metadata.query_start.tolist() == starts
        assert (metadata.max_query_len, metadata.max_seq_len) == (
            max(plan.num_scheduled_tokens),
            max(lengths),
        )
        for row, sequence in zip(metadata.block_table.tolist(), sequences, strict=True):
            used = -(-sequence.computed // BLOCK_SIZE)
            assert row[:used] == sequence.blocks[index][:used]
        for tensor, dtype in (
            (metadata.slot_mapping, torch.int64),
            (metadata.seq_lens, torch.int32),
            (metadata.query_start, torch.int32),
            (metadata.block_table, torch.int32),
        ):
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_groups=st.integers(1, 3))
def test_random_plans(seed, num_groups):
    """Sequences enter, leave, come back, change places, in chunks and single tokens; some grow
    past the first size of the arrays."""
    books = Bookkeeper(num_groups, seed)
    random = books.random
    batch = InputBatch(books.layout, MAX_SEQUENCES)
    parked = {}
    for step_index in range(25):
        names = list(books.sequences)
        for name in names:
            if random.random() < 0.15:
                parked[name] = books.leave(name)
        entering = {}
        while len(books.sequences) < MAX_SEQUENCES and random.random() < 0.7:
            if parked and random.random() < 0.5:
                name, old = parked.popitem()  # preempted: back with all its tokens
                books.enter(name, old.tokens, old.prompt_len)
            else:
                name, length = f"{step_index}-{len(entering)}", int(random.choice([1, 9, 30, 1500]))
                books.enter(name, random.integers(0, 1000, length).tolist(), length)
            entering[name] = True
        chunks = {}
        for name in random.permutation(list(books.sequences)).tolist():
            sequence = books.sequences[name]
            left = len(sequence.tokens) - sequence.computed
            if name in entering or random.random() < 0.9:
                chunks[name] = int(random.integers(1, left + 1)) if random.random() < 0.5 else left
        if not chunks:
            continue
        plan = books.plan(chunks)
        step = apply(batch, plan)
        check(step, plan, books)
        rows = step.rows[step.samples]
        if len(rows):
            tokens = random.integers(0, 1000, len(rows))
            batch.append_tokens(rows, tokens)
            done = [n for n, s in zip(plan.request_ids, step.samples, strict=True) if s]
            for name, token in zip(done, tokens.tolist(), strict=True):
                books.sequences[name].tokens.append(token)
                row = batch.row(name)
                assert batch.num_tokens[row] == len(books.sequences[name].tokens)
                known = batch.token_ids[row, : batch.num_tokens[row]]
                assert known.tolist() == books.sequences[name].tokens


def test_a_steady_batch_of_decodes():
    """Single tokens in an order unlike that of the rows, over block borders."""
    books = Bookkeeper(2)
    batch = InputBatch(books.layout, 4)
    for name in "abcd":
        books.enter(name, [ord(name)] * 6, 6)
    apply(batch, books.plan(dict.fromkeys("abcd", 6)))
    for token in range(20):
        rows = np.array([batch.row(name) for name in "dbca"])
        batch.append_tokens(rows, np.arange(4) + token)
        for offset, name in enumerate("dbca"):
            books.sequences[name].tokens.append(offset + token)
        plan = books.plan(dict.fromkeys("dbca", 1))
        check(apply(batch, plan), plan, books)
