"""What it means, and what helps, when the engine's process gets no more memory.

Owns: how such failures are recognised, whichever library met them. Called by ``engine_core``.
(Where the system promises more than it has, it kills instead: see process/spawn.)
"""

import contextlib
import errno
from collections.abc import Iterator

from trimaran.errors import OutOfMemoryError

# What torch's and C++'s allocators say; on a CPU they have no exception of their own.
_WORDS = ("can't allocate memory", "out of memory", "bad_alloc")


@contextlib.contextmanager
def memory_explained(doing: str, hint: str) -> Iterator[None]:
    """Raises OutOfMemoryError, with ``hint``, for whatever says that there is no memory."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"no memory left while {doing}", hint=hint) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(words in str(error) for words in _WORDS)
