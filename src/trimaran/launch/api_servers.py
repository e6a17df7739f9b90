"""One API server process and the supervisor's ends of what they share.

Owns: how an API server is started. Knows nothing of what it serves: the entry point is named by
string (server/ is above this package). Called by ``supervisor``.
"""

from trimaran.clock import SYSTEM_CLOCK
from trimaran.config import Config
from trimaran.launch.api_spec import ApiServerSpec, StateChannel
from trimaran.launch.links import ClientLinks
from trimaran.launch.plan import ApiServerProcess
from trimaran.process.spawn import Child, spawn

API_SERVER_ENTRY = "trimaran.server.main:run_api_server"


class ApiServer:
    """Starts it. Raises OSError: a process cannot be started."""

    def __init__(
        self,
        config: Config,
        process: ApiServerProcess,
        links: ClientLinks,
        listen_fd: int,
        entry: str = API_SERVER_ENTRY,
    ) -> None:
        self.channel = StateChannel()
        self.spawned_at = SYSTEM_CLOCK.monotonic()
        spec = ApiServerSpec(
            config=config,
            listen_fd=listen_fd,
            links=links,
            state_fd=self.channel.child_fd,
            spawned_at=self.spawned_at,
        )
        inherited = [listen_fd, links.input_fd, links.output_fd, spec.state_fd]
        if links.board is not None:
            inherited.append(links.board.descriptor)
        try:
            self.child: Child = spawn(entry, spec, name=process.name, pass_fds=inherited)
        except BaseException:
            self.channel.close()
            raise
        self.channel.given()

    def close(self) -> None:
        """Kill it if it lives; idempotent."""
        self.child.close()
        self.channel.close()
