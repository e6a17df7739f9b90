"""EngineCore on the mock executor: start-up, steps, control, failure."""

import os
import subprocess
import sys

import pytest
from tests.unit.scheduling.simulation import expected_tokens, make_request

from trimaran.clock import ManualClock
from trimaran.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from trimaran.engine.engine_core import EngineCore, make_executor
from trimaran.errors import ConfigError, InvalidRequestError, OutOfMemoryError
from trimaran.executor.mock import MAX_MODEL_LEN, VOCAB_SIZE, MockExecutor
from trimaran.messages import FinishReason, Ping, ResetPrefixCache


def make_config(max_model_len=None, kv_bytes=None, **scheduler):
    return EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(kv_cache_memory_bytes=kv_bytes),
        scheduler=SchedulerConfig(**scheduler),
        executor=ExecutorConfig(distributed_executor_backend="mock"),
    )


def make_core(clock=None, **settings):
    config = make_config(**settings)
    return EngineCore(config, make_executor(config), clock=clock or ManualClock(50.0))


def run(core):
    """Everything that comes out, by request."""
    tokens, ends = {}, {}
    while core.has_work():
        for client, message in core.step().items():
            assert message.stats is not None
            for output in message.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    ends[output.request_id] = (client, output.finish_reason)
    return tokens, ends


def test_requests_become_tokens():
    core = make_core()
    requests = [make_request(f"r{n}", 10 + n, 6, client_index=n % 2) for n in range(5)]
    for request in requests:
        core.add_request(request)
    tokens, ends = run(core)
    for number, request in enumerate(requests):
        assert tokens[f"r{number}"] == expected_tokens(request.prompt_token_ids, 6)
        assert ends[f"r{number}"] == (number % 2, FinishReason.LENGTH)
    assert core.step() == {}


def test_a_step_without_tokens_still_reports():
    core = make_core(max_num_batched_tokens=16)
    core.add_request(make_request("a", 40, 1, client_index=3))
    first, second, third = core.step(), core.step(), core.step()
    assert list(first) == list(second) == [0]
    assert first[0].outputs == []
    assert (first[0].stats.num_running, first[0].stats.num_prompt_tokens) == (1, 16)
    assert first[0].timestamp == 50.0
    assert list(third) == [3]
    assert third[3].stats.num_running == 0


def test_ready_response_says_what_was_found():
    core = make_core()
    ready = core.ready_response(3, 77, [("importing", 0.5)])
    assert (ready.rank, ready.incarnation) == (3, 77)
    assert (ready.vocab_size, ready.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert ready.block_size == 16
    # Half of the mock's 64 MiB; a block is 16 tokens x 64 bytes; one is the null block.
    assert ready.kv_cache_bytes == 32 << 20
    assert ready.num_kv_blocks == (32 << 20) // 1024 - 1
    assert [name for name, _ in ready.phases] == [
        "importing", "loading", "KV cache", "warming up",
    ]  # fmt: skip


def test_progress_is_reported_by_phase():
    seen = []
    config = make_config()
    EngineCore(config, make_executor(config), on_progress=lambda *what: seen.append(what[:2]))
    assert seen == [("loading", 1.0), ("warming up", 1.0)]


def test_length_is_fitted_when_open_and_refused_when_given():
    # 100 blocks of 1 KiB for two groups: 99 of use, the sliding one holds few.
    fitted = make_core(kv_bytes=100 << 10, max_num_batched_tokens=16).max_model_len
    assert 80 * 16 < fitted < 99 * 16
    core = make_core(kv_bytes=100 << 10, max_num_batched_tokens=16, max_model_len=fitted)
    assert core.max_model_len == fitted
    with pytest.raises(ConfigError, match=f"--max-model-len {fitted}, or --kv-cache-memory"):
        make_core(kv_bytes=100 << 10, max_num_batched_tokens=16, max_model_len=fitted + 16)


def test_a_full_pool_of_longest_requests_finishes():
    core = make_core(kv_bytes=40 << 10, max_num_batched_tokens=32)
    length = core.max_model_len
    for number in range(3):
        core.add_request(make_request(f"r{number}", length - 20, None))
    tokens, _ = run(core)
    assert {name: len(ids) for name, ids in tokens.items()} == dict.fromkeys(("r0", "r1", "r2"), 20)
    assert core.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request("a", []), "prompt"),
        (make_request("a", [5, VOCAB_SIZE]), "prompt"),
        (make_request("a", [-1, 5]), "prompt"),
        (make_request("a", [5], prior_output_ids=[VOCAB_SIZE]), "prior_output_ids"),
        (make_request("a", [5], stop_token_ids=(99_999_999,)), "stop_token_ids"),  # T-A11
        (make_request("a", [5] * MAX_MODEL_LEN), "prompt"),
    ],
)
def test_what_can_never_run_is_refused_and_the_next_one_works(request_, field):
    core = make_core()
    with pytest.raises(InvalidRequestError) as caught:
        core.add_request(request_)
    assert caught.value.param == field
    assert not core.has_work()
    core.add_request(make_request("a", 5, 2))
    assert len(run(core)[0]["a"]) == 2


def test_abort():
    core = make_core()
    core.add_request(make_request("a", 5, 100))
    core.add_request(make_request("b", 5, 3))
    core.step()
    core.abort_requests(["a", "nobody"])
    tokens, _ = run(core)
    assert set(tokens) == {"b"}


def test_control():
    core = make_core()
    core.add_request(make_request("a", 40, 3))
    core.step()
    assert core.control(Ping()).result(0) == core.stats()
    assert core.control(Ping()).result(0).num_running == 1
    assert core.control(ResetPrefixCache()).result(0) is False
    run(core)
    assert core.control(ResetPrefixCache()).result(0) is True


class FailingExecutor(MockExecutor):
    """Raises where told, and counts its ends."""

    def __init__(self, config, where):
        super().__init__(config)
        self.where = where
        self.shutdowns = 0

    def initialize_kv_cache(self, config):
        if self.where == "initialize":
            raise MemoryError("no memory for the KV cache")

    def execute(self, plan):
        if self.where == "execute":
            raise RuntimeError("the device is gone")
        return super().execute(plan)

    def shutdown(self):
        self.shutdowns += 1
        super().shutdown()


def test_failed_start_shuts_the_executor_down():
    executor = FailingExecutor(make_config(), "initialize")
    with pytest.raises(OutOfMemoryError, match=r"KV cache.*--kv-cache-memory-bytes"):
        EngineCore(make_config(), executor)
    assert executor.shutdowns == 1


def test_exception_in_a_step_reaches_the_caller():
    core = EngineCore(make_config(), FailingExecutor(make_config(), "execute"))
    core.add_request(make_request("a", 5, 3))
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()


def test_shutdown_may_be_called_twice():
    core = make_core()
    core.shutdown()
    core.shutdown()


def test_an_engine_on_the_mock_loads_no_torch():
    code = (
        "import sys\n"
        "from trimaran.config import EngineConfig, ExecutorConfig\n"
        "from trimaran.engine.engine_core import EngineCore, make_executor\n"
        "config = EngineConfig(executor=ExecutorConfig(distributed_executor_backend='mock'))\n"
        "EngineCore(config, make_executor(config))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert done.returncode == 0
