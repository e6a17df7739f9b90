"""What this process may use of its machine: cores and memory, containers' limits included.

Owns: reading affinity, cgroup (v1 and v2) and /proc, and giving memory back. Knows nothing of
models. Called by ``worker``.

A cgroup's own folder may be hidden in a container, where the mount begins at that folder: so every
folder from the cgroup's path up to the mount is looked at, and the tightest limit counts.
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_MOUNT = "sys/fs/cgroup"


@dataclass(frozen=True)
class Threads:
    """A number of compute threads and, for people, why it is that."""

    count: int
    reason: str


def allowed_threads(requested: int | None, root: Path = _ROOT) -> Threads:
    """``requested``, or one per core that affinity, cpuset and quota allow, rounded down."""
    if requested is not None:
        return Threads(requested, "--threads")
    # The kernel keeps affinity within the cpuset.
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota(root)
    if quota is not None and quota < cores:
        return Threads(max(1, int(quota)), f"cgroup quota of {quota:g} cores")
    return Threads(cores, f"{cores} of {os.cpu_count()} cores allowed")


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that can still be taken: the system's, or what a cgroup leaves if that is less.

    File pages count as free: the kernel drops them when memory is needed.
    """
    free = [_fields(root / "proc/meminfo")["MemAvailable:"] * 1024]
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                # v1 counts children under total_ only.
                counts = _fields(folder / "memory.stat")
                files = sum(
                    counts.get(f"total_{name}", counts.get(name, 0))
                    for name in ("inactive_file", "active_file")
                )
                free.append(limit - max(0, usage - files))
    return max(0, min(free))


def return_freed_memory() -> None:
    """Give what this process has freed back to the system, which glibc does for big blocks only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # another C library has its own ways
        trim(0)


def _cpu_quota(root: Path) -> float | None:
    """Cores; None: no limit."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        words = _words(folder / "cpu.max")  # "max 100000" or "150000 100000"
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota = _number(folder / "cpu.cfs_quota_us")  # -1: none
        period = _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders that may limit this process, the innermost first."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2
            mounts = [root / _MOUNT, root / _MOUNT / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / _MOUNT / name for name in dict.fromkeys((controllers, controller))]
        else:
            continue
        # ".." leads out of this namespace: of such a path only the mount is ours to see.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth])


def _text(path: Path) -> str:
    """Empty where there is no such file: every one of them is optional."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _number(path: Path) -> int | None:
    """None: no such file, or "max"."""
    words = _words(path)
    return int(words[0]) if words and words[0] != "max" else None


def _fields(path: Path) -> dict[str, int]:
    """Lines of "name number …"."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
