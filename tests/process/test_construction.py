"""A start that fails, at every step: one exception with the first cause, and nothing left of it."""

import asyncio
import errno
import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
from tests.process import children
from tests.process.conftest import (
    TIMEOUT_S,
    descendants,
    engine_pid,
    entry,
    is_gone,
    mock_config,
    wait_until,
)

from trimaran import LLM
from trimaran.bench.tiny_model import write_tiny_model
from trimaran.client.async_llm import AsyncLLM
from trimaran.client.core_client import EngineCoreClient
from trimaran.client.mp_async import AsyncMPClient
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig, ModelConfig
from trimaran.errors import (
    CheckpointError,
    ChildFailedError,
    ConfigError,
    DeadlineExceededError,
    StartupError,
    UnavailableError,
)
from trimaran.process import spawn

both_clients = pytest.mark.parametrize("client_type", [SyncMPClient, AsyncMPClient])
# Long enough to be no part of what is measured, short enough to fail in time.
GRACE_S = 0.2


# ------------------------------------------------------------------------------- the child's fault


_FAULTS = [
    ("load:raise", "ValueError: as it was told"),
    ("load:SIGKILL", r"ended by SIGKILL .*out of memory"),
    ("input links:raise", "ValueError: as it was told"),
    ("output links:raise", "ValueError: as it was told"),
    # Beyond these, nothing that depends on the kind of client:
    ("import:raise", "ValueError: as it was told"),
    ("load:need memory", r"OutOfMemoryError: no memory left while loading.*smaller model"),
    ("load:exit 0", "exited with code 0"),
    ("KV cache:need memory", r"making the KV cache .*--kv-cache-memory-bytes"),
    ("KV cache:take all memory", "OutOfMemoryError"),
    ("warm-up:raise", "ValueError: as it was told"),
    ("warm-up:SIGSEGV", "ended by SIGSEGV"),
]


@pytest.mark.parametrize(
    ("client_type", "fault", "said"),
    [(SyncMPClient, *case) for case in _FAULTS] + [(AsyncMPClient, *case) for case in _FAULTS[:4]],
)
def test_the_child_fails(drive, monkeypatch, client_type, fault, said):
    monkeypatch.setenv(children.FAULT, fault)
    driver = drive(client_type, mock_config(), engine_entry=entry(children.faulty))
    with pytest.raises(ChildFailedError, match=said) as caught:
        driver.run("wait_ready")
    assert caught.value.child == "engine-0"
    assert not descendants()
    with pytest.raises(UnavailableError, match="closed"):
        driver.run("get_output")


def test_the_childs_error_arrives_as_it_was_raised(drive):
    driver = drive(SyncMPClient, mock_config(), engine_entry=entry(children.load_fails))
    with pytest.raises(ChildFailedError, match=r"CheckpointError: m.gguf: tensor 'x'") as caught:
        driver.run("wait_ready")
    assert caught.value.hint == "download it again"
    assert "load_fails" in caught.value.traceback


@both_clients
@pytest.mark.parametrize(
    ("function", "phase"),
    [(children.load_hangs, "loading half of it"), (children.never_answers, "spawned")],
)
def test_the_deadline_names_rank_phase_and_flag(drive, client_type, function, phase):
    config = mock_config(engine_ready_timeout_s=0.7, shutdown_grace_s=GRACE_S)
    driver = drive(client_type, config, engine_entry=entry(function))
    with pytest.raises(DeadlineExceededError) as caught:
        driver.run("wait_ready")
    assert f"not ready after 0.7 s: engine rank 0 (phase {phase}, 1 s)" in str(caught.value)
    assert "--engine-ready-timeout-s" in str(caught.value)
    assert not descendants()


# ---------------------------------------------------------------------------------- the handshake


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            children.of_another_version,
            r"refused this engine: it speaks protocol 9999.*same ver",
        ),
        (children.of_another_rank, r"refused this engine: rank 7 is not expected \(expected: 0\)"),
        (children.of_another_life, "refused this engine: another engine runs as rank 0"),
        (children.of_another_block_size, "--block-size is 16 here and 32 there"),
    ],
)
def test_an_engine_that_does_not_fit_says_why_with_both_values(drive, function, said):
    driver = drive(SyncMPClient, mock_config(), engine_entry=entry(function))
    with pytest.raises(ChildFailedError, match=said):
        driver.run("wait_ready")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (children.talks_nonsense, r"engine rank 0 \(phase spawned, 1 s\)"),
        (children.refused_and_lives_on, "refused: --block-size is 16 here and 32 there"),
    ],
)
def test_who_is_refused_and_lives_on_costs_no_more_than_the_deadline(drive, function, said):
    config = mock_config(engine_ready_timeout_s=0.8, shutdown_grace_s=GRACE_S)
    driver = drive(SyncMPClient, config, engine_entry=entry(function))
    with pytest.raises(DeadlineExceededError, match=said):
        driver.run("wait_ready")


# ------------------------------------------------------------------------ the system gives nothing


def test_without_an_interpreter_to_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(StartupError, match=r"cannot be started: No such file.*/nowhere/python"):
        SyncMPClient(mock_config())


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.EAGAIN, "ulimit -u"), (errno.ENOMEM, "memory")]
)
@pytest.mark.parametrize("call", ["Popen", "pidfd_open"])
def test_without_room_for_a_process(monkeypatch, number, hint, call):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    where = spawn.subprocess if call == "Popen" else os
    monkeypatch.setattr(where, call, refuse)
    with pytest.raises(StartupError, match=hint):
        SyncMPClient(mock_config())


