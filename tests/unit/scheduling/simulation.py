"""A scheduler in a box: tiny pools, a clock held by hand, and an executor that checks every read.

CheckingExecutor keeps a fake KV memory: what is "written" into a slot is a digest of the whole
sequence up to that token. Before a token "attends", every slot its layer would read must hold the
digest of this very sequence. A wrong block table, a block freed too early, or a prefix hit on other
tokens shows up at once. Tokens come from MockExecutor.
"""

from dataclasses import dataclass, field

from trimaran.clock import ManualClock
from trimaran.config import EngineConfig, SchedulerConfig
from trimaran.executor.mock import MockExecutor, mock_token
from trimaran.messages import (
    NULL_BLOCK_ID,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVCacheConfig,
    KVCacheLayout,
    ModelRunnerOutput,
    SchedulerOutput,
)
from trimaran.sampling_params import SamplingParams
from trimaran.scheduling.kv_cache_manager import KVCacheManager
from trimaran.scheduling.kv_layout import make_kv_cache_layout
from trimaran.scheduling.scheduler import Scheduler

FULL_ONLY = (("full", 0),)
MIXED = (("full", 0), ("sliding", 10), ("sliding", 10))


@dataclass
class _Sequence:
    tables: list[list[int]]
    digests: list[tuple[str | None, int]]  # one per known token: of all tokens up to it


