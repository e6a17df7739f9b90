"""Entry points of child processes that misbehave on purpose, and a small API server."""

import asyncio
import os
import signal
import socket
import sys
import threading

import msgspec

from trimaran.client.core_client import EngineCoreClient
from trimaran.engine import engine_core
from trimaran.engine.engine_core_proc import run_engine_core
from trimaran.engine.spec import EngineSpec
from trimaran.errors import CheckpointError
from trimaran.executor.base import ProgressCallback
from trimaran.executor.mock import MockExecutor
from trimaran.launch.api_spec import ApiServerSpec, DeploymentWatch
from trimaran.messages import ModelFacts, ModelRunnerOutput, Ping, SchedulerOutput

TIMEOUT_S = 60.0
POISON = 666  # a prompt token on which a step fails


class LoadFails(MockExecutor):
    def load(self, on_progress: ProgressCallback) -> ModelFacts:
        raise CheckpointError("tensor 'x' is missing", file="m.gguf", hint="download it again")


class LoadHangs(MockExecutor):
    def load(self, on_progress: ProgressCallback) -> ModelFacts:
        on_progress("loading", 0.5, "half of it")
        threading.Event().wait()
        raise AssertionError


class LoadIsBusy(MockExecutor):
    """In pure Python, so that no other thread of the child gets far."""

    def load(self, on_progress: ProgressCallback) -> ModelFacts:
        on_progress("loading", 0.5, "")
        while True:
            pass


class StepFails(MockExecutor):
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request in plan.new_requests:
            if POISON in request.token_ids:
                raise ValueError("a poisonous token")
        return super().execute(plan)


class StepHangs(MockExecutor):
    """A deadlock in the main thread; all other threads go on."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if any(POISON in request.token_ids for request in plan.new_requests):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().execute(plan)


def _run(executor: type[MockExecutor], spec: EngineSpec) -> None:
    engine_core.EXECUTORS["mock"] = f"{__name__}:{executor.__name__}"
    run_engine_core(spec)


def load_fails(spec: EngineSpec) -> None:
    _run(LoadFails, spec)


def load_hangs(spec: EngineSpec) -> None:
    _run(LoadHangs, spec)


def load_is_busy(spec: EngineSpec) -> None:
    _run(LoadIsBusy, spec)


def step_fails(spec: EngineSpec) -> None:
    _run(StepFails, spec)


def step_hangs(spec: EngineSpec) -> None:
    _run(StepHangs, spec)


def import_fails(spec: EngineSpec) -> None:
    import a_module_that_is_not_there  # noqa: F401


def never_answers(spec: EngineSpec) -> None:
    threading.Event().wait()


def ignores_sigterm(spec: EngineSpec) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


class Report(msgspec.Struct):
    """For tests of spawn: where a child writes what it sees."""

    descriptor: int
    text: str = ""


def report_itself(spec: Report) -> None:
    facts = {
        "text": spec.text,
        "environment": dict(os.environ),
        "ignores_sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "modules": sorted(sys.modules),
        "argv": sys.argv,
    }
    os.write(spec.descriptor, msgspec.msgpack.encode(facts))


def raise_error(spec: Report) -> None:
    raise CheckpointError(spec.text, hint="change it")


def wait_for_ever(spec: Report) -> None:
    os.write(spec.descriptor, b"waiting")
    threading.Event().wait()


def wait_deaf(spec: Report) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for_ever(spec)


def spin_for_ever(spec: Report) -> None:
    os.write(spec.descriptor, b"spinning")
    while True:
        pass


# ------------------------------------------------------------------------------------- API server


def stub_api(spec: ApiServerSpec) -> None:
    """Answers every HTTP request with the deployment's state and the number of ready engines."""
    asyncio.run(_stub_api(spec))


def stub_api_that_asks(spec: ApiServerSpec) -> None:
    """And, once it is connected, asks the engine something again and again."""
    asyncio.run(_stub_api(spec, asks=True))


def stub_api_that_dies(spec: ApiServerSpec) -> None:
    raise CheckpointError("no tokenizer", file="tokenizer.json", hint="get one")


async def _stub_api(spec: ApiServerSpec, asks: bool = False) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    watch = DeploymentWatch(spec.state_fd).start()
    client = EngineCoreClient.make_client(True, True, spec.config.engine, links=spec.links)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = msgspec.json.encode({"state": watch.current, "engines": len(client.ready)})
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, sock=socket.socket(fileno=spec.listen_fd))

    async def connect() -> None:
        await client.wait_ready_async()
        watch.report_ready()
        while asks:
            await client.control_async(Ping(), TIMEOUT_S)

    connecting = asyncio.create_task(connect())
    await stop.wait()
    connecting.cancel()
    server.close()
    await client.shutdown_async()
    watch.close()
