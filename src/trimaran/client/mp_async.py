"""Engines in processes, for asyncio (S20).

Owns: the reading of both links in an event loop. Chosen by ``EngineCoreClient.make_client``; used
by AsyncLLM.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from trimaran.client.core_client import DEFAULT_CONTROL_TIMEOUT_S
from trimaran.client.mp import MPClient, weakly
from trimaran.client.utility_calls import no_answer
from trimaran.config import EngineConfig
from trimaran.errors import DeadlineExceededError, UnavailableError
from trimaran.ipc.sockets import AsyncReceiver
from trimaran.launch.links import ClientLinks
from trimaran.messages import (
    ControlOperation,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeath,
)


class AsyncMPClient(MPClient):
    """For asyncio: all but construction and ``ready`` in one event loop (S20)."""

    def __init__(
        self,
        config: EngineConfig,
        links: ClientLinks | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, links, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._greeted = asyncio.Event()
        self._receivers = (
            AsyncReceiver(self._requests, weakly(self._on_request_link)),
            AsyncReceiver(self._outputs, weakly(self._on_output)),
        )
        for receiver in self._receivers:
            self.resources.push("a receiver", receiver.stop)

    async def wait_ready_async(self, timeout_s: float | None = None) -> None:
        self._check()
        timeout_s = self._ready_timeout_s(timeout_s)
        self._loop = asyncio.get_running_loop()
        for receiver in self._receivers:
            receiver.start()
        try:
            async with asyncio.timeout(timeout_s):
                if self._launched is not None:
                    # Shielded: who gives up waiting does not take the result from the monitor.
                    await asyncio.shield(asyncio.wrap_future(self._launched.ready))
                while self._missing:
                    self._check()
                    self._greeted.clear()
                    await self._greeted.wait()
        except TimeoutError as error:
            await self.shutdown_async()
            if isinstance(error, DeadlineExceededError):
                raise  # the launcher's own, which knows more
            raise self._not_ready(timeout_s) from error
        except BaseException:
            await self.shutdown_async()
            raise

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._add_request(request)
        self._receivers[0].poke()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self._abort_requests(request_ids)
        self._receivers[0].poke()

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._queue:
            self._check()
            self._arrived.clear()
            await self._arrived.wait()
        return self._queue.popleft()

    async def control_async(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        futures = self._start_control(operation)
        self._receivers[0].poke()
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        except TimeoutError as error:
            raise no_answer(operation, timeout_s) from error
        finally:
            self._forget_calls(futures)

    async def shutdown_async(self) -> None:
        self._fail_all(UnavailableError("this client is closed"))
        for receiver in self._receivers:
            receiver.stop()
        # The rest waits for processes to end, which is nothing for the event loop.
        await asyncio.to_thread(self._finalizer)

    def shutdown(self) -> None:
        """For when no event loop runs any more."""
        self._fail_all(UnavailableError("this client is closed"))
        self._finalizer()

    def _on_request_link(self, frames: list[bytes]) -> None:
        self._on_greeting(frames)
        self._greeted.set()

    def _on_child_end(self, death: EngineDeath) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._engine_died, death)
        else:
            self._engine_died(death)

    def _wake_receiver(self) -> None:
        self._arrived.set()
        self._greeted.set()
