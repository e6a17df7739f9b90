"""What every engine of this node is doing, in memory that its launcher and front ends share.

Owns: the cells and who may write which. One anonymous file (no name, nothing left behind) of 8-byte
cells, each with one writer, so there are no locks and a process that is stopped half-way harms
nobody. Knows nothing of what the numbers mean for an engine's life (launch/hang_watch judges them).

    launcher   reads all     ProgressBoard
    engine     writes        EngineCells: its main and its input thread, each their own cells
    front end  writes        SentCells: how many messages it has sent to an engine

What a front end sent and an engine did not take is work pending, so an engine that was stopped
while idle is seen too. Counts of messages belong to one incarnation of the engine: what was sent to
an earlier one means nothing.
"""

import fcntl
import mmap
import os
from typing import NamedTuple, Self

import msgspec

_CELL_BYTES = 8
# Cells of a row, by position; behind them, per front end: received, sent.
_UNITS, _PENDING, _LIMIT_MS, _STEPS, _QUEUED, _APPLIED, _TURNS, _UNUSED = range(8)
_FIXED = 8
_MASK = (1 << 32) - 1
# The size is what all have agreed on: shrinking it would end those who read it (SIGBUS).
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class BoardPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a board is. The descriptor is inherited by, or belongs to, who reads this."""

    descriptor: int
    ranks: tuple[int, ...]  # one row each, in this order
    num_clients: int

    @property
    def row_cells(self) -> int:
        return _FIXED + 2 * self.num_clients

    @property
    def size_bytes(self) -> int:
        return _CELL_BYTES * self.row_cells * len(self.ranks)


class Activity(NamedTuple):
    """One thread of an engine, at one moment."""

    pending: bool  # it has work
    progress: int  # changes whenever a unit of work is done
    limit_s: float  # what the engine itself allows the present unit; 0: it has no wishes


class EngineReading(NamedTuple):
    steps: int  # done since the engine started
    computing: Activity  # the main thread
    receiving: Activity  # the input thread


class _Cells:
    """A mapped board. Raises ValueError: the descriptor is no board of this shape."""

    def __init__(self, place: BoardPlace) -> None:
        size = os.fstat(place.descriptor).st_size
        if size != place.size_bytes:
            raise ValueError(f"a progress board of {place.size_bytes} bytes expected, not {size}")
        self.place = place
        self._map = mmap.mmap(place.descriptor, size)
        self.values = memoryview(self._map).cast("Q")

    def row(self, rank: int) -> int:
        """Index of its first cell. Raises ValueError: the board has no such rank."""
        return self.place.ranks.index(rank) * self.place.row_cells

    def close(self) -> None:
        self.values.release()
        self._map.close()


class ProgressBoard:
    """The launcher's view."""

    def __init__(self, place: BoardPlace) -> None:
        """Open one that somebody else owns."""
        self.place = place
        self._cells = _Cells(place)
        self._own_descriptor = -1

    @classmethod
    def create(cls, ranks: tuple[int, ...], num_clients: int) -> Self:
        """Raises OSError: there is no memory or no descriptor left."""
        descriptor = os.memfd_create("trimaran-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            place = BoardPlace(descriptor=descriptor, ranks=ranks, num_clients=num_clients)
            os.ftruncate(descriptor, place.size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            board = cls(place)
        except BaseException:
            os.close(descriptor)
            raise
        board._own_descriptor = descriptor
        return board

    def read(self, rank: int, incarnation: int) -> EngineReading:
        """What the engine of this incarnation does now."""
        values, row = self._cells.values, self._cells.row(rank)
        received, sent = row + _FIXED, row + _FIXED + self.place.num_clients
        num_received, not_received = 0, False
        for client in range(self.place.num_clients):
            count, tagged = values[received + client], values[sent + client]
            num_received += count
            if tagged >> 32 == incarnation & _MASK:
                not_received = not_received or tagged & _MASK != count & _MASK
        applied, limit_s = values[row + _APPLIED], values[row + _LIMIT_MS] / 1000
        return EngineReading(
            steps=values[row + _STEPS],
            computing=Activity(
                pending=bool(values[row + _PENDING]) or values[row + _QUEUED] != applied,
                progress=values[row + _UNITS] + applied,
                limit_s=limit_s,
            ),
            # A link that turns and finds nothing is not to blame for a message that is on its way.
            receiving=Activity(not_received, num_received + values[row + _TURNS], limit_s),
        )

    def close(self) -> None:
        """Idempotent."""
        self._cells.close()
        if self._own_descriptor >= 0:
            os.close(self._own_descriptor)
            self._own_descriptor = -1


class EngineCells:
    """The engine's row, begun anew. ``place`` None: cells that nobody reads (in one process)."""

    def __init__(
        self, place: BoardPlace | None = None, rank: int = 0, *, num_clients: int = 0
    ) -> None:
        if place is None:
            self._row, size = 0, _CELL_BYTES * (_FIXED + num_clients)
            self._values = memoryview(bytearray(size)).cast("Q")
        else:
            cells = _Cells(place)  # for as long as this process lives
            self._values, self._row, num_clients = cells.values, cells.row(rank), place.num_clients
        for cell in range(_FIXED + num_clients):
            self._values[self._row + cell] = 0
        self._received = range(self._row + _FIXED, self._row + _FIXED + num_clients)

    # ---------------------------------------------------------------- written by the main thread

    def unit_done(self) -> None:
        self._values[self._row + _UNITS] += 1

    def step_done(self) -> None:
        self._values[self._row + _STEPS] += 1

    def set_pending(self, pending: bool) -> None:
        self._values[self._row + _PENDING] = pending

    def set_limit(self, seconds: float) -> None:
        """How long the present unit may take, if that is more than the observer's own limit."""
        self._values[self._row + _LIMIT_MS] = round(seconds * 1000)

    def applied(self, number: int) -> None:
        """The main thread is done with the item that ``queued`` gave this number."""
        self._values[self._row + _APPLIED] = number

    # --------------------------------------------------------------- written by the input thread

    def queued(self, number: int) -> None:
        """The number of the last item given to the main thread; they count from 1."""
        self._values[self._row + _QUEUED] = number

    def received(self, client_index: int) -> None:
        """A message of this front end was dealt with, well-formed or not."""
        self._values[self._received[client_index]] += 1

    def turned(self) -> None:
        """The input thread looked at its links."""
        self._values[self._row + _TURNS] += 1


class SentCells:
    """A front end's cells. ``place`` None: one on another node, which shares no memory."""

    def __init__(self, place: BoardPlace | None, client_index: int) -> None:
        if place is not None and not 0 <= client_index < place.num_clients:
            raise ValueError(f"client index {client_index} of {place.num_clients}")
        self._cells = _Cells(place) if place is not None else None
        self._client_index = client_index
        self._sent: dict[int, int] = {}  # rank -> the value of its cell

    def begin(self, rank: int, incarnation: int) -> None:
        """An engine has greeted: from now on messages to this rank are messages to it."""
        self._write(rank, (incarnation & _MASK) << 32)

    def count(self, rank: int) -> None:
        """A message was given to the link."""
        if rank in self._sent:
            value = self._sent[rank]
            self._write(rank, value & ~_MASK | (value + 1) & _MASK)

    def close(self) -> None:
        """Idempotent; what comes later is not counted."""
        if self._cells is not None:
            cells, self._cells = self._cells, None
            cells.close()

    def _write(self, rank: int, value: int) -> None:
        if self._cells is not None:
            place = self._cells.place
            cell = self._cells.row(rank) + _FIXED + place.num_clients + self._client_index
            self._cells.values[cell] = self._sent[rank] = value