@pytest.mark.parametrize("nth", [1, 2], ids=["output thread", "engine monitor"])
def test_without_room_for_a_thread(monkeypatch, nth):
    start, count = threading.Thread.start, iter(range(1, 100))

    def refuse(thread):
        if next(count) == nth:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        SyncMPClient(mock_config(shutdown_grace_s=GRACE_S))


def test_without_a_folder_that_can_be_written(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/1")
    with pytest.raises(StartupError, match="cannot be started"):
        SyncMPClient(mock_config())


_FEW_DESCRIPTORS = """
import os, resource
from trimaran.client.mp_sync import SyncMPClient
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.errors import StartupError
config = EngineConfig(executor=ExecutorConfig(distributed_executor_backend="mock"))
used = len(os.listdir("/proc/self/fd")) - 1
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for more in range(1, 40):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
    try:
        SyncMPClient(config)
    except StartupError as error:
        assert "ulimit -n" in str(error), error
    else:
        raise AssertionError(more)
    assert len(os.listdir("/proc/self/fd")) - 1 == used, more
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
client = SyncMPClient(config)
client.wait_ready(20)
client.shutdown()
"""


def test_without_descriptors():
    """In a process of its own: libzmq would abort it."""
    subprocess.run([sys.executable, "-c", _FEW_DESCRIPTORS], check=True, timeout=TIMEOUT_S)


# ------------------------------------------------------------------------------ the caller gives up


@pytest.fixture
def ctrl_c_raises():
    """As in a program that a terminal started (a script's "&" ignores it)."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@both_clients
@pytest.mark.parametrize("moment", range(5, 330, 36))
def test_ctrl_c_at_any_call_of_the_construction(ctrl_c_raises, client_type, moment):
    countdown = iter(range(moment, -1, -1))

    def on_event(frame, event, _):
        if event == "call" and "trimaran" in frame.f_code.co_filename and next(countdown, -1) == 0:
            signal.raise_signal(signal.SIGINT)

    def construct():
        sys.setprofile(on_event)
        try:
            client_type(mock_config(shutdown_grace_s=GRACE_S))
        finally:
            sys.setprofile(None)

    with pytest.raises(KeyboardInterrupt):
        construct()
    gc.collect()
    wait_until(lambda: not descendants(), what="the end of the engine")


@both_clients
@pytest.mark.parametrize("function", [children.never_answers, children.load_is_busy])
def test_ctrl_c_while_waiting(drive, ctrl_c_raises, client_type, function):
    config = mock_config(shutdown_grace_s=GRACE_S)
    driver = drive(client_type, config, engine_entry=entry(function))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        driver.run("wait_ready")
    assert not descendants()


@both_clients
def test_a_close_by_another_thread_ends_the_waiting(drive, client_type):
    config = mock_config(shutdown_grace_s=GRACE_S)
    driver = drive(client_type, config, engine_entry=entry(children.load_hangs))
    threading.Timer(0.05, driver.client.shutdown).start()
    with pytest.raises(UnavailableError):
        driver.run("wait_ready")
    assert not descendants()


@both_clients
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_dropped_half_built(client_type, in_a_cycle):
    config = mock_config(shutdown_grace_s=GRACE_S)
    client = client_type(config, engine_entry=entry(children.load_hangs))
    pid = engine_pid()
    if in_a_cycle:
        error = ValueError()
        error.client, error.cause = client, error
        del error
    del client
    gc.collect()
    wait_until(lambda: is_gone(pid), what="the end of the engine")


# -------------------------------------------------------------------------------- LLM and AsyncLLM


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.3])
def test_create_cancelled(monkeypatch, tiny_model, delay_s):
    hanging = functools.partial(AsyncMPClient, engine_entry=entry(children.load_hangs))
    monkeypatch.setattr(
        EngineCoreClient, "make_client", staticmethod(lambda _, __, config: hanging(config))
    )
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_model)),
        executor=ExecutorConfig(distributed_executor_backend="mock"),
        launch=mock_config(shutdown_grace_s=GRACE_S).launch,
    )

    async def cancel():
        creating = asyncio.create_task(AsyncLLM.create(config))
        await asyncio.sleep(delay_s)  # somewhere in it; it is cancelled wherever that is
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating

    asyncio.run(cancel())
    assert not descendants()


def _missing(folder):
    return folder.parent / "nowhere"


def _without_weights(folder):
    (folder / "model.safetensors").unlink()
    return folder


def _damaged_config(folder):
    (folder / "config.json").write_text('{"hidden_size": ')
    return folder


def _unknown_family(folder):
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("LlamaForCausalLM", "NoSuchModel"))
    return folder


def _create_and_close(model, **settings):
    async def create():
        config = EngineConfig(model=ModelConfig(model=model), **settings)
        await (await AsyncLLM.create(config)).shutdown()

    asyncio.run(create())


@pytest.mark.parametrize(
    ("start", "damage", "said"),
    [
        (LLM, _missing, "nowhere"),
        (LLM, _damaged_config, "config.json"),
        (_create_and_close, _damaged_config, "config.json"),
        (_create_and_close, _unknown_family, "NoSuchModel"),
        (LLM, _without_weights, "safetensors"),  # found by the engine
    ],
)
def test_a_model_that_cannot_be_read(tmp_path, start, damage, said):
    with pytest.raises(StartupError, match=said) as caught:
        start(str(damage(write_tiny_model(tmp_path / "model"))))
    assert isinstance(caught.value, CheckpointError | ConfigError | ChildFailedError)
