"""The engine processes of this node.

Owns: starting, watching and ending them, and which of them failed first. Knows nothing of the
handshake. Called by ``core_engines``.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from trimaran.clock import Clock
from trimaran.config import EngineConfig
from trimaran.engine.spec import EngineSpec
from trimaran.errors import ChildFailedError
from trimaran.ids import new_incarnation
from trimaran.ipc.progress_board import BoardPlace
from trimaran.launch.plan import EngineProcess
from trimaran.process.spawn import Child, ChildEnd, end_children, spawn

logger = logging.getLogger(__name__)

ENGINE_ENTRY = "trimaran.engine.engine_core_proc:run_engine_core"


class EngineId(NamedTuple):
    rank: int
    incarnation: int


class CoreEngineProcManager:
    """Starts all engines of the plan. Raises OSError: a process cannot be started (none remain)."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Sequence[EngineProcess],
        handshake_address: str,
        clock: Clock,
        entry: str = ENGINE_ENTRY,
        *,
        board: BoardPlace,
    ) -> None:
        self._grace_s = config.launch.shutdown_grace_s
        self.engines: dict[Child, EngineId] = {}
        try:
            for process in plan:
                spec = EngineSpec(
                    config=config,
                    rank=process.rank,
                    incarnation=new_incarnation(),
                    handshake_address=handshake_address,
                    spawned_at=clock.wall(),
                    num_engines_on_host=len(plan),
                    board=board,
                )
                child = spawn(
                    entry,
                    spec,
                    name=process.name,
                    pass_fds=[board.descriptor],
                    env=process.env,
                )
                self.engines[child] = EngineId(spec.rank, spec.incarnation)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    @property
    def children(self) -> list[Child]:
        return list(self.engines)

    def close(self, grace_s: float | None = None) -> None:
        """End them all; returns when none is left. Idempotent."""
        try:
            end_children(self.children, self._grace_s if grace_s is None else grace_s)
        finally:
            self.engines.clear()


def child_failed(name: str, end: ChildEnd) -> ChildFailedError:
    """The error by which a child's end reaches whoever waits for the child."""
    failure = end.failure
    return ChildFailedError(
        f"{name} failed: {end.text}",
        child=name,
        cause_type=failure.type_name if failure else None,
        traceback=failure.traceback if failure else None,
        hint=end.hint,
    )


def log_stacks(child: Child, *, at_once: bool = False) -> None:
    """Print what a child answered to SIGUSR1, if it did; see ``StackFile.take``."""
    text = child.stacks.take(at_once=at_once)
    if text:
        # Asked for, or about to be needed: shown at every --log-level.
        logger.error("stacks of %s (pid %d):\n%s", child.name, child.pid, text)
