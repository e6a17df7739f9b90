"""A mapped file: its views, and that reading it through does not make it resident."""

import re
from pathlib import Path

import numpy as np
import pytest

from trimaran.errors import CheckpointError
from trimaran.formats.mapped_file import MappedFile


def resident_file_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+) kB", status)[1]) * 1024


def test_reading_piece_by_piece_leaves_little_resident(tmp_path):
    size, piece = 64 << 20, 1 << 20
    path = tmp_path / "f"
    content = np.arange(size // 8, dtype=np.uint64)
    path.write_bytes(content.tobytes())
    file = MappedFile(path)
    before = resident_file_bytes()
    total = 0
    first = file.view(0, piece)
    for start in range(0, size, piece):
        total += int(file.view(start, piece).view(np.uint64).sum())
        assert resident_file_bytes() - before < 8 << 20
    assert total == int(content.sum())
    assert np.array_equal(first.view(np.uint64), content[: piece // 8])  # views stay good


def test_views_outlive_closing_and_cannot_be_written(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"hello world")
    file = MappedFile(path)
    assert file.size == 11
    view = file.view(6, 5)
    file.close()
    assert view.tobytes() == b"world"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_what_cannot_be_mapped(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing: cannot be read: No such file"):
        MappedFile(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        MappedFile(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match=r"empty: the file is empty"):
        MappedFile(tmp_path / "empty")
