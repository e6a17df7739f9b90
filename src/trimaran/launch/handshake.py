"""The launcher's end of the start-up handshake, as a state machine without sockets.

Owns: who is expected, who said what, and what is still waited for. Knows nothing of sockets or
processes (``core_engines`` moves the messages); its other end is engine/launcher_link.py.

    engine                                  launcher
      hello (version, rank, incarnation, fingerprint) -->
      <-- init (addresses)  |  refusal (both sides' values, the flag)
      progress (phase, percent) …                     -->
      ready (what it found out)                       -->
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.engine.spec import fingerprint_difference
from trimaran.errors import DeadlineExceededError, ProtocolError
from trimaran.ids import rank_of_identity
from trimaran.messages import (
    PROTOCOL_VERSION,
    EngineAddresses,
    EngineCoreReadyResponse,
    EngineHello,
    EngineInit,
    EngineProgress,
    HandshakeMessage,
    HandshakeRefusal,
)


@dataclass
class _Engine:
    incarnation: int
    phase: str = "spawned"
    percent: float = 0.0
    detail: str = ""
    refused: str = ""  # why its hello was; it should end by it, and say so itself
    ready: EngineCoreReadyResponse | None = None


class Handshake:
    """Start-up of all expected engines, with one deadline. Times are monotonic seconds."""

    def __init__(
        self,
        incarnations: Mapping[int, int],  # by rank
        fingerprint: str,
        addresses: EngineAddresses,
        started_at: float,
        timeout_s: float,
    ) -> None:
        self._engines = {rank: _Engine(value) for rank, value in sorted(incarnations.items())}
        self._fingerprint = fingerprint
        self._addresses = addresses
        self._started_at = started_at
        self._timeout_s = timeout_s

    def receive(
        self, identity: bytes, message: HandshakeMessage
    ) -> EngineInit | HandshakeRefusal | None:
        """Take in a message; returns the answer, if it has one.

        Raises ProtocolError: it is not from an engine that is expected, or not for a launcher.
        Raises ValueError: the identity is no engine's.
        """
        if isinstance(message, EngineHello):
            reason = self._objection(identity, message)
            if reason and message.rank in self._engines:
                self._engines[message.rank].refused = reason
            return HandshakeRefusal(reason) if reason else EngineInit(self._addresses)
        if not isinstance(message, EngineProgress | EngineCoreReadyResponse):
            raise ProtocolError(f"a launcher does not take a {type(message).__name__}")
        engine = self._engines.get(rank_of_identity(identity))
        if engine is None or (message.rank, message.incarnation) != (
            rank_of_identity(identity),
            engine.incarnation,
        ):
            raise ProtocolError(f"a message of an old or unknown engine of rank {message.rank}")
        if isinstance(message, EngineProgress):
            if engine.ready is not None:
                return None  # it wakes up from sleep: no start, and told elsewhere
            engine.phase, engine.detail = message.phase, message.detail
            engine.percent = max(engine.percent, min(message.percent, 100.0))
        else:
            message.verify()
            engine.phase, engine.percent, engine.ready = "ready", 100.0, message
        return None

    def _objection(self, identity: bytes, hello: EngineHello) -> str:
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"it speaks protocol {hello.protocol_version}, this side {PROTOCOL_VERSION}:"
                " install the same version of trimaran on all nodes"
            )
        if rank_of_identity(identity) != hello.rank or hello.rank not in self._engines:
            expected = ", ".join(map(str, self._engines))
            return f"rank {hello.rank} is not expected (expected: {expected})"
        if self._engines[hello.rank].incarnation != hello.incarnation:
            return f"another engine runs as rank {hello.rank}"
        return fingerprint_difference(self._fingerprint, hello.config_hash)

    @property
    def complete(self) -> bool:
        return all(engine.ready is not None for engine in self._engines.values())

    @property
    def responses(self) -> list[EngineCoreReadyResponse]:
        """Of the engines that are ready, in order of rank."""
        return [engine.ready for engine in self._engines.values() if engine.ready is not None]

    @property
    def progress(self) -> tuple[str, float, str]:
        """(phase, percent, detail) of the engine that is furthest behind."""
        engine = min(self._engines.values(), key=lambda engine: engine.percent)
        return engine.phase, engine.percent, engine.detail

    def missing(self, now: float) -> str:
        """``"engine rank 0 (phase loading, 12 s)"``, one for each engine that is not ready."""
        return ", ".join(
            f"engine rank {rank} (phase {engine.phase}"
            f"{f' {engine.detail}' if engine.detail else ''}, {now - self._started_at:.0f} s"
            f"{f', refused: {engine.refused}' if engine.refused else ''})"
            for rank, engine in self._engines.items()
            if engine.ready is None
        )

    def check_deadline(self, now: float) -> None:
        """Raises DeadlineExceededError: engines are not ready, by name and phase."""
        if not self.complete and now - self._started_at > self._timeout_s:
            raise DeadlineExceededError(
                f"not ready after {self._timeout_s:g} s: {self.missing(now)}",
                hint="give it more time with --engine-ready-timeout-s",
            )
