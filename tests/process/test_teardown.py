"""The end of clients, programs and engines: in any way, at any time, and nothing is left."""

import asyncio
import contextlib
import ctypes
import gc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from tests.process import children
from tests.process.conftest import (
    TIMEOUT_S,
    descendants,
    engine_pid,
    entry,
    is_gone,
    mock_config,
    request_for,
    wait_until,
)

from trimaran import LLM, SamplingParams
from trimaran.bench.tiny_model import write_tiny_model
from trimaran.client.background_resources import BackgroundResources
from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.engine.spec import EngineSpec
from trimaran.errors import DeadlineExceededError, EngineDeadError, UnavailableError
from trimaran.ipc.folder import PrivateFolder
from trimaran.ipc.listeners import Listener
from trimaran.messages import Ping
from trimaran.process.spawn import spawn

both_clients = pytest.mark.parametrize("client_type", [SyncMPClient, AsyncMPClient])
_SYS_TGKILL = {"x86_64": 234, "aarch64": 131}[platform.machine()]
CALLS = [("get_output",), ("get_output",), ("control", Ping())]


def ready(drive, client_type, **options):
    driver = drive(client_type, mock_config(**options))
    driver.run("wait_ready")
    return driver


# ------------------------------------------------------------------------------------------- close


@both_clients
@pytest.mark.parametrize("step_s", [0.0, 30.0], ids=["outputs flow", "calls are pending"])
def test_closed_by_another_thread(drive, client_type, step_s):
    driver = ready(drive, client_type, step_s=step_s, shutdown_grace_s=0.2)
    driver.run("add_request", request_for("a"))
    closer = threading.Thread(target=driver.client.shutdown)
    errors = driver.errors_of(CALLS, closer.start)
    # A call that was under way may see the engine go instead.
    assert all(isinstance(error, UnavailableError | EngineDeadError) for error in errors)
    closer.join(TIMEOUT_S)
    assert not descendants()
    with pytest.raises(UnavailableError, match="closed"):
        driver.run("get_output")


@both_clients
def test_of_two_that_close_neither_returns_before_all_is_closed(drive, client_type):
    driver = drive(
        client_type,
        mock_config(shutdown_grace_s=0.3),
        engine_entry=entry(children.ignores_sigterm),
    )
    left = []

    def close():
        driver.client.shutdown()
        left.append(descendants())

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert left == [{}, {}, {}]


@pytest.mark.parametrize("how", ["shutdown", "shutdown_async"])
def test_closed_inside_a_task_of_its_loop(how):
    async def main():
        client = AsyncMPClient(mock_config())
        await client.wait_ready_async()
        await client.add_request_async(request_for("a"))
        waiting = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0)
        closing = getattr(client, how)()
        if closing is not None:
            await asyncio.gather(closing, client.shutdown_async())
        with contextlib.suppress(UnavailableError):
            await waiting

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert not descendants()


def test_a_close_that_is_cancelled_goes_on():
    async def main():
        client = AsyncMPClient(
            mock_config(shutdown_grace_s=0.2), engine_entry=entry(children.ignores_sigterm)
        )
        closing = asyncio.create_task(client.shutdown_async())
        await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing

    asyncio.run(main())
    assert not descendants()


def test_llm_closed_by_another_thread(tmp_path):
    llm = LLM(
        str(write_tiny_model(tmp_path / "m")),
        distributed_executor_backend="mock",
        mock_step_s=0.01,
    )
    threading.Timer(0.05, llm.shutdown).start()
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4000, ignore_eos=True))
    llm.shutdown()
    assert not descendants()


def test_a_ctrl_c_or_a_failure_in_a_teardown_stops_none_of_the_rest():
    closed = []

    def interrupted():
        closed.append("second")
        raise KeyboardInterrupt

    def fails():
        closed.append("third")
        raise OSError("no")

    resources = BackgroundResources()
    resources.push("first", lambda: closed.append("first"))
    resources.push("second", interrupted)
    resources.push("third", fails)
    resources.push("itself", resources)  # a signal handler that closes what is being closed
    with pytest.raises(KeyboardInterrupt):
        resources()
    resources()
    assert closed == ["third", "second", "first"]


def test_ctrl_c_in_a_close_cuts_the_grace_short():
    client = SyncMPClient(
        mock_config(shutdown_grace_s=60.0), engine_entry=entry(children.ignores_sigterm)
    )
    wait_until(lambda: _ignores_sigterm(engine_pid()), what="the engine's deaf ears")
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        client.shutdown()
    signal.signal(signal.SIGINT, old)
    assert not descendants()


