"""The interface between the engine and whatever computes.

Owns: the order of calls. ``load`` -> ``initialize_kv_cache`` -> ``warm_up`` -> any number of
``execute`` -> ``shutdown``. Between two executes: ``sleep`` (or two, deeper) -> ``wake_up``.
``profile`` any time after ``load``. Implementations: ``inproc`` (a worker in this process),
``mock`` (deterministic fake tokens, torch-free). Chosen by the table in ``engine/engine_core.py``
and imported when chosen.
"""

from collections.abc import Callable
from typing import Literal, Protocol

from trimaran.messages import (
    KVCacheConfig,
    ModelFacts,
    ModelRunnerOutput,
    SchedulerOutput,
)

# Called with (phase, share of that phase done: 0 to 1, detail for people).
ProgressCallback = Callable[[str, float, str], None]
# Called after every unit of work (a layer, a piece of the head) with the tokens of its batch. What
# takes long without such a call is taken for hung. Implementations get it when they are made.
UnitCallback = Callable[[int], None]


class Executor(Protocol):
    """Computes plans. Any exception from ``execute`` leaves the engine in doubt and ends it."""

    def load(self, on_progress: ProgressCallback) -> ModelFacts:
        """Read the weights.

        Raises CheckpointError: a file is missing, damaged or unsupported.
        Raises ConfigError: a setting does not fit this model or machine.
        """
        ...

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV tensors."""
        ...

    def warm_up(self, on_progress: ProgressCallback) -> None:
        """Run once what the first requests will need, so that they are not the slow ones."""
        ...

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Plans arrive in order; each is executed exactly once."""
        ...

    def sleep(self, level: int) -> None:
        """Give memory back: the KV cache (level 1), and the weights (level 2).

        Every request has left by a plan executed before. Nothing is executed until ``wake_up``. Any
        exception leaves the engine in doubt and ends it.
        """
        ...

    def wake_up(self, on_progress: ProgressCallback) -> None:
        """Take memory again, with nothing in the KV cache, and read the weights if need be.

        Raises what ``load`` and ``initialize_kv_cache`` raise; still asleep then, and may be woken
        again.
        """
        ...

    def profile(self, action: Literal["start", "stop"]) -> str:
        """Begin or end recording what the workers do; returns the file written at the end.

        Raises ConflictError: started already, not started, or nothing here to record.
        """
        ...

    def shutdown(self) -> None:
        """Release everything; may be called twice."""
        ...
