"""What an engine's death means to those who use it.

Owns: the decision, per (rank, incarnation). Called by the multi-process clients, which then fail
what is pending, or go on. ``RaiseOnDeath`` is the only policy until recovery (S35) brings another.
"""

from typing import Protocol

from trimaran.errors import EngineDeadError
from trimaran.messages import EngineDeath


class DeathPolicy(Protocol):
    def engine_died(self, death: EngineDeath) -> EngineDeadError | None:
        """The error that every pending and later call raises, or None: the client goes on."""
        ...


class RaiseOnDeath:
    """One engine's death is the client's."""

    def engine_died(self, death: EngineDeath) -> EngineDeadError | None:
        return EngineDeadError(
            f"engine rank {death.rank} died",
            rank=death.rank,
            incarnation=death.incarnation,
            cause=death.cause,
        )
