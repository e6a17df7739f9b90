"""The main of an API server process.

Owns: its order of life: answer /ready at once, connect to the engines meanwhile, serve, and on
SIGTERM let running requests end. Started by launch/api_servers, which names ``run_api_server``.
"""

import asyncio
import gc
import signal
import socket
from pathlib import Path

import uvloop

from trimaran.client.async_llm import AsyncLLM
from trimaran.client.core_client import EngineCoreClient
from trimaran.client.model_files import open_model_files, with_model_path
from trimaran.clock import Laps
from trimaran.launch.api_spec import ApiServerSpec, DeploymentWatch
from trimaran.logging import configure
from trimaran.messages import DeploymentState
from trimaran.server.app import build_app
from trimaran.server.auth import load_keys
from trimaran.server.serving import HTTPServer
from trimaran.server.state import ServerState

# Of the supervisor's time to end: it gives API servers 0.6 of it, then the engines are ended.
DRAIN_SHARE = 0.5
# A download is the supervisor's to watch; this only says that no wait is for ever.
DOWNLOAD_DEADLINE_S = 7 * 86_400.0
# Beyond the engines' own deadline, which the supervisor keeps and whose end it explains.
CONNECT_EXTRA_S = 20.0


def run_api_server(spec: ApiServerSpec) -> None:
    """Serve until SIGTERM. Raises what keeps it from connecting, for the supervisor to tell."""
    observability = spec.config.observability
    role = f"api-{spec.client_index}"
    configure(role, level=observability.log_level, log_format=observability.log_format)
    laps = Laps(spec.spawned_at)
    laps.done("importing")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(spec, laps))


async def _serve(spec: ApiServerSpec, laps: Laps) -> None:
    config = spec.config
    watch = DeploymentWatch(spec.state_fd).start()
    state = ServerState.create(config, lambda: watch.current)
    app = build_app(state, load_keys(config.server))
    server = HTTPServer(app, state, on_listening=lambda: laps.done("listening"))
    _drain_on_sigterm(server, config.launch.shutdown_grace_s * DRAIN_SHARE)
    connecting = asyncio.create_task(_connect(spec, watch, state, laps))

    def stop_if_failed(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            server.stop()

    connecting.add_done_callback(stop_if_failed)
    try:
        await server.run_on(socket.socket(fileno=spec.listen_fd))
    finally:
        connecting.cancel()
        [outcome] = await asyncio.gather(connecting, return_exceptions=True)
        if state.llm is not None:
            await state.llm.shutdown()
        watch.close()
    if isinstance(outcome, Exception):
        raise outcome


def _drain_on_sigterm(server: HTTPServer, grace_s: float) -> None:
    """The first SIGTERM drains, a second one stops at once. SIGINT is the supervisor's."""
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def on_sigterm() -> None:
        if drains:
            server.stop()
        else:
            drains.append(loop.create_task(server.drain(grace_s)))

    loop.add_signal_handler(signal.SIGTERM, on_sigterm)


async def _connect(
    spec: ApiServerSpec, watch: DeploymentWatch, state: ServerState, laps: Laps
) -> None:
    """Read the model's files while the engines load it, then attach to them.

    Raises StartupError, DeadlineExceededError.
    """
    located = await watch.wait_for(
        lambda now: now.model_path is not None or now.failure is not None, DOWNLOAD_DEADLINE_S
    )
    if located.model_path is None:
        return  # the deployment has failed; what asks hears so until the supervisor ends us
    laps.done("model located")
    config = with_model_path(spec.config.engine, Path(located.model_path))
    files = await asyncio.to_thread(open_model_files, config.model)
    laps.done("tokenizer")
    client = await asyncio.to_thread(
        EngineCoreClient.make_client, True, True, config, links=spec.links
    )

    def tell_client(now: DeploymentState) -> None:
        if now.failure is not None:
            client.fail(now.failure)

    llm = AsyncLLM(client, *files, seed=config.model.seed, metrics=state.metrics)
    state.llm = llm
    watch.on_change(tell_client)
    tell_client(watch.current)
    await llm.start(config.launch.engine_ready_timeout_s + CONNECT_EXTRA_S)
    # What is here now stays: the collector need not look at it while tokens stream.
    gc.collect()
    gc.freeze()
    laps.done("connecting")
    watch.report_ready(laps.laps)
