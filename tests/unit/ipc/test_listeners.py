"""Listeners without a name: reached by whoever inherits them, and by nobody else."""

import os
import subprocess
import sys
import tempfile

import pytest

from trimaran.ipc.listeners import Listener

_CONNECT = """
import socket, sys
socket.socket(socket.AF_UNIX).connect(sys.argv[1].removeprefix("ipc://"))
"""


@pytest.fixture
def listener(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 200)  # longer than a socket's path may be
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    listener = Listener.bind_ipc()
    assert os.listdir(deep) == []
    yield listener
    listener.close()
    listener.close()


@pytest.mark.parametrize("inherits", [True, False])
def test_only_who_inherits_the_descriptor_can_connect(listener, inherits):
    process = subprocess.run(
        [sys.executable, "-c", _CONNECT, listener.address],
        pass_fds=listener.peer_fds if inherits else (),
        stderr=subprocess.PIPE,
        timeout=20,
    )
    assert (process.returncode == 0) is inherits, process.stderr


def test_without_a_folder_nothing_is_left_open(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/1")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="/proc/1"):
        Listener.bind_ipc()
    assert os.listdir("/proc/self/fd") == before
