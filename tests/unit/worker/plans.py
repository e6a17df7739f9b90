"""Plans for a worker, made by a naive bookkeeper that knows every sequence as plain lists."""

from dataclasses import dataclass, field

import numpy as np

from trimaran.messages import KVCacheGroup, KVCacheLayout, NewRequestData, SchedulerOutput
from trimaran.sampling_params import SamplingParams

BLOCK_SIZE = 8


def layout(num_groups: int) -> KVCacheLayout:
    """One layer per group; the first is full, the others slide."""
    groups = tuple(
        KVCacheGroup(kind="sliding" if i else "full", window=5 * i, layers=(i,))
        for i in range(num_groups)
    )
    return KVCacheLayout(block_size=BLOCK_SIZE, groups=groups, num_slots=1, bytes_per_block=1)


@dataclass
class Sequence:
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)  # per group


class Bookkeeper:
    """Gives blocks out in random order and never twice."""

    def __init__(self, num_groups: int, seed: int = 0, num_blocks: int = 20_000) -> None:
        self.random = np.random.default_rng(seed)
        self.layout = layout(num_groups)
        self.sequences: dict[str, Sequence] = {}
        self._blocks = (self.random.permutation(num_blocks - 1) + 1).tolist()
        self._left: list[str] = []
        self._new: list[str] = []

    def enter(
        self, name: str, tokens: list[int], prompt_len: int, params: SamplingParams | None = None
    ) -> None:
        params = params or SamplingParams(seed=0, temperature=0.0)
        empty: list[list[int]] = [[] for _ in self.layout.groups]
        self.sequences[name] = Sequence(tokens, prompt_len, params, blocks=empty)
        self._new.append(name)

    def leave(self, name: str) -> Sequence:
        self._left.append(name)
        return self.sequences.pop(name)

    def plan(self, chunks: dict[str, int]) -> SchedulerOutput:
        """``chunks``: how many tokens of which sequences; every one that entered is among them."""
        new_blocks: list[list[list[int]] | None] = []
        for name, count in chunks.items():
            sequence = self.sequences[name]
            needed = -(-(sequence.computed + count) // BLOCK_SIZE) - len(sequence.blocks[0])
            added = [[self._blocks.pop() for _ in range(needed)] for _ in self.layout.groups]
            for blocks, more in zip(sequence.blocks, added, strict=True):
                blocks += more
            new_blocks.append(added if needed > 0 and name not in self._new else None)
        plan = SchedulerOutput(
            step=0,
            left_request_ids=self._left,
            new_requests=[self._entry(name) for name in self._new],
            request_ids=list(chunks),
            num_computed_tokens=[self.sequences[name].computed for name in chunks],
            num_scheduled_tokens=list(chunks.values()),
            new_block_ids=new_blocks,
            total_num_scheduled_tokens=sum(chunks.values()),
        )
        self._left, self._new = [], []
        for name, count in chunks.items():
            self.sequences[name].computed += count
        return plan

    def _entry(self, name: str) -> NewRequestData:
        sequence = self.sequences[name]
        return NewRequestData(
            request_id=name,
            token_ids=list(sequence.tokens),
            prompt_len=sequence.prompt_len,
            sampling_params=sequence.params,
            eos_token_ids=[],
            block_ids=[list(blocks) for blocks in sequence.blocks],
        )
