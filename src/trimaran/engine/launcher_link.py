"""The engine's end of the start-up handshake.

Owns: hello, the wait for an answer, and progress in percent of the whole start. Used by the
engine's main thread only; its other end is launch/handshake.py.
"""

import logging

from trimaran.clock import Clock
from trimaran.engine.spec import EngineSpec, fingerprint
from trimaran.errors import DeadlineExceededError, ProtocolError, StartupError
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.ipc.sockets import Context, Socket
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

logger = logging.getLogger(__name__)

# Phase -> (percent of the start where it begins, where it ends).
_PHASES = {
    "spawned": (0.0, 2.0),
    "importing": (2.0, 15.0),
    "loading": (15.0, 80.0),
    "warming up": (80.0, 100.0),
}
_MIN_INTERVAL_S = 0.1


class LauncherLink:
    """Speaks to whoever launched this engine, on this node or another."""

    def __init__(self, context: Context, spec: EngineSpec, pid: int, clock: Clock) -> None:
        self._spec = spec
        self._pid = pid
        self._clock = clock
        self._encoder = Encoder()
        self._decoder: Decoder[HandshakeMessage] = Decoder(HandshakeMessage)
        self._socket: Socket = context.dealer(spec.handshake_address, engine_identity(spec.rank))
        self._phase = "spawned"
        self._sent_at = 0.0

    def introduce(self, timeout_s: float) -> EngineAddresses:
        """Say hello; returns where to connect.

        Raises StartupError: the launcher refused. Raises DeadlineExceededError: no answer.
        """
        hello = EngineHello(
            protocol_version=PROTOCOL_VERSION,
            rank=self._spec.rank,
            incarnation=self._spec.incarnation,
            pid=self._pid,
            config_hash=fingerprint(self._spec.config),
        )
        self._send(hello)
        deadline = self._clock.monotonic() + timeout_s
        while (frames := self._socket.receive(deadline - self._clock.monotonic())) is not None:
            try:
                answer = self._decoder.decode(b"".join(frames))
            except ProtocolError as error:
                logger.warning("refused an answer of the launcher: %s", error)
                continue
            match answer:
                case EngineInit():
                    return answer.addresses
                case HandshakeRefusal():
                    raise StartupError(f"the launcher refused this engine: {answer.reason}")
                case _:
                    logger.warning("the launcher sent a %s", type(answer).__name__)
        raise DeadlineExceededError(
            f"engine rank {self._spec.rank} got no answer from its launcher at"
            f" {self._spec.handshake_address} in {timeout_s:g} s"
        )

    def progress(self, phase: str, share: float, detail: str = "") -> None:
        """Report; ``share`` of the phase is done (0 to 1). May be called as often as one likes."""
        now = self._clock.monotonic()
        if phase == self._phase and now - self._sent_at < _MIN_INTERVAL_S and share < 1.0:
            return
        self._phase = phase
        begin, end = _PHASES.get(phase, (0.0, 0.0))
        self._sent_at = now
        self._send(
            EngineProgress(
                rank=self._spec.rank,
                incarnation=self._spec.incarnation,
                phase=phase,
                percent=round(begin + (end - begin) * share, 1),
                detail=detail,
            )
        )

    def ready(self, response: EngineCoreReadyResponse) -> None:
        self._send(response)

    def close(self) -> None:
        self._socket.close(linger_s=1.0)

    def _send(self, message: HandshakeMessage) -> None:
        # A launcher that reads nothing for this long is gone or will be: nothing to wait for.
        self._socket.try_send([self._encoder.encode(message)])
