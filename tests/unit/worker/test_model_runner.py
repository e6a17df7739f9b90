"""Whole steps with a model that is plain arithmetic over what it finds in the KV cache.

Its next token depends on every token in reach, read through block tables and slots, so a token, a
position or a block in the wrong place changes the output.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.worker.plans import BLOCK_SIZE, Bookkeeper

from trimaran.messages import KVCacheConfig, KVCacheGroup, KVCacheLayout, ModelRunnerOutput
from trimaran.model.kernels.base import AttentionMetadata
from trimaran.sampling_params import SamplingParams
from trimaran.worker.kv_tensors import allocate_kv_caches
from trimaran.worker.model_runner import ModelRunner

VOCAB = 97
NUM_BLOCKS = 2000


def next_token(tokens: Sequence[int], windows: Sequence[int]) -> int:
    """What the model says comes after ``tokens``."""
    values = [(token + 1) * (position + 1) for position, token in enumerate(tokens)]
    return sum((layer + 1) * sum(values[-w:]) for layer, w in enumerate(windows)) % VOCAB


class Arithmetic:
    """One layer per KV group; the cache of a token holds (id + 1) * (position + 1)."""

    def __init__(self) -> None:
        self.architecture = SimpleNamespace(vocab_size=VOCAB)
        self.logits_rows: list[int] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
        given: None,
        on_layer: Callable[[], None],
    ) -> torch.Tensor:
        hidden = torch.zeros(len(input_ids), 1, dtype=torch.float64)
        for layer, (cache, where) in enumerate(zip(kv_caches, metadata, strict=True), 1):
            blocks, offsets = where.slot_mapping // BLOCK_SIZE, where.slot_mapping % BLOCK_SIZE
            cache[blocks, 0, 0, offsets, 0] = ((input_ids + 1) * (positions + 1)).double()
            starts = where.query_start.tolist()
            for r, length in enumerate(where.seq_lens.tolist()):
                table = where.block_table[r, : -(-length // BLOCK_SIZE)].long()
                context = cache[table, 0, 0, :, 0].flatten()[:length]
                for t in range(starts[r], starts[r + 1]):
                    end = length - (starts[r + 1] - 1 - t)
                    begin = max(0, end - where.window) if where.window else 0
                    hidden[t] += layer * context[begin:end].sum()
            on_layer()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits_rows.append(len(hidden))
        return -((torch.arange(VOCAB) - hidden) % VOCAB).float()


@pytest.fixture(params=[1, 3], ids="{} KV groups".format)
def books(request) -> Bookkeeper:
    return Bookkeeper(request.param, num_blocks=NUM_BLOCKS)


def runner_for(
    books: Bookkeeper, max_num_seqs: int = 8, on_unit: Callable[[int], None] = lambda tokens: None
) -> ModelRunner:
    model = Arithmetic()
    shape = (NUM_BLOCKS, 2, 1, BLOCK_SIZE, 1)
    caches = [torch.full(shape, float("nan"), dtype=torch.float64) for _ in books.layout.groups]
    runner = ModelRunner(
        model,
        caches,
        books.layout,
        max_num_seqs=max_num_seqs,
        num_known_tokens=VOCAB,
        on_unit=on_unit,
    )
    runner.model = model
    return runner


def run(runner: ModelRunner, books: Bookkeeper, chunks: dict[str, int]) -> ModelRunnerOutput:
    """One step; what it sampled is added to the sequences."""
    output = runner.execute(books.plan(chunks))
    for name, tokens in zip(chunks, output.sampled_token_ids, strict=True):
        sequence = books.sequences[name]
        assert len(tokens) == (sequence.computed == len(sequence.tokens))
        sequence.tokens += tokens
    return output


def expected_output(prompt: list[int], count: int, books: Bookkeeper) -> list[int]:
    windows = [group.window for group in books.layout.groups]
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, windows))
    return tokens[len(prompt) :]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_chunks_company_and_preemption_change_nothing(books):
    runner = runner_for(books)
    prompts = {"a": prompt(1, 40), "b": prompt(2, 3), "c": prompt(3, 17)}
    for name, tokens in prompts.items():
        books.enter(name, list(tokens), len(tokens))
    run(runner, books, {"a": 16, "b": 3, "c": 17})
    run(runner, books, {"c": 1, "a": 20, "b": 1})
    run(runner, books, {"a": 4, "b": 1, "c": 1})
    for _ in range(12):
        run(runner, books, {"b": 1, "a": 1, "c": 1})
    preempted = books.leave("a")
    run(runner, books, {"b": 1, "c": 1})
    books.enter("a", preempted.tokens, 40)
    run(runner, books, {"b": 1, "a": len(preempted.tokens), "c": 1})
    run(runner, books, {"b": 1, "a": 1})
    for name, tokens in prompts.items():
        output = books.sequences[name].tokens[len(tokens) :]
        assert len(output) > 10
        assert output == expected_output(tokens, len(output), books)


def test_a_row_is_free_again_for_the_next_sequence(books):
    runner = runner_for(books, max_num_seqs=1)
    for seed in range(3):
        books.enter(str(seed), prompt(seed, 5), 5)
        run(runner, books, {str(seed): 5})
        run(runner, books, {str(seed): 1})
        got = books.leave(str(seed)).tokens[5:]
        assert got == expected_output(prompt(seed, 5), 2, books)
    assert runner.execute(books.plan({})) == ModelRunnerOutput(sampled_token_ids=[])


def test_logits_are_made_for_sampling_rows_only(books):
    runner = runner_for(books)
    for name, length in (("a", 30), ("b", 5), ("c", 50)):
        books.enter(name, prompt(0, length), length)
    run(runner, books, {"a": 20, "b": 5, "c": 50})
    assert runner.model.logits_rows == [2]
    run(runner, books, {"a": 5})
    assert runner.model.logits_rows == [2]


def test_logits_in_pieces(books, monkeypatch):
    monkeypatch.setattr("trimaran.worker.model_runner._LOGITS_BYTES", 4 * VOCAB * 3)
    units: list[int] = []
    runner = runner_for(books, on_unit=units.append)
    names = "abcdefgh"
    for seed, name in enumerate(names):
        params = SamplingParams(seed=0, temperature=0.0, logprobs=0 if name in "bg" else None)
        books.enter(name, prompt(seed, 4), 4, params)
    output = run(runner, books, dict.fromkeys(names, 4))
    assert runner.model.logits_rows == [3, 3, 2]
    assert units == [4 * len(names)] * (len(books.layout.groups) + 3)  # layers, pieces
    for seed, name in enumerate(names):
        token = expected_output(prompt(seed, 4), 1, books)
        assert books.sequences[name].tokens[4:] == token
        found = output.logprobs[seed]
        assert (found.token_ids if found else None) == ([token] if name in "bg" else None)


def test_logprobs_only_where_asked(books):
    runner = runner_for(books)
    books.enter("a", prompt(0, 4), 4)
    assert run(runner, books, {"a": 4}).logprobs is None


@pytest.mark.parametrize("chunks", [[20], [1, 7, 12], [19, 1]], ids=str)
def test_prompt_logprobs_over_chunks(books, chunks, monkeypatch):
    """Row i is for prompt token computed + 1 + i; pieces of three rows."""
    monkeypatch.setattr("trimaran.worker.model_runner._LOGITS_BYTES", 4 * VOCAB * 3)
    runner = runner_for(books)
    tokens = prompt(5, 20)
    params = SamplingParams(seed=0, temperature=0.0, prompt_logprobs=1)
    books.enter("a", list(tokens), 20, params)
    books.enter("b", prompt(6, 2), 2)
    got = []
    for step, count in enumerate(chunks):
        output = run(runner, books, {"b": 2 if step == 0 else 1, "a": count})
        if "a" in output.prompt_logprobs:
            got += output.prompt_logprobs["a"].token_ids
            assert len(output.prompt_logprobs["a"].logprobs[0]) == 2
    windows = [group.window for group in books.layout.groups]
    assert got == [[tokens[i], next_token(tokens[:i], windows)] for i in range(1, 20)]
    assert run(runner, books, {"a": 1}).prompt_logprobs == {}


def test_kv_caches_share_slots():
    """Two groups of two layers and a short one: three layers use slot 0, two slot 1."""
    groups = tuple(
        KVCacheGroup(kind="full", window=0, layers=layers) for layers in ((0, 3), (1, 4), (2,))
    )
    bytes_per_block = 2 * 2 * 3 * BLOCK_SIZE * 4 * 2
    layout = KVCacheLayout(BLOCK_SIZE, groups, 2, bytes_per_block)
    config = KVCacheConfig(layout, 11)
    caches = allocate_kv_caches(config, num_kv_heads=3, head_dim=4, dtype=torch.bfloat16)
    assert {cache.shape for cache in caches} == {(11, 2, 3, BLOCK_SIZE, 4)}
    addresses = [cache.data_ptr() for cache in caches]
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3] == addresses[4]
    assert caches[0].nbytes + caches[3].nbytes == 11 * bytes_per_block
