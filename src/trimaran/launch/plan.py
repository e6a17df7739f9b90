"""Which processes a configuration asks for. Pure: nothing here starts anything.

Owns: ranks, indices, names and environments of processes. Called by ``core_engines`` and
``supervisor``.
"""

from dataclasses import dataclass, field

from trimaran.config import EngineConfig


@dataclass(frozen=True)
class EngineProcess:
    """One engine on this node."""

    rank: int  # global, over all nodes
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"engine-{self.rank}"


@dataclass(frozen=True)
class ApiServerProcess:
    client_index: int

    @property
    def name(self) -> str:
        return f"api-{self.client_index}"


def plan_engines(config: EngineConfig) -> tuple[EngineProcess, ...]:
    """The engines of this node."""
    threads = config.executor.threads
    # Read by OpenMP when torch is imported, which is before the engine can set anything itself.
    # Threads that wait spin for microseconds, then sleep: the API server runs on the same cores,
    # and a spinning thread takes from the one it waits for (docs/decisions/002-cpu-kernels.md).
    # The count is GNU OpenMP's; other runtimes know the policy.
    env = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return (EngineProcess(rank=0, env=env),)


def plan_api_servers() -> tuple[ApiServerProcess, ...]:
    return (ApiServerProcess(client_index=0),)
