"""The private folder in which local sockets have their names.

Owns: its mode (0700), the length limit of unix socket paths, and its removal, also of folders whose
owner was killed: each owner holds a lock on its folder for as long as it lives, so a folder that
can be locked is nobody's. Called by launch/ and client/.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

# sizeof(sockaddr_un.sun_path) is 108 with the final zero.
MAX_SOCKET_PATH_BYTES = 107
_PREFIX = "trimaran-"
# A younger folder may be one whose owner has not locked it yet.
_STALE_AFTER_S = 60.0


class PrivateFolder:
    """Make a folder only this user can enter. ``close`` removes it, with what is in it."""

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_SOCKET_PATH_BYTES - 40:
            parent = "/tmp"  # a deep TMPDIR would leave no room for a socket's name
        _remove_stale(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _try_lock(self.path)

    def socket_path(self, name: str) -> str:
        """Raises ValueError: the path would not fit a socket address."""
        path = str(self.path / name)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"{path}: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes")
        return path

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None: gone, another user's, or locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(_PREFIX + "*"):
        try:
            status = folder.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _STALE_AFTER_S:
            continue
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
