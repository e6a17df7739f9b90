"""A file mapped read-only into memory, for both weight formats.

Owns: the mapping, bounds of every access, and giving pages back: each thread's last view is dropped
from resident memory when it asks for the next, so a load never holds the whole file on top of the
model. Views stay valid (the kernel reads them again when touched). Knows nothing of formats.
"""

import mmap
import threading
from pathlib import Path

import numpy as np

from trimaran.errors import CheckpointError


class MappedFile:
    """Read-only bytes of ``path``. Raises CheckpointError when missing, unreadable or empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if not self.size:
                    raise CheckpointError(
                        "the file is empty", file=str(path), hint="download it again"
                    )
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                f"cannot be read: {error.strerror or error}", file=str(path)
            ) from None
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self._last = threading.local()

    def header(self) -> memoryview:
        """All bytes, for a parser that walks the first few."""
        return memoryview(self._bytes.data)

    def view(self, offset: int, length: int) -> np.ndarray:
        """uint8[length], read-only. The caller has checked the range against ``size``."""
        start, stop = getattr(self._last, "pages", (0, 0))
        if stop > start:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
        page = mmap.PAGESIZE
        self._last.pages = (-(-offset // page) * page, (offset + length) // page * page)
        return self._bytes[offset : offset + length]

    def close(self) -> None:
        """Let go. The mapping itself ends with the last view that somebody still holds."""
        self._bytes = self._bytes[:0].copy()