def _ignores_sigterm(pid):
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


# ------------------------------------------------------------------------------ garbage collection


@both_clients
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_dropped_client_takes_its_engine_along(client_type, in_flight):
    async def run(client):
        await client.wait_ready_async()
        if in_flight:
            await client.add_request_async(request_for("a"))
            await client.get_output_async()

    before = threading.active_count()
    client = client_type(mock_config())
    if client_type is AsyncMPClient:
        asyncio.run(run(client))
    else:
        client.wait_ready()
        if in_flight:
            client.add_request(request_for("a"))
            client.get_output()
    pid, alive = engine_pid(), weakref.ref(client)
    del client
    # Its reading thread may hold it for the moment that a message takes.
    wait_until(lambda: gc.collect() is not None and alive() is None, what="the client's end")
    wait_until(lambda: is_gone(pid), what="the end of the engine")
    wait_until(lambda: threading.active_count() == before, what="the end of the threads")


def test_an_async_client_dropped_in_another_thread_while_its_loop_runs():
    held = []

    async def main():
        held.append(AsyncMPClient(mock_config()))
        await held[0].wait_ready_async()
        await held[0].add_request_async(request_for("a"))
        await asyncio.to_thread(held.clear)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    wait_until(lambda: not descendants(), what="the end of the engine")


@both_clients
def test_twenty_lives_leave_no_descriptor_and_no_thread(client_type):
    def live():
        client = client_type(mock_config(shutdown_grace_s=0.0))
        client.shutdown()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    first = live()
    assert {live() for _ in range(20)} == {first}


# ------------------------------------------------------------------------------- programs that end

_PROGRAM = """
import asyncio, os, signal, sys, threading, time
from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.messages import EngineCoreRequest, Ping
from trimaran.sampling_params import SamplingParams
config = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))
def request():
    return EngineCoreRequest("a", [1, 2], SamplingParams(max_tokens=30_000, seed=0))
"""
_SYNC = """
client = SyncMPClient(config)
client.wait_ready()
client.add_request(request())
client.get_output()
"""
_ASYNC = """
async def main():
    global client
    client = AsyncMPClient(config)
    await client.wait_ready_async()
    await client.add_request_async(request())
    await client.get_output_async()
    print("started", flush=True)
"""
_ENDS = {
    "sync": (_SYNC, 0),
    "sys.exit": (_SYNC + "sys.exit(7)", 7),
    "an unhandled exception": (_SYNC + "raise ValueError", 1),
    "os._exit": (_SYNC + "os._exit(5)", 5),
    "a thread that is not a daemon": (
        _SYNC
        + """
def outlive_main():
    threading.main_thread().join()
    client.control(Ping())
threading.Thread(target=outlive_main).start()
""",
        0,
    ),
    "a daemon that waits": (
        _SYNC + "client.abort_requests(['a'])\n"
        "threading.Thread(target=lambda: [client.get_output() for _ in iter(int, 1)], daemon=True)"
        ".start()",
        0,
    ),
    "async": (_ASYNC + "asyncio.run(main())", 0),
    "a task that waits": (
        _ASYNC
        + """
async def leave():
    await main()
    waiting = asyncio.create_task(client.control_async(Ping()))
    await asyncio.sleep(0)
asyncio.run(leave())
""",
        0,
    ),
}


@pytest.mark.parametrize("how", _ENDS)
def test_a_program_that_ends_without_a_close(how):
    program, code = _ENDS[how]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM + program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, said.decode()
    lines = [line for line in said.decode().splitlines() if "engine rank 0" not in line]
    if how == "an unhandled exception":
        assert lines[-1] == "ValueError"
    else:
        assert lines == []
    if how == "os._exit":  # no Python ran: the kernel ended the engine
        _remove_what_the_killed_left()


def _remove_what_the_killed_left():
    """The next one that looks removes it, once it is old."""
    for folder in Path(os.environ["TMPDIR"]).iterdir():
        os.utime(folder, (0, 0))
    SyncMPClient(mock_config(shutdown_grace_s=0.2)).shutdown()


# ----------------------------------------------------- parents that are killed, forked, interrupted

_PARENT = """
import os, signal, sys
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig
config = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))
client = SyncMPClient(config, engine_entry=sys.argv[1])
{wait}
print("started", flush=True)
{end}
"""
RUNS = "trimaran.engine.engine_core_proc:run_engine_core"


