"""Engines that fail to start, die, or lose their parent: who hears, how soon, in which words."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from tests.process import children
from tests.process.conftest import descendants, is_gone, wait_until

from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig, LaunchConfig
from trimaran.errors import ChildFailedError, DeadlineExceededError, EngineDeadError
from trimaran.messages import EngineCoreRequest, Ping
from trimaran.sampling_params import SamplingParams

TIMEOUT_S = 20.0


def config(**launch):
    return EngineConfig(
        executor=ExecutorConfig(distributed_executor_backend="mock", mock_step_s=0.001),
        launch=LaunchConfig(**launch),
    )


def request_for(request_id, max_tokens=30_000, prompt=(1, 2, 3)):
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return EngineCoreRequest(request_id, list(prompt), params)


def entry(function):
    return f"tests.process.children:{function.__name__}"


def engine_pid():
    (pid,) = (pid for pid, command in descendants().items() if "engine-0" in command)
    return pid


def drain(run):
    """Take outputs until there will be no more."""
    while True:
        run("get_output")


@pytest.fixture(params=[SyncMPClient, AsyncMPClient])
def start(request):
    """start(config, engine_entry=…) -> (client, run), where run(name, *args) calls a method."""
    runner = asyncio.Runner()
    clients = []

    def begin(*args, **kwargs):
        client = request.param(*args, **kwargs)
        clients.append(client)

        def run(name, *arguments):
            if isinstance(client, SyncMPClient):
                return getattr(client, name)(*arguments)
            coroutine = getattr(client, name + "_async")(*arguments)
            return runner.run(asyncio.wait_for(coroutine, TIMEOUT_S))

        return client, run

    yield begin
    for client in clients:
        client.shutdown()
    runner.close()


@pytest.mark.parametrize(
    ("function", "said", "hint"),
    [
        (
            children.load_fails,
            "CheckpointError: m.gguf: tensor 'x' is missing",
            "download it again",
        ),
        (children.import_fails, "ModuleNotFoundError: No module named 'a_module", None),
    ],
    ids=["at load", "at import"],
)
def test_a_failed_start_carries_the_childs_own_words(start, function, said, hint):
    _, run = start(config(), engine_entry=entry(function))
    with pytest.raises(ChildFailedError) as caught:
        run("wait_ready")
    assert said in str(caught.value)
    assert caught.value.child == "engine-0"
    assert caught.value.hint == hint
    assert function.__name__ in caught.value.traceback
    assert not descendants()


def test_a_child_killed_while_it_loads(start):
    _, run = start(config(), engine_entry=entry(children.load_hangs))
    os.kill(engine_pid(), signal.SIGKILL)
    with pytest.raises(ChildFailedError, match=r"SIGKILL.*out of memory"):
        run("wait_ready")


@pytest.mark.parametrize(
    ("function", "phase"),
    [(children.load_hangs, "loading half of it"), (children.never_answers, "spawned")],
    ids=["hangs in load", "says nothing"],
)
def test_the_deadline_names_rank_and_phase(start, function, phase):
    _, run = start(config(engine_ready_timeout_s=1.0), engine_entry=entry(function))
    with pytest.raises(DeadlineExceededError) as caught:
        run("wait_ready")
    assert f"not ready after 1 s: engine rank 0 (phase {phase}, 1 s)" in str(caught.value)
    assert "--engine-ready-timeout-s" in str(caught.value)
    assert not descendants()


def test_a_killed_engine_is_known_within_a_second(start):
    _, run = start(config())
    run("wait_ready")
    run("add_request", request_for("a"))
    run("get_output")
    began = time.monotonic()
    os.kill(engine_pid(), signal.SIGKILL)
    with pytest.raises(EngineDeadError) as caught:
        drain(run)
    assert time.monotonic() - began < 1.0
    assert caught.value.rank == 0
    assert "SIGKILL" in str(caught.value)
    for call in (
        lambda: run("add_request", request_for("b")),
        lambda: run("abort_requests", ["a"]),
        lambda: run("control", Ping()),
        lambda: run("get_output"),
    ):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            call()


def test_an_exception_in_a_step_reaches_the_caller(start):
    _, run = start(config(), engine_entry=entry(children.step_fails))
    run("wait_ready")
    run("add_request", request_for("a", prompt=(children.POISON,)))
    with pytest.raises(EngineDeadError, match="ValueError: a poisonous token"):
        drain(run)


def test_a_call_pending_in_a_stopped_engine_has_a_deadline_and_fails_at_its_death(start):
    _, run = start(config())
    run("wait_ready")
    pid = engine_pid()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceededError, match=r"Ping: no answer in 0\.2 s"):
        run("control", Ping(), 0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        run("control", Ping(), TIMEOUT_S)


def test_an_engine_that_ignores_sigterm_is_killed_at_close(start):
    client, _ = start(config(shutdown_grace_s=0.3), engine_entry=entry(children.ignores_sigterm))
    began = time.monotonic()
    client.shutdown()
    assert time.monotonic() - began < 3.0
    assert not descendants()


def test_an_idle_engine_and_client_use_next_to_no_cpu(start):
    _, run = start(config())
    run("wait_ready")
    pid = engine_pid()

    def cpu_s(process):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s(pid), cpu_s(os.getpid())
    time.sleep(2.0)  # what is measured: two seconds in which nothing is asked
    assert cpu_s(pid) - before[0] < 0.045  # the clock ticks in hundredths
    assert cpu_s(os.getpid()) - before[1] < 0.045  # the clock ticks in hundredths


def test_a_dropped_client_takes_its_engine_along():
    client = SyncMPClient(config())
    client.wait_ready()
    pid, alive = engine_pid(), weakref.ref(client)
    del client
    gc.collect()
    assert alive() is None
    wait_until(lambda: is_gone(pid), what="the end of the engine")


def test_a_client_dropped_while_its_engine_starts():
    client = SyncMPClient(config(shutdown_grace_s=0.2), engine_entry=entry(children.load_hangs))
    pid = engine_pid()
    del client
    gc.collect()
    wait_until(lambda: is_gone(pid), what="the end of the engine")


# --------------------------------------------------------------- programs that use trimaran

_PROGRAM = """
import os, signal, sys
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig
config = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))
client = SyncMPClient(config, engine_entry=sys.argv[1])
{wait}
print("started", flush=True)
{end}
"""
_RUNS = "trimaran.engine.engine_core_proc:run_engine_core"


def program(tmp_path, entry_point, *, wait, end):
    """A script without a main guard, and the pid of the engine that it started."""
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM.format(wait="client.wait_ready()" if wait else "", end=end))
    process = subprocess.Popen(
        [sys.executable, str(script), entry_point],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", os.getcwd()])},
    )
    assert process.stdout.readline() == b"started\n"
    (engine,) = (pid for pid, command in descendants(process.pid).items() if "engine-0" in command)
    return process, engine


def _remove_what_the_killed_left():
    """The next one that looks removes it, once it is old."""
    for folder in Path(os.environ["TMPDIR"]).iterdir():
        os.utime(folder, (0, 0))
    SyncMPClient(config(shutdown_grace_s=0.2)).shutdown()


@pytest.mark.parametrize(
    ("entry_point", "wait"),
    [(_RUNS, True), (entry(children.load_hangs), False), (entry(children.load_is_busy), False)],
    ids=["serving", "loading", "busy in Python"],
)
def test_a_killed_parent_takes_its_engine_along(tmp_path, entry_point, wait):
    process, engine = program(tmp_path, entry_point, wait=wait, end="signal.pause()")
    began = time.monotonic()
    process.kill()
    process.communicate()
    wait_until(lambda: is_gone(engine), 2.0, "the end of the engine")
    assert time.monotonic() - began < 2.0
    _remove_what_the_killed_left()


def test_a_fork_of_the_parent_keeps_no_engine_alive_and_ends_none(tmp_path):
    end = """
