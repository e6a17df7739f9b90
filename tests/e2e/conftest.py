"""Whole deployments, started by the command line as a user does, one for all tests of a file."""

import time

import httpx
import pytest

from trimaran.bench.server_process import ServerProcess
from trimaran.bench.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def tiny(tiny_model):
    with ServerProcess(tiny_model, "--served-model-name", "tiny", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def demo():
    with ServerProcess("demo") as server:
        yield server


@pytest.fixture
def wait_for_metrics():
    """Waits until the gauges of a server show the values, or fails with what they show."""

    def wait(url, timeout_s=5.0, **expected):
        deadline = time.monotonic() + timeout_s
        while True:
            lines = httpx.get(url + "/metrics", timeout=10).text.splitlines()
            shown = {
                name: float(line.rsplit(" ", 1)[1])
                for name in expected
                for line in lines
                if line.startswith(f"vllm:{name}{{")
            }
            if shown == expected:
                return
            assert time.monotonic() < deadline, f"{shown}, expected {expected}"
            time.sleep(0.02)

    return wait