def program(tmp_path, entry_point, *, wait, end):
    """A script without a main guard, and the pid of the engine that it started."""
    script = tmp_path / "program.py"
    script.write_text(_PARENT.format(wait="client.wait_ready()" if wait else "", end=end))
    process = subprocess.Popen(
        [sys.executable, str(script), entry_point],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", os.getcwd()])},
    )
    assert process.stdout.readline() == b"started\n"
    (engine,) = (pid for pid, command in descendants(process.pid).items() if "engine-0" in command)
    return process, engine


@pytest.mark.parametrize(
    ("entry_point", "wait"),
    [(RUNS, True), (entry(children.load_hangs), False), (entry(children.load_is_busy), False)],
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
    process, engine = program(tmp_path, RUNS, wait=True, end=end)
    sleeper = int(process.stdout.readline())
    assert not is_gone(engine)
    assert os.listdir(os.environ["TMPDIR"])  # nor does it remove the folder of sockets
    process.kill()
    wait_until(lambda: is_gone(engine), 2.0, "the end of the engine")
    os.kill(sleeper, signal.SIGKILL)
    process.communicate()
    _remove_what_the_killed_left()


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
    process, engine = program(tmp_path, RUNS, wait=True, end=end)
    assert os.getpgid(engine) != os.getpgid(process.pid)  # the terminal's Ctrl-C goes to a group
    assert process.stdout.readline() == b"waiting\n"
    os.kill(engine, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, b"0\n")
    assert is_gone(engine)


# ------------------------------------------------------------------------------- the engine's side


@pytest.fixture
def engine():
    """engine(entry, config) -> a child whose launcher listens, and never says a word."""
    folder = PrivateFolder()
    listener = Listener.bind_ipc(folder.socket_path("handshake"))
    started = []

    def start(entry_point, config):
        spec = EngineSpec(
            config=config,
            rank=0,
            incarnation=1,
            handshake_address=listener.address,
            spawned_at=time.time(),
        )
        started.append(spawn(entry_point, spec, name="engine-0"))
        return started[-1]

    yield start
    for child in started:
        child.close()
    listener.close()
    folder.close()


def test_an_engine_whose_launcher_is_silent_gives_up(engine):
    child = engine(RUNS, mock_config(engine_ready_timeout_s=0.3))
    assert child.wait(TIMEOUT_S)
    assert "engine rank 0 got no answer from its launcher" in child.end().text


@pytest.mark.parametrize("function", [children.load_hangs, children.load_is_busy])
def test_sigterm_ends_an_engine_that_loads_at_once(drive, function):
    driver = drive(SyncMPClient, mock_config(shutdown_grace_s=600.0), engine_entry=entry(function))
    with pytest.raises(DeadlineExceededError, match="not ready after 1 s: engine rank 0"):
        driver.run("wait_ready", 1.0)
    assert not descendants()


def test_a_running_engine_ends_in_order_by_sigterm(drive):
    driver = ready(drive, SyncMPClient)
    driver.run("add_request", request_for("a"))
    driver.run("get_output")
    pid = engine_pid()
    (error,) = driver.errors_of([("get_output",)], lambda: os.kill(pid, signal.SIGTERM))
    assert "it exited with code 0" in str(error)


def test_a_second_sigterm_ends_an_engine_within_its_step(drive):
    driver = ready(drive, SyncMPClient, step_s=60.0)
    driver.run("add_request", request_for("a"))
    pid = engine_pid()

    def send_two():
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not _in_mask(pid, "SigCgt"), what="the first one's effect")
        os.kill(pid, signal.SIGTERM)

    (error,) = driver.errors_of([("get_output",)], send_two)
    assert "it was ended by SIGTERM" in str(error)


def test_a_sigterm_that_wakes_nobody_ends_an_idle_engine_all_the_same(drive):
    """The kernel may give it to any thread, or just before the main one begins to wait."""
    driver = ready(drive, SyncMPClient)
    pid = engine_pid()
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task") if name != str(pid)]
    taker = next(tid for tid in threads if not _in_mask(tid, "SigBlk"))  # ZMQ's own take none

    def send():
        assert ctypes.CDLL(None).syscall(_SYS_TGKILL, pid, taker, signal.SIGTERM) == 0

    (error,) = driver.errors_of([("get_output",)], send)
    assert "it exited with code 0" in str(error)


def _in_mask(pid, mask_name):
    """Whether SIGTERM is in this mask of a process or thread."""
    mask = Path(f"/proc/{pid}/status").read_text().partition(f"{mask_name}:")[2].split()[0]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)
