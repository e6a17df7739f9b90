"""SIGUSR1: any child says where its threads are, whatever it is doing, and goes on doing it."""

import os
import signal

import pytest
from tests.process import children
from tests.process.conftest import wait_until

from trimaran.process.spawn import spawn
from trimaran.process.stacks import StackFile

TIMEOUT_S = 20.0


@pytest.fixture
def start():
    """start(function) -> (child, a descriptor to which the child writes once it is there)."""
    started = []

    def begin(function):
        readable, writable = os.pipe()
        entry = f"tests.process.children:{function.__name__}"
        child = spawn(entry, children.Report(writable), name="a-child", pass_fds=[writable])
        os.close(writable)
        started.append((child, readable))
        return child, readable

    yield begin
    for child, readable in started:
        child.close()
        os.close(readable)


def answer(child):
    text = ""

    def answered():
        nonlocal text
        text = text or child.stacks.take()
        return text

    wait_until(answered, TIMEOUT_S, "the answer")
    return text


@pytest.mark.parametrize("function", [children.wait_for_ever, children.spin_for_ever])
def test_a_child_answers_while_it_waits_and_while_it_is_busy_in_python(start, function):
    child, readable = start(function)
    os.read(readable, 100)
    for _ in range(2):
        child.ask_stacks()
        assert f"in {function.__name__}" in answer(child)
        assert child.stacks.take(at_once=True) == ""
    assert child.alive


def test_a_child_that_cannot_answer_yet_does_so_later_and_lives(start):
    child, readable = start(children.wait_for_ever)
    child.ask_stacks()  # before its interpreter has begun
    assert "Current thread" in answer(child)
    assert os.read(readable, 100) == b"waiting"
    assert child.alive


def test_a_stopped_child_does_not_answer_and_fencing_ends_it_with_the_reason(start):
    child, readable = start(children.wait_for_ever)
    os.read(readable, 100)
    os.kill(child.pid, signal.SIGSTOP)
    child.ask_stacks()
    child.fence("hung: no progress")
    assert child.wait(TIMEOUT_S)
    assert child.end().return_code == -signal.SIGKILL
    assert child.end().explained == "hung: no progress"
    assert child.stacks.take(at_once=True) == ""


def test_starting_a_child_leaves_this_process_as_it_was(start):
    before = signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start(children.wait_for_ever)
    after = signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert before == after


def test_an_answer_is_taken_when_it_is_complete_and_never_kept_for_long(monkeypatch):
    monkeypatch.setattr("trimaran.process.stacks._MAX_BYTES", 64)
    file = StackFile()
    assert file.take() == ""
    os.write(file.descriptor, b"half of ")
    assert file.take() == ""  # the first look: more may come
    os.write(file.descriptor, b"an answer\n")
    assert file.take() == ""
    assert file.take() == "half of an answer"
    assert file.take() == ""
    os.write(file.descriptor, b"now")
    assert file.take(at_once=True) == "now"
    os.write(file.descriptor, b"x" * 100)  # somebody asks faster than we look
    assert file.take() == "x" * 64
    assert os.fstat(file.descriptor).st_size == 0
    file.close()
