"""The private folder: its mode, its length limit, and what becomes of abandoned ones."""

import os
import stat

import pytest

from trimaran.ipc.folder import MAX_SOCKET_PATH_BYTES, PrivateFolder


@pytest.fixture
def parent(tmp_path):
    return str(tmp_path) if len(str(tmp_path)) < 60 else "/tmp"


def test_only_its_user_can_enter_it_and_close_removes_it(parent):
    folder = PrivateFolder(parent)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "handshake").touch()
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_a_path_that_fits_no_socket_address_is_refused(parent):
    folder = PrivateFolder(parent)
    room = MAX_SOCKET_PATH_BYTES - len(str(folder.path)) - 1
    assert len(folder.socket_path("x" * room)) == MAX_SOCKET_PATH_BYTES
    with pytest.raises(ValueError, match="107"):
        folder.socket_path("x" * (room + 1))
    folder.close()


def test_a_deep_parent_is_not_used(tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    folder = PrivateFolder(str(deep))
    assert folder.path.parent != deep
    assert folder.socket_path("output-65535")
    folder.close()


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path):
    living = PrivateFolder(str(tmp_path))
    if living.path.parent != tmp_path:
        pytest.fail("the test's folder is too deep for socket paths")
    dead, young = tmp_path / "trimaran-dead", tmp_path / "trimaran-young"
    for path in (dead, young):
        path.mkdir()
        (path / "input-0").touch()
    for path in (dead, living.path):
        os.utime(path, (0, 0))
    newest = PrivateFolder(str(tmp_path))
    assert not dead.exists()
    assert living.path.exists()
    assert young.exists()
    newest.close()
    living.close()