if os.fork() == 0:
    sys.exit()  # runs what a program runs at its end
os.wait()
sleeper = os.fork()
if sleeper:
    print(sleeper, flush=True)
signal.pause()
"""
    process, engine = program(tmp_path, _RUNS, wait=True, end=end)
    sleeper = int(process.stdout.readline())
    assert not is_gone(engine)
    assert os.listdir(os.environ["TMPDIR"])  # nor does it remove the folder of sockets
    process.kill()
    wait_until(lambda: is_gone(engine), 2.0, "the end of the engine")
    os.kill(sleeper, signal.SIGKILL)
    process.communicate()
    _remove_what_the_killed_left()


def test_the_end_of_the_program_is_the_end_of_its_engine(tmp_path):
    process, engine = program(tmp_path, _RUNS, wait=True, end="sys.stdin.readline()")
    process.communicate(b"end\n", timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert is_gone(engine)


def test_ctrl_c_is_the_parents_alone(tmp_path):
    end = """
from trimaran.messages import Ping
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a script started us with "&"
try:
    print("waiting", flush=True)
    signal.pause()
except KeyboardInterrupt:
    print(client.control(Ping())[0].step)
"""
    process, engine = program(tmp_path, _RUNS, wait=True, end=end)
    assert os.getpgid(engine) != os.getpgid(process.pid)  # the terminal's Ctrl-C goes to a group
    assert process.stdout.readline() == b"waiting\n"
    os.kill(engine, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, b"0\n")
    assert is_gone(engine)
