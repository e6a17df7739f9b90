"""Whatever a test starts is gone when it ends: processes, descriptors, threads, socket folders."""

import asyncio
import gc
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig, LaunchConfig
from trimaran.ipc.codec import INLINE_BYTES
from trimaran.ipc.sockets import Context
from trimaran.launch.links import BoundLinks
from trimaran.messages import EngineCoreRequest
from trimaran.sampling_params import SamplingParams

DEADLINE_S = 10.0
TIMEOUT_S = 20.0


def mock_config(step_s=0.001, **launch):
    return EngineConfig(
        executor=ExecutorConfig(distributed_executor_backend="mock", mock_step_s=step_s),
        launch=LaunchConfig(**launch),
    )


def request_for(request_id, max_tokens=30_000, prompt=(1, 2, 3)):
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return EngineCoreRequest(request_id, list(prompt), params)


def entry(function):
    return f"{function.__module__}:{function.__name__}"


def engine_pid():
    (pid,) = (pid for pid, command in descendants().items() if "engine-0" in command)
    return pid


class Driver:
    """One client of either kind, driven by plain calls."""

    def __init__(self, client, runner):
        self.client = client
        self._runner = runner

    def run(self, name, *arguments):
        """Call a method to its end."""
        if isinstance(self.client, SyncMPClient):
            return getattr(self.client, name)(*arguments)
        return self._runner.run(asyncio.wait_for(self._call(name, *arguments), TIMEOUT_S))

    def errors_of(self, calls, trigger=lambda: None):
        """What each of these calls, all of them waiting at once and repeated, ends with."""
        if isinstance(self.client, AsyncMPClient):
            return self._runner.run(self._gather_errors(calls, trigger))
        errors = []
        threads = [
            threading.Thread(target=lambda call=call: errors.append(self._repeat(call)))
            for call in calls
        ]
        for thread in threads:
            thread.start()
        trigger()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads), "a call hangs"
        return errors

    def _call(self, name, *arguments):
        return getattr(self.client, name + "_async")(*arguments)

    def _repeat(self, call):
        while True:
            try:
                getattr(self.client, call[0])(*call[1:])
            except Exception as error:
                return error

    async def _gather_errors(self, calls, trigger):
        async def repeat(call):
            while True:
                try:
                    await self._call(*call)
                except Exception as error:
                    return error
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(repeat(call)) for call in calls]
        await asyncio.sleep(0)
        trigger()
        # Twice the time: the timer's own end would wake a loop that nobody else wakes.
        began = time.monotonic()
        errors = await asyncio.wait_for(asyncio.gather(*tasks), 2 * TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S, "a call hung"
        return errors


@pytest.fixture
def drive():
    """drive(client_type, config, **options) -> Driver; its client is closed in the end."""
    runner, drivers = asyncio.Runner(), []

    def make(client_type, *arguments, **options):
        drivers.append(Driver(client_type(*arguments, **options), runner))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.client.shutdown()
    runner.close()


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


@pytest.fixture(scope="session", autouse=True)
def only_new_objects_are_collected():
    """Each test here collects garbage twice; what other suites left on the heap need not be gone
    through for it each time (a second a test behind the suites that load models)."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
    bound = [BoundLinks.bind(index, (0,)) for index in range(2)]
    yield [each.spec for each in bound]
    for each in bound:
        each.close()