class CheckingExecutor:
    """Executes plans on the mock model, and asserts that each is well-formed and reads rightly."""

    def __init__(self, layout: KVCacheLayout, num_blocks: int, budget: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._budget = budget
        self._mock = MockExecutor(EngineConfig())
        self._memory: list[dict[int, tuple[str | None, int]]] = [{} for _ in layout.groups]
        self._sequences: dict[str, _Sequence] = {}
        self._salts: dict[str, str | None] = {}
        self.last_step = 0

    def set_salt(self, request_id: str, salt: str | None) -> None:
        self._salts[request_id] = salt

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert plan.step > self.last_step
        self.last_step = plan.step
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens) <= self._budget
        assert len(set(plan.request_ids)) == len(plan.request_ids)
        for request_id in plan.left_request_ids:
            del self._sequences[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self._sequences
            sequence = _Sequence([list(table) for table in new.block_ids], [])
            self._sequences[new.request_id] = sequence
            for token in new.token_ids:
                self._extend(new.request_id, token)
        rows = list(
            zip(
                plan.request_ids,
                plan.num_computed_tokens,
                plan.num_scheduled_tokens,
                plan.new_block_ids,
                strict=True,
            )
        )
        for request_id, computed, scheduled, blocks in rows:
            sequence = self._sequences[request_id]
            for table, new_blocks in zip(sequence.tables, blocks or [], strict=bool(blocks)):
                table.extend(new_blocks)
            self._write(sequence, computed, scheduled)
        for request_id, computed, scheduled, _ in rows:
            self._read(request_id, computed, scheduled)
        output = self._mock.execute(plan)
        for request_id, sampled in zip(plan.request_ids, output.sampled_token_ids, strict=True):
            for token in sampled:
                self._extend(request_id, token)
        return output

    def _extend(self, request_id: str, token: int) -> None:
        digests = self._sequences[request_id].digests
        before = digests[-1][1] if digests else 0
        digests.append((self._salts.get(request_id), hash((before, token))))

    def _write(self, sequence: _Sequence, computed: int, scheduled: int) -> None:
        assert scheduled > 0
        assert computed + scheduled <= len(sequence.digests), "a token is computed before known"
        size = self._layout.block_size
        for table in sequence.tables:
            for position in range(computed, computed + scheduled):
                block = table[position // size]
                assert 0 < block < self._num_blocks, f"position {position} is written to {block}"
                # One memory for all groups: a block belongs to one of them at a time.
                for memory in self._memory:
                    memory.pop(block * size + position % size, None)
        for group, table in enumerate(sequence.tables):
            for position in range(computed, computed + scheduled):
                slot = table[position // size] * size + position % size
                self._memory[group][slot] = sequence.digests[position]

    def _read(self, request_id: str, computed: int, scheduled: int) -> None:
        sequence = self._sequences[request_id]
        size = self._layout.block_size
        for group, table in enumerate(sequence.tables):
            window = self._layout.groups[group].window
            first = max(0, computed - window + 1) if window else 0
            for position in range(first, computed + scheduled):
                block = table[position // size]
                assert block != NULL_BLOCK_ID
                found = self._memory[group].get(block * size + position % size)
                assert found == sequence.digests[position], (
                    f"{request_id}: group {group}, position {position} holds something else"
                )


@dataclass
class Stream:
    """What a client has received for one request."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # at which outputs came
    finish_reason: FinishReason | None = None

    def take(self, output: EngineCoreOutput, step: int, num_prior: int) -> None:
        assert self.finish_reason is None, "an output behind the last one"
        assert output.first_index == num_prior + len(self.tokens), "a token lost or doubled"
        self.tokens += output.new_token_ids
        self.outputs.append(output)
        self.steps.append(step)
        self.finish_reason = output.finish_reason


class Box:
    """Scheduler, KVCacheManager and CheckingExecutor, stepped by hand."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        layers=FULL_ONLY,
        block_size: int = 4,
        max_model_len: int = 200,
        enable_prefix_caching: bool = True,
        **settings,
    ) -> None:
        config = SchedulerConfig(**{"max_num_batched_tokens": 32, **settings})
        layout = make_kv_cache_layout(list(layers), block_size=block_size, bytes_per_layer_token=1)
        self.clock = ManualClock(100.0)
        self.kv = KVCacheManager(
            KVCacheConfig(layout=layout, num_blocks=num_blocks),
            max_chunk=config.max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.scheduler = Scheduler(config, self.kv, max_model_len=max_model_len, clock=self.clock)
        self.executor = CheckingExecutor(layout, num_blocks, config.max_num_batched_tokens)
        self.streams: dict[str, Stream] = {}
        self.requests: dict[str, EngineCoreRequest] = {}
        self.plans: list[SchedulerOutput] = []

    def add(self, request: EngineCoreRequest) -> Stream:
        answer = self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.executor.set_salt(request.request_id, request.cache_salt)
        stream = self.streams.setdefault(request.request_id, Stream())
        if answer is not None:
            stream.take(answer, 0, len(request.prior_output_ids))
        return stream

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        self.kv.pool.check()
        outputs = self.scheduler.update(plan, self.executor.execute(plan))
        self.kv.pool.check()
        for client, news in outputs.items():
            for output in news:
                request = self.requests[output.request_id]
                assert client == request.client_index
                stream = self.streams[output.request_id]
                stream.take(output, plan.step, len(request.prior_output_ids))
        self.clock.advance(0.01)
        self.plans.append(plan)
        return plan

    def run(self, most_steps: int = 5000) -> None:
        """Step until nothing is left, and check that nothing is."""
        for _ in range(most_steps):
            if not self.scheduler.has_work():
                break
            assert self.step().request_ids, "an empty plan with work pending"
        assert not self.scheduler.has_work(), f"work left after {most_steps} steps"
        self.check_idle()

    def check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        assert self.kv.pool.num_free == self.kv.pool.num_blocks - 1
        self.kv.pool.check()


def make_request(request_id: str, prompt, max_tokens: int | None = 8, **fields):
    """``prompt``: token ids, or how many to make up. Sampling fields and request fields mixed."""
    if isinstance(prompt, int):
        start = sum(request_id.encode()) * 1000
        prompt = [(start + 7 * i) % 50_000 for i in range(prompt)]
    names = set(EngineCoreRequest.__struct_fields__)
    own = {name: fields.pop(name) for name in list(fields) if name in names}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, **{"seed": 0, **fields}),
        **own,
    )


def expected_tokens(prompt: list[int], count: int, *, prior=(), seed: int = 0) -> list[int]:
    """The mock model's continuation, by its definition."""
    sequence = [*prompt, *prior]
    salt = seed * 0xD6E8FEB86659FD93 & ((1 << 64) - 1)
    for _ in range(count):
        sequence.append(mock_token(sequence[-1], len(sequence), salt))
    return sequence[len(prompt) + len(prior) :]
