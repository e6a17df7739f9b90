"""Whatever a test starts is gone when it ends: processes, descriptors, threads, socket folders."""

import gc
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from trimaran.ipc.codec import INLINE_BYTES
from trimaran.ipc.folder import PrivateFolder
from trimaran.ipc.sockets import Context
from trimaran.launch.links import BoundLinks

DEADLINE_S = 10.0


def wait_until(condition, timeout_s=DEADLINE_S, what="the condition"):
    """For states that nobody announces (the death of a process that is not our child)."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_s} s"
        time.sleep(0.01)


def descendants(pid=None):
    """pid -> command of all living processes below ``pid`` (default: this one)."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z" or parent == str(os.getpid()):
                parents[int(entry.name)], commands[int(entry.name)] = int(parent), command
    found = {pid or os.getpid()}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return {child: commands[child] for child in found - {pid or os.getpid()}}


def is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def _descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one by which we list
    return found


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path, pyzmqs_thread):
    # tmp_path: pytest's own folder is made before ours.
    # Short, for socket paths; and away from what other programs leave in /tmp.
    folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    gc.collect()
    threads, descriptors, children = set(threading.enumerate()), _descriptors(), descendants()
    yield
    gc.collect()
    new_children = {pid: what for pid, what in descendants().items() if pid not in children}
    assert not new_children, f"left behind: {new_children}"
    new_threads = [t for t in threading.enumerate() if t not in threads and t.is_alive()]
    assert not new_threads, f"left behind: {new_threads}"
    now = _descriptors()
    new = {fd: what for fd, what in now.items() if descriptors.get(fd) != what}
    assert not new, f"left open: {new}"
    left = os.listdir(folder)
    assert not left, f"left in the temporary folder: {left}"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def pyzmqs_thread():
    """pyzmq starts a thread of its own, for good, with the first frame that it does not copy."""
    context = Context()
    left, right = context.pair()
    left.try_send([memoryview(bytes(INLINE_BYTES))])
    right.receive(DEADLINE_S)
    for each in (left, right, context):
        each.close()


@pytest.fixture
def links():
    """Of two front ends of engine rank 0."""
    folder = PrivateFolder(tempfile.gettempdir())
    bound = [BoundLinks.bind(folder, index, (0,)) for index in range(2)]
    yield [each.spec for each in bound]
    for each in bound:
        each.close()
    folder.close()
