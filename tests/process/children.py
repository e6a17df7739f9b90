"""Entry points of child processes that misbehave on purpose, and a small API server."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from trimaran.client.core_client import EngineCoreClient
from trimaran.config import CacheConfig
from trimaran.engine import (
    engine_core,
    engine_core_proc,
    launcher_link,
    output_sender,
    request_receiver,
)
from trimaran.engine.engine_core_proc import run_engine_core
from trimaran.engine.spec import EngineSpec
from trimaran.errors import CheckpointError, DeadlineExceededError, StartupError
from trimaran.executor.base import ProgressCallback
from trimaran.executor.mock import MockExecutor
from trimaran.ids import engine_identity
from trimaran.ipc.codec import Decoder, Encoder
from trimaran.ipc.sockets import Context, Socket
from trimaran.launch.api_spec import ApiServerSpec, DeploymentWatch
from trimaran.messages import (
    EngineCoreRequest,
    KVCacheConfig,
    ModelFacts,
    ModelRunnerOutput,
    Ping,
    SchedulerOutput,
)

POISON = 666  # a prompt token on which a step fails
HANGS = "it hangs"
FAULT = "TEST_FAULT"  # "where:how": the variable by which a test tells ``faulty`` what goes wrong


# ------------------------------------------------------------------------- one fault at one place


def _raise() -> None:
    raise ValueError("as it was told")


def _hang() -> None:
    Path("/proc/self/comm").write_text(HANGS)  # by which a test can tell
    threading.Event().wait()


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _need_memory() -> None:
    _limit_memory()
    bytearray(1 << 30)


_hoard: list[object] = []


def _take_all_memory() -> None:
    _limit_memory()
    size = 1 << 20
    while size:
        try:
            _hoard.append(bytearray(size))
        except MemoryError:
            size //= 2
    raise MemoryError


_HOW = {
    "raise": _raise,
    "need memory": _need_memory,
    "take all memory": _take_all_memory,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": os.abort,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "hang": _hang,
}


def _fault(where: str) -> None:
    wanted, how = os.environ[FAULT].split(":")
    if where == wanted:
        _HOW[how]()


class Faulty(MockExecutor):
    def load(self, on_progress: ProgressCallback) -> ModelFacts:
        _fault("load")
        return super().load(on_progress)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        _fault("KV cache")

    def warm_up(self, on_progress: ProgressCallback) -> None:
        _fault("warm-up")

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        poisonous = any(POISON in request.token_ids for request in plan.new_requests)
        if poisonous:
            _fault("prefill")
        elif plan.request_ids:
            _fault("decode")
        return super().execute(plan)


class FaultyContext(Context):
    """Of an engine that is built, and greets its front ends."""

    handshake_address = ""

    def push(self, address: str) -> Socket:
        _fault("output links")
        return super().push(address)

    def dealer(self, address: str, identity: bytes, **options: Any) -> Socket:
        if address != self.handshake_address:
            _fault("input links")
        return super().dealer(address, identity, **options)


class FaultyDecoder(Decoder[Any]):
    def decode(self, frame: bytes, *buffers: Any) -> Any:
        message = super().decode(frame, *buffers)
        if isinstance(message, EngineCoreRequest):
            _fault("input thread")
        return message


class FaultyEncoder(Encoder):
    def encode(self, message: Any) -> bytes:
        if message.outputs:
            _fault("output thread")
        return super().encode(message)


def faulty(spec: EngineSpec) -> None:
    """An engine that works, but for what the environment says."""
    _fault("import")
    FaultyContext.handshake_address = spec.handshake_address
    engine_core_proc.Context = FaultyContext
    request_receiver.Decoder = FaultyDecoder
    output_sender.Encoder = FaultyEncoder
    _run(Faulty, spec)


# --------------------------------------------------- engines that do not fit those who start them


def of_another_version(spec: EngineSpec) -> None:
    launcher_link.PROTOCOL_VERSION = 9999
    run_engine_core(spec)


def of_another_rank(spec: EngineSpec) -> None:
    run_engine_core(msgspec.structs.replace(spec, rank=7))


def of_another_life(spec: EngineSpec) -> None:
    run_engine_core(msgspec.structs.replace(spec, incarnation=spec.incarnation + 1))


def of_another_block_size(spec: EngineSpec) -> None:
    config = msgspec.structs.replace(spec.config, cache=CacheConfig(block_size=32))
    run_engine_core(msgspec.structs.replace(spec, config=config))


def refused_and_lives_on(spec: EngineSpec) -> None:
    with contextlib.suppress(StartupError):
        of_another_block_size(spec)
    threading.Event().wait()


def talks_nonsense(spec: EngineSpec) -> None:
    link = Context().dealer(spec.handshake_address, engine_identity(spec.rank))
    for frame in (b"", b"\xff" * 100, b"\x90"):
        link.try_send([frame])
    threading.Event().wait()


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
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        threading.Event().wait()
        raise AssertionError


class WakeFails(MockExecutor):
    """The first time only."""

    _tried = False

    def wake_up(self, on_progress: ProgressCallback) -> None:
        if not self._tried:
            self._tried = True
            raise CheckpointError("is gone", file="m.gguf", hint="put it back")
        super().wake_up(on_progress)


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


def wake_fails(spec: EngineSpec) -> None:
    _run(WakeFails, spec)


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
            # An answer that was on its way when the engine stopped never comes.
            with contextlib.suppress(DeadlineExceededError):
                await client.control_async(Ping(), 1.0)

    connecting = asyncio.create_task(connect())
    await stop.wait()
    connecting.cancel()
    server.close()
    await client.shutdown_async()
    watch.close()
