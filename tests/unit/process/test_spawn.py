"""Children: what they are given, what they say when they fail, how they end."""

import os
import sys
import time

import msgspec
import pytest
from tests.process import children

from trimaran.errors import CheckpointError
from trimaran.process.age import process_age_s
from trimaran.process.environment import child_environment
from trimaran.process.failure import failure_of
from trimaran.process.spawn import end_children, spawn

TIMEOUT_S = 20.0


def start(function, text="", **options):
    """(child, what it has written once it has ended or ``os.read`` is called)."""
    readable, writable = os.pipe()
    spec = children.Report(descriptor=writable, text=text)
    entry = f"tests.process.children:{function.__name__}"
    child = spawn(entry, spec, name="a-child", pass_fds=[writable], **options)
    os.close(writable)
    return child, readable


def read_all(descriptor):
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_a_child_gets_its_spec_an_environment_without_secrets_and_no_more(monkeypatch):
    monkeypatch.setenv("TRIMARAN_API_KEY", "secret")
    monkeypatch.setenv("TRIMARAN_CLUSTER_KEY_FILE", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TRIMARAN_PORT", "7")
    child, readable = start(children.report_itself, "héllo", env={"OMP_NUM_THREADS": "3"})
    facts = msgspec.msgpack.decode(read_all(readable))
    assert child.wait(TIMEOUT_S)
    assert child.end().return_code == 0
    child.close()
    assert facts["text"] == "héllo"
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert facts["environment"]["TRIMARAN_PORT"] == "7"
    assert "secret" not in facts["environment"].values()
    assert facts["ignores_sigint"]
    assert facts["argv"][1] == "a-child"
    assert "héllo" not in " ".join(facts["argv"])


def test_importing_the_childs_main_is_cheap():
    """So that the death pipe is armed before anything heavy happens."""
    code = "import sys, trimaran.process.child; print(' '.join(sys.modules))"
    readable, writable = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", code],
        child_environment(),
        file_actions=[(os.POSIX_SPAWN_DUP2, writable, 1)],
    )
    os.close(writable)
    modules = read_all(readable).decode().split()
    assert os.waitpid(pid, 0)[1] == 0
    assert not {"torch", "numpy", "zmq", "asyncio", "logging"} & set(modules)


def test_an_exception_comes_back_with_its_hint_and_traceback():
    child, readable = start(children.raise_error, "it is broken")
    assert read_all(readable) == b""
    assert child.wait(TIMEOUT_S)
    end = child.end()
    child.close()
    assert end.return_code == 1
    assert end.text == "CheckpointError: it is broken"
    assert end.explained == "CheckpointError: it is broken (change it)"
    assert "in raise_error" in end.failure.traceback


@pytest.mark.parametrize("function", [children.wait_for_ever, children.spin_for_ever])
def test_sigterm_ends_a_child_in_time(function):
    child, readable = start(function)
    os.read(readable, 100)
    assert child.alive
    assert not child.wait(0.0)
    child.terminate()
    assert child.wait(TIMEOUT_S)
    assert child.end().text == "it was ended by SIGTERM"
    child.close()
    child.close()
    os.close(readable)


def test_end_children_kills_those_who_do_not_listen_and_reaps_all():
    child, readable = start(children.wait_deaf)
    os.read(readable, 100)
    began = time.monotonic()
    end_children([child], 0.2)
    assert 0.2 <= time.monotonic() - began < TIMEOUT_S
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    end_children([child], 0.2)
    os.close(readable)


def test_failures_without_message_hint_or_end():
    assert failure_of(ValueError()).text == "ValueError"
    long = failure_of(CheckpointError("x" * (1 << 20), hint="h"))
    assert len(long.message) < 1 << 15
    assert long.hint == "h"


def test_the_age_of_a_process_grows_with_the_clock():
    first, began = process_age_s(), time.monotonic()
    assert first > 0
    while time.monotonic() - began < 0.05:
        pass
    assert process_age_s() - first == pytest.approx(time.monotonic() - began, abs=0.02)
