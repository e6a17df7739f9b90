"""One engine: a scheduler, an executor, and the step that drives them.

Owns: start-up (load, size the KV cache, warm up), the step, and the operations of control. Knows
nothing of queues, threads or sockets, nor of its own rank: in process, InprocClient calls it; in a
process of its own, EngineCoreProc does and stamps rank and incarnation on what leaves.
"""

import importlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import assert_never, cast

from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.config import EngineConfig
from trimaran.engine.out_of_memory import memory_explained
from trimaran.engine.progress import WorkProgress
from trimaran.engine.request_checks import verify_request
from trimaran.engine.sleep import SleepControl
from trimaran.executor.base import Executor, ProgressCallback, UnitCallback
from trimaran.messages import (
    ControlOperation,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    Ping,
    Profile,
    ResetPrefixCache,
    SchedulerStats,
    Sleep,
    WakeUp,
)
from trimaran.scheduling.kv_cache_manager import KVCacheManager
from trimaran.scheduling.kv_layout import plan_kv_cache
from trimaran.scheduling.scheduler import Scheduler

# Imported when chosen: the mock must not load torch.
EXECUTORS = {
    "uni": "trimaran.executor.inproc:InprocExecutor",
    "mock": "trimaran.executor.mock:MockExecutor",
}


def make_executor(config: EngineConfig, on_unit: UnitCallback = lambda _: None) -> Executor:
    """The executor that --distributed-executor-backend names, not loaded yet."""
    module, _, name = EXECUTORS[config.executor.distributed_executor_backend].partition(":")
    return cast(Executor, getattr(importlib.import_module(module), name)(config, on_unit))


_MODEL_HINT = "use a smaller model, or one with fewer bits a weight"
_CACHE_HINT = "give the KV cache less with --kv-cache-memory-bytes, or use a smaller model"


def _no_progress(phase: str, share: float, detail: str) -> None:
    """For callers who do not watch."""


class EngineCore:
    """Ready to step once constructed; owns the executor from then on.

    Raises CheckpointError, ConfigError: the model cannot be loaded, or does not fit (the executor
    is shut down then). ``progress`` is told what the engine does; what the executor does it hears
    from the executor (``make_executor``'s ``on_unit``).
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_progress: ProgressCallback = _no_progress,
        num_engines_on_host: int = 1,
        progress: WorkProgress | None = None,
    ) -> None:
        self._num_engines_on_host = num_engines_on_host
        self._executor = executor
        self._clock = clock
        self._progress = progress or WorkProgress(clock=clock)
        self.phases: list[tuple[str, float]] = []  # of start-up, in seconds

        def report(phase: str, share: float, detail: str) -> None:
            self._progress.unit_done()
            on_progress(phase, share, detail)

        try:
            self._start(config, report)
        except BaseException:
            executor.shutdown()
            raise

    def _start(self, config: EngineConfig, on_progress: ProgressCallback) -> None:
        began = self._clock.monotonic()

        def phase_done(name: str) -> None:
            nonlocal began
            now = self._clock.monotonic()
            self.phases.append((name, now - began))
            began = now

        with self._progress.operation():
            with memory_explained("loading the model", _MODEL_HINT):
                self.facts = self._executor.load(on_progress)
            phase_done("loading")
            self.kv_config, self.max_model_len = plan_kv_cache(
                self.facts, config, num_engines_on_host=self._num_engines_on_host
            )
            with memory_explained("making the KV cache", _CACHE_HINT):
                self._executor.initialize_kv_cache(self.kv_config)
            phase_done("KV cache")
        with memory_explained("warming up", _CACHE_HINT):
            self._executor.warm_up(on_progress)
        phase_done("warming up")
        self._scheduler = Scheduler(
            config.scheduler,
            KVCacheManager(
                self.kv_config,
                max_chunk=config.scheduler.max_num_batched_tokens,
                enable_prefix_caching=config.cache.enable_prefix_caching,
            ),
            max_model_len=self.max_model_len,
            clock=self._clock,
        )
        self._sleep = SleepControl(self._scheduler, self._executor, on_progress)

    def ready_response(
        self, rank: int, incarnation: int, phases: Sequence[tuple[str, float]] = ()
    ) -> EngineCoreReadyResponse:
        """What was found out; ``phases`` are those of the process before this object."""
        layout, facts = self.kv_config.layout, self.facts
        return EngineCoreReadyResponse(
            rank=rank,
            incarnation=incarnation,
            num_kv_blocks=self.kv_config.num_blocks - 1,  # usable ones
            block_size=layout.block_size,
            max_model_len=self.max_model_len,
            vocab_size=facts.vocab_size,
            dtype=facts.dtype,
            kv_cache_bytes=self.kv_config.num_blocks * layout.bytes_per_block,
            weight_bytes=facts.weight_bytes,
            num_threads=facts.num_threads,
            kernels=facts.kernels,
            phases=[*phases, *self.phases],
        )

    def add_request(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request for the next steps, or for those after a sleep.

        Returns its only output if there is nothing to do for it.
        Raises InvalidRequestError: it can never run here; nothing was queued.
        """
        verify_request(request, self.facts)
        return self._sleep.add(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Drop these, whatever they are doing; nothing more comes out for them."""
        self._scheduler.abort(request_ids)
        self._sleep.abort(request_ids)

    def has_work(self) -> bool:
        """Whether ``step`` would do something; not for requests that wait for a sleep to end."""
        return self._scheduler.has_work() or self._sleep.has_work()

    def stats(self) -> SchedulerStats:
        return self._sleep.complete(self._scheduler.stats())

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Compute one step; returns what it brought, by client index, statistics with each.

        A step that brought no token yet (a long prompt) reports its statistics to client 0.
        Without work: nothing. Any exception leaves the engine in doubt; the caller ends it.
        """
        if self._sleep.has_work():
            with self._progress.operation():
                outputs = self._sleep.step()
        elif self._scheduler.has_work():
            plan = self._scheduler.schedule()
            self._progress.begin_step(plan.total_num_scheduled_tokens)
            with memory_explained("computing a step", _CACHE_HINT):
                computed = self._executor.execute(plan)
            outputs = self._scheduler.update(plan, computed)
            self._progress.end_step()
        else:
            return {}
        stats, now = self.stats(), self._clock.wall()
        return {
            client: EngineCoreOutputs(
                rank=0, incarnation=0, outputs=news, stats=stats, timestamp=now
            )
            for client, news in (outputs or {0: []}).items()
        }

    def control(self, operation: ControlOperation) -> "Future[object]":
        """Carry out an operation; the future has its result, or what it raised.

        Done on return, but for a Sleep: that one is done by the steps to come.
        """
        done: Future[object] = Future()
        try:
            result = self._carry_out(operation)
        except Exception as error:  # noqa: BLE001  utility dispatch: the error is the caller's
            done.set_exception(error)
            return done
        if isinstance(result, Future):
            return result
        done.set_result(result)
        return done

    def _carry_out(self, operation: ControlOperation) -> object:
        match operation:
            case ResetPrefixCache():
                return self._scheduler.reset_prefix_cache()
            case Ping():
                return self.stats()
            case Sleep():
                return self._sleep.sleep(operation)
            case WakeUp():
                self._sleep.wake_up()
                return None
            case Profile():
                return self._executor.profile(operation.action)
            case _:
                assert_never(operation)

    def shutdown(self) -> None:
        """Release the executor; may be called twice."""
        self._executor.shutdown()
