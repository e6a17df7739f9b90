"""What an API server process is started with, and how it hears of the deployment.

Owns: ``ApiServerSpec``, and both ends of the state socket between supervisor and API server: a
SOCK_SEQPACKET pair, one struct per packet. Used by ``supervisor`` and by server/.

    supervisor  --DeploymentState, on change-->  API server
                <--ApiServerReady, once--------
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from trimaran.config import Config
from trimaran.errors import ProtocolError
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.launch.links import ClientLinks
from trimaran.messages import ApiServerReady, DeploymentState

logger = logging.getLogger(__name__)

_MAX_PACKET_BYTES = 64 << 10


class ApiServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that one API server is given. Descriptors are inherited."""

    config: Config
    listen_fd: int  # bound and listening TCP socket
    links: ClientLinks  # for make_client(links=…)
    state_fd: int  # for DeploymentWatch
    spawned_at: float  # monotonic seconds at which the supervisor decided to start it

    @property
    def client_index(self) -> int:
        return self.links.client_index


class StateChannel:
    """The supervisor's end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._ours = ours
        self._theirs: socket.socket | None = theirs
        self._encoder = Encoder()
        self._decoder: Decoder[ApiServerReady] = Decoder(ApiServerReady)
        self._unsent: DeploymentState | None = None
        self.ready: ApiServerReady | None = None  # once the server has said so

    @property
    def child_fd(self) -> int:
        """The API server's end, to be inherited."""
        assert self._theirs is not None, "the API server's end was given away"
        return self._theirs.fileno()

    def given(self) -> None:
        """The child has its end: keep no copy, so that its death shows here."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

    def fileno(self) -> int:
        return self._ours.fileno()

    def send(self, state: DeploymentState) -> None:
        """Never waits: a server that does not read gets the latest state when it does."""
        self._unsent = state
        self.flush()

    def flush(self) -> None:
        if self._unsent is not None:
            try:
                self._ours.send(self._encoder.encode(self._unsent))
            except BlockingIOError:
                return
            except OSError:
                pass  # the server is gone; its process descriptor says so too
            self._unsent = None

    def read(self) -> bool:
        """Take what the server sent; False once its end is closed."""
        try:
            packet = self._ours.recv(_MAX_PACKET_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not packet:
            return False
        try:
            self.ready = self._decoder.decode(packet)
        except ProtocolError as error:
            logger.warning("refused a packet of an API server: %s", error)
        return True

    def close(self) -> None:
        self.given()
        self._ours.close()


class DeploymentWatch:
    """The API server's end: the deployment's state in an event loop.

    ``current`` is the latest state; ``on_change`` is called with each new one. When the supervisor
    is gone (its death ends this process by itself) the state says so.
    """

    def __init__(self, state_fd: int) -> None:
        self._socket = socket.socket(fileno=state_fd)
        self._socket.setblocking(False)
        self._decoder: Decoder[DeploymentState] = Decoder(DeploymentState)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callbacks: list[Callable[[DeploymentState], None]] = []
        self.current = DeploymentState(ready=False, phase="starting", percent=0.0)

    def start(self) -> Self:
        """Begin to follow, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        return self

    def on_change(self, callback: Callable[[DeploymentState], None]) -> None:
        self._callbacks.append(callback)

    async def wait_for(
        self, condition: Callable[[DeploymentState], bool], timeout_s: float
    ) -> DeploymentState:
        """The first state that fulfils ``condition``. Raises TimeoutError after ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            while not condition(self.current):
                await self._changed.wait()
        return self.current

    def report_ready(self, phases: Sequence[tuple[str, float]] = ()) -> None:
        """Tell the supervisor that this server answers requests: it then says so to the user."""
        self._socket.send(Encoder().encode(ApiServerReady(list(phases))))

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._loop = None
        self._socket.close()

    def _read(self) -> None:
        state = self.current
        while True:
            try:
                packet = self._socket.recv(_MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self._stop_reading()
                state = msgspec.structs.replace(
                    state, ready=False, failure="the supervisor is gone"
                )
                break
            state = self._decoder.decode(packet)
        if state != self.current:
            self.current = state
            # Whoever waits now sees the change; who waits later waits for the next one.
            self._changed.set()
            self._changed = asyncio.Event()
            for callback in self._callbacks:
                callback(state)

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
