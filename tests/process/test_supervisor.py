"""The root process of serve: what it binds, says, relays and ends, and how it exits."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from tests.process import children
from tests.process.conftest import descendants, entry, is_gone, wait_until

from trimaran.bench.tiny_model import write_tiny_model
from trimaran.config import (
    Config,
    ExecutorConfig,
    LaunchConfig,
    ModelConfig,
    ServerConfig,
)
from trimaran.server.main import run_api_server

TIMEOUT_S = 20.0
ENGINE = "trimaran.engine.engine_core_proc:run_engine_core"


class Served:
    """A running ``serve`` and the lines that it has logged so far."""

    def __init__(self, config, api_entry, engine_entry):
        self.lines = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.process.serve_program",
                msgspec.json.encode(config).decode(),
                api_entry,
                engine_entry,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", os.getcwd()])},
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def line(self, pattern):
        """The first line that matches, waited for."""

        def found():
            return next((m for line in list(self.lines) if (m := re.search(pattern, line))), None)

        wait_until(lambda: found() or self.process.poll() is not None, what=pattern)
        match = found()
        assert match, f"no {pattern!r} in {self.lines}"
        return match

    @property
    def url(self):
        return self.line(r"listening on (http://\S+)")[1]

    def state(self):
        with urllib.request.urlopen(self.url, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def pids(self):
        """name -> pid of the children."""
        found = {}
        for pid, command in descendants(self.process.pid).items():
            if match := re.search(r"trimaran\.process\.child (\S+)", command):
                found[match[1]] = pid
        return found

    def end(self):
        """(exit code, whether the supervisor had torch loaded); waits for the end."""
        output, _ = self.process.stdout.read(), self.process.wait(TIMEOUT_S)
        self.process.stdout.close()
        self._thread.join(TIMEOUT_S)
        self.process.stderr.close()
        return self.process.returncode, output.strip()


@pytest.fixture
def serve():
    started = []

    def start(
        api=children.stub_api, engine=ENGINE, model="tiny", port=0, executor="mock", **launch
    ):
        config = Config(
            model=ModelConfig(model=model),
            executor=ExecutorConfig(distributed_executor_backend=executor),
            server=ServerConfig(port=port),
            launch=LaunchConfig(**launch),
        )
        served = Served(config, entry(api), engine)
        started.append(served)
        return served

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.end()


def test_serving_from_first_second_to_ctrl_c(serve):
    served = serve()
    served.line(r"ready at http://127\.0\.0\.1:\d+ after \d+\.\d\d s")
    served.line(r"^  supervisor +starting +\d+\.\d\d s +\d+ % ")
    served.line(r"^  engine-0 +process +\d+\.\d\d s +\d+ % ")
    answer = served.state()
    assert answer["engines"] == 1
    ready, phase, percent, failure, model_path = answer["state"]
    assert (ready, phase, percent, failure) == (True, "ready", 100.0, None)
    assert model_path == "/models/tiny"
    pids = served.pids()
    assert set(pids) == {"api-0", "engine-0"}
    served.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert served.end() == (0, "False")
    assert time.monotonic() - began < 5.0
    assert all(is_gone(pid) for pid in pids.values())
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))


def test_state_is_told_while_the_engine_loads(serve):
    served = serve(engine=entry(children.load_hangs))
    wait_until(lambda: served.state()["state"][1] == "loading", what="phase loading")
    ready, phase, percent, *_ = served.state()["state"]
    assert (ready, phase) == (False, "loading")
    assert 0 < percent < 100
    served.process.send_signal(signal.SIGTERM)
    assert served.end()[0] == 0


def test_state_is_told_while_the_model_downloads_and_a_signal_ends_it(serve):
    served = serve(model="slow")
    wait_until(lambda: served.state()["state"][2] > 0, what="progress")
    assert served.state()["state"][:3] == [False, "downloading", 12.5]
    assert set(served.pids()) == {"api-0"}
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 0


@pytest.mark.parametrize(
    ("options", "last_line"),
    [
        (
            {"engine": "tests.process.children:load_fails"},
            "engine-0 failed: CheckpointError: m.gguf: tensor 'x' is missing (download it again)",
        ),
        (
            {"api": children.stub_api_that_dies},
            "api-0 failed: CheckpointError: tokenizer.json: no tokenizer (get one)",
        ),
        ({"model": "missing"}, "missing: no such file or folder (give a folder)"),
        (
            {"engine": "tests.process.children:never_answers", "engine_ready_timeout_s": 0.5},
            "not ready after 0.5 s: engine rank 0 (phase spawned, 1 s)"
            " (give it more time with --engine-ready-timeout-s)",
        ),
    ],
    ids=["engine", "API server", "model", "deadline"],
)
def test_a_failed_start_ends_all_and_prints_the_first_cause_last(serve, options, last_line):
    served = serve(**options)
    assert served.end() == (1, "False")
    assert served.lines[-1].endswith("E supervisor: " + last_line)


def test_an_unforeseen_error_is_printed_with_its_traceback_before_the_cause(serve):
    served = serve(engine=entry(children.import_fails))
    assert served.end()[0] == 1
    assert "E supervisor: engine-0 failed: ModuleNotFoundError: No module" in served.lines[-1]
    assert any("import a_module_that_is_not_there" in line for line in served.lines)


@pytest.mark.parametrize("victim", ["engine-0", "api-0"])
def test_a_killed_child_ends_the_deployment(serve, victim):
    served = serve()
    served.line("ready at")
    pids = served.pids()
    began = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    assert served.end()[0] == 1
    assert time.monotonic() - began < 5.0
    assert f"{victim} failed: it was ended by SIGKILL" in served.lines[-1]
    assert all(is_gone(pid) for pid in pids.values())


def test_a_killed_supervisor_takes_its_children_along(serve):
    served = serve()
    served.line("ready at")
    pids = served.pids()
    served.process.kill()
    wait_until(lambda: all(map(is_gone, pids.values())), 2.0, "the end of the children")
    served.end()
    _remove_folder()


def _remove_folder():
    """A killed process cannot remove it; its successors do (tests/unit/ipc/test_folder.py)."""
    for folder in Path(os.environ["TMPDIR"]).iterdir():
        shutil.rmtree(folder)


@pytest.mark.parametrize("moment", ["the API server starts", "the engine loads"])
def test_a_supervisor_killed_while_real_children_start(serve, tmp_path, moment):
    served = serve(
        api=run_api_server,
        model=str(write_tiny_model(tmp_path / "tiny")),
        executor="uni",
    )
    name = "api-0" if moment == "the API server starts" else "engine-0"
    wait_until(lambda: name in served.pids(), what=name)
    if name == "engine-0":
        maps = f"/proc/{served.pids()[name]}/maps"
        wait_until(lambda: "libtorch_cpu" in Path(maps).read_text(), TIMEOUT_S, what="torch")
    pids = served.pids()
    served.process.kill()
    wait_until(lambda: all(map(is_gone, pids.values())), 2.0, "the end of the children")
    served.end()
    _remove_folder()


@pytest.mark.parametrize("lacks", ["a folder", "descriptors"])
def test_what_the_system_refuses_is_one_clear_line(serve, monkeypatch, lacks):
    monkeypatch.setenv("TEST_LACKS", lacks)
    served = serve()
    assert served.end()[0] == 1
    assert "E supervisor: the deployment cannot be started: " in served.lines[-1]
    assert not any("Traceback" in line for line in served.lines)


def test_a_second_signal_ends_it_at_once(serve):
    served = serve(engine=entry(children.ignores_sigterm), shutdown_grace_s=60.0)
    wait_until(lambda: "engine-0" in served.pids(), what="the engine")
    engine = served.pids()["engine-0"]
    wait_until(lambda: _ignores(engine, signal.SIGTERM), what="the engine's deaf ears")
    served.process.send_signal(signal.SIGTERM)
    served.line("SIGTERM: ending")
    wait_until(lambda: set(served.pids()) == {"engine-0"}, what="the API server's end")
    served.process.send_signal(signal.SIGINT)
    assert served.end()[0] == 128 + signal.SIGINT
    assert is_gone(engine)


def _ignores(pid, number):
    with open(f"/proc/{pid}/status") as status:
        mask = next(line for line in status if line.startswith("SigIgn"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_a_port_in_use_is_one_clear_line(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        served = serve(port=port)
        assert served.end()[0] == 1
    (line,) = served.lines
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert "--port" in line


def test_the_port_is_free_for_the_next_one_at_once(serve):
    first = serve()
    first.line("ready at")
    first.state()
    port = int(first.url.rpartition(":")[2])
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 0
    second = serve(port=port)
    second.line(f"ready at http://127.0.0.1:{port} ")
    second.process.send_signal(signal.SIGTERM)
    assert second.end()[0] == 0


def test_several_start_in_the_same_second(serve):
    all_served = [serve() for _ in range(4)]
    for served in all_served:
        served.line("ready at")
    assert len({served.url for served in all_served}) == 4
    for served in all_served:
        served.process.send_signal(signal.SIGINT)
    assert [served.end()[0] for served in all_served] == [0, 0, 0, 0]
