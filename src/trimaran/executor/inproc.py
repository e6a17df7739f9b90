"""The executor of one worker in this process: nothing between a plan and its computation."""

from typing import Literal

from trimaran.config import EngineConfig
from trimaran.executor.base import ProgressCallback, UnitCallback
from trimaran.messages import KVCacheConfig, ModelFacts, ModelRunnerOutput, SchedulerOutput
from trimaran.worker.worker import Worker


class InprocExecutor:
    """See ``executor.base.Executor``. ``worker`` is None after ``shutdown``."""

    def __init__(self, config: EngineConfig, on_unit: UnitCallback = lambda _: None) -> None:
        self.worker: Worker | None = Worker(config, on_unit)

    def load(self, on_progress: ProgressCallback) -> ModelFacts:
        return self._open_worker().load(on_progress)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._open_worker().initialize_kv_cache(config)

    def warm_up(self, on_progress: ProgressCallback) -> None:
        self._open_worker().warm_up(on_progress)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self._open_worker().execute(plan)

    def sleep(self, level: int) -> None:
        self._open_worker().sleep(level)

    def wake_up(self, on_progress: ProgressCallback) -> None:
        self._open_worker().wake_up(on_progress)

    def profile(self, action: Literal["start", "stop"]) -> str:
        return self._open_worker().profile(action)

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None  # weights and KV cache go with it

    def _open_worker(self) -> Worker:
        assert self.worker is not None, "the executor is shut down"
        return self.worker
