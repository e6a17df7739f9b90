"""Engines in processes, for asyncio (S20).

Owns: the reading of both links in an event loop. Chosen by ``EngineCoreClient.make_client``; used
by AsyncLLM.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from trimaran.client.core_client import DEFAULT_CONTROL_TIMEOUT_S
from trimaran.client.mp import CAUSE_TIMEOUT_S, MPClient, weakly
from trimaran.client.utility_calls import no_answer
from trimaran.errors import DeadlineExceededError, EngineDeadError
from trimaran.ipc.sockets import AsyncReceiver, runs_here
from trimaran.messages import (
    ControlOperation,
    EngineCoreOutputs,
    EngineCoreRequest,
)


class AsyncMPClient(MPClient):
    """For asyncio: all but construction and ``ready`` in one event loop (S20)."""

    def _open_receiver(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._receivers = (
            AsyncReceiver(self._requests, weakly(self._on_greeting)),
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
                    await self._wait()
        except TimeoutError as error:
            await self.shutdown_async()
            if isinstance(error, DeadlineExceededError):
                raise  # the launcher's own, which knows more
            raise self._not_ready(timeout_s) from error
        except BaseException:
            await self.shutdown_async()
            raise

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        sent = self._add_request(request)
        self._receivers[0].poke()
        if not sent:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CAUSE_TIMEOUT_S):
                    while True:
                        await self._wait()
            raise EngineDeadError("the engine is not connected")

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self._abort_requests(request_ids)
        self._receivers[0].poke()

    async def get_output_async(self) -> EngineCoreOutputs:
        while (outputs := self._take()) is None:
            await self._wait()
        return outputs

    async def _wait(self) -> None:
        """For any news. Raises what every call raises, once there is something to raise."""
        self._check()
        self._woken.clear()
        await self._woken.wait()

    async def control_async(
        self, operation: ControlOperation, timeout_s: float = DEFAULT_CONTROL_TIMEOUT_S
    ) -> list[object]:
        futures, timeout_s = self._start_control(operation, timeout_s)
        self._receivers[0].poke()
        try:
            async with asyncio.timeout(timeout_s):
                return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        except TimeoutError as error:
            raise no_answer(operation, timeout_s) from error
        finally:
            self._forget_calls(futures)

    async def shutdown_async(self) -> None:
        self._close()
        for receiver in self._receivers:
            receiver.stop()
        # The rest waits for processes to end, which is nothing for the event loop. Shielded: who
        # gives up waiting for it does not stop it.
        await asyncio.shield(asyncio.to_thread(self.resources))

    def shutdown(self) -> None:
        """From any thread, or when no event loop runs any more."""
        self._close()
        self.resources()

    def _wake_receiver(self) -> None:
        if self._loop is None or runs_here(self._loop):
            self._woken.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits in it
            self._loop.call_soon_threadsafe(self._woken.set)
