"""The two links of a front end: requests out, outputs in.

Owns: ``ClientLinks``, by which a front end finds the listeners that were bound for it, and the
binding. Called by ``supervisor`` (for API servers) and client/ (for itself).
"""

from typing import Self

import msgspec

from trimaran.ipc.listeners import Listener
from trimaran.ipc.progress_board import BoardPlace


class ClientLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors are inherited by, or belong to, the process that reads this."""

    client_index: int
    input_address: str  # engines connect their DEALER here
    input_fd: int
    output_address: str  # and their PUSH here
    output_fd: int
    ranks: tuple[int, ...]  # the engines to expect
    peer_fds: tuple[int, ...]  # which an engine on this host inherits to connect
    board: BoardPlace | None = None  # where to count what it sends; None: on another node


class BoundLinks:
    """The listeners of one front end, kept open by their maker so that a restart finds them."""

    def __init__(self, input_: Listener, output: Listener, spec: ClientLinks) -> None:
        self._listeners = (input_, output)
        self.spec = spec

    @classmethod
    def bind(
        cls, client_index: int, ranks: tuple[int, ...], board: BoardPlace | None = None
    ) -> Self:
        """Raises OSError: the system gives no socket."""
        input_ = Listener.bind_ipc()
        try:
            output = Listener.bind_ipc()
        except BaseException:
            input_.close()
            raise
        spec = ClientLinks(
            client_index=client_index,
            input_address=input_.address,
            input_fd=input_.fileno(),
            output_address=output.address,
            output_fd=output.fileno(),
            ranks=ranks,
            peer_fds=(*input_.peer_fds, *output.peer_fds),
            board=board,
        )
        return cls(input_, output, spec)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
