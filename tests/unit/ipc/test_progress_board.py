"""The progress board: what engines and front ends write, as the launcher reads it."""

import os

import pytest

from trimaran.ipc.progress_board import BoardPlace, EngineCells, ProgressBoard, SentCells

RANKS = (4, 7)  # a node's share of the ranks
LIFE = 5 << 40 | 123


@pytest.fixture
def board():
    board = ProgressBoard.create(RANKS, num_clients=2)
    yield board
    board.close()
    board.close()


def test_an_engine_is_read_as_it_wrote(board):
    assert board.read(7, LIFE) == (0, (False, 0, 0.0), (False, 0, 0.0))
    cells, other = EngineCells(board.place, 7), EngineCells(board.place, 4)
    cells.set_pending(True)
    cells.set_limit(12.5)
    cells.unit_done()
    cells.unit_done()
    cells.step_done()
    other.turned()
    assert board.read(7, LIFE) == (1, (True, 2, 12.5), (False, 0, 12.5))
    assert board.read(4, LIFE) == (0, (False, 0, 0.0), (False, 1, 0.0))
    EngineCells(board.place, 7)  # the next engine of this rank begins anew
    assert board.read(7, LIFE) == (0, (False, 0, 0.0), (False, 0, 0.0))
    assert board.read(4, LIFE).receiving.progress == 1


def test_what_waits_for_the_main_thread_is_pending_and_taking_it_is_progress(board):
    cells = EngineCells(board.place, 4)
    cells.queued(1)
    cells.queued(2)
    for number in (1, 2):
        before = board.read(4, LIFE).computing
        assert before.pending
        cells.applied(number)
        assert board.read(4, LIFE).computing.progress > before.progress
    assert not board.read(4, LIFE).computing.pending


def test_what_was_sent_and_not_received_is_pending(board):
    cells, sent = EngineCells(board.place, 4), SentCells(board.place, 1)
    sent.count(4)  # nobody has greeted: to nobody
    sent.begin(4, LIFE)
    sent.begin(7, LIFE)
    assert not board.read(4, LIFE).receiving.pending
    sent.count(4)
    assert board.read(4, LIFE).receiving == (True, 0, 0.0)
    assert not board.read(7, LIFE).receiving.pending
    cells.received(0)  # another front end's
    assert board.read(4, LIFE).receiving == (True, 1, 0.0)
    cells.received(1)
    assert not board.read(4, LIFE).receiving.pending
    sent.close()
    sent.close()
    sent.count(4)
    sent.begin(4, LIFE)
    assert not board.read(4, LIFE).receiving.pending


def test_messages_to_an_earlier_engine_mean_nothing_to_the_next(board):
    EngineCells(board.place, 4)
    sent = SentCells(board.place, 0)
    sent.begin(4, LIFE)
    sent.count(4)
    assert board.read(4, LIFE).receiving.pending
    cells = EngineCells(board.place, 4)
    assert not board.read(4, LIFE + 1).receiving.pending
    sent.begin(4, LIFE + 1)
    assert not board.read(4, LIFE + 1).receiving.pending
    sent.count(4)
    cells.received(0)
    assert not board.read(4, LIFE + 1).receiving.pending
    sent.close()


def test_counts_wrap(board, monkeypatch):
    monkeypatch.setattr("trimaran.ipc.progress_board._MASK", 3)
    cells, sent = EngineCells(board.place, 4), SentCells(board.place, 0)
    sent.begin(4, LIFE)
    for _ in range(9):
        sent.count(4)
        assert board.read(4, LIFE).receiving.pending
        cells.received(0)
        assert not board.read(4, LIFE).receiving.pending
    sent.close()


def test_in_one_process_and_from_another_node_nothing_is_shared():
    cells = EngineCells(num_clients=2)
    cells.received(1)
    cells.unit_done()
    sent = SentCells(None, 3)
    sent.begin(0, LIFE)
    sent.count(0)
    sent.close()


def test_what_is_no_such_board_is_refused(board):
    wrong = BoardPlace(descriptor=board.place.descriptor, ranks=RANKS, num_clients=3)
    for make in (
        lambda: ProgressBoard(wrong),
        lambda: EngineCells(wrong, 4),
        lambda: EngineCells(board.place, 5),
        lambda: SentCells(board.place, 2),
        lambda: SentCells(board.place, -1),
        lambda: board.read(0, LIFE),
    ):
        with pytest.raises(ValueError):
            make()
    # Nor can a process that has it make it shorter under the others.
    with pytest.raises(PermissionError):
        os.ftruncate(board.place.descriptor, 8)
