"""LLMEngine: requests in, outputs out, one step at a time, without asyncio.

Owns: one sync engine client (in this process or in a child) and the request streams. Called by
``LLM`` and by users who want to drive the steps themselves.
"""

from types import TracebackType
from typing import Literal, cast

from trimaran.client.core_client import SLEEP_TIMEOUT_S, EngineCoreClient
from trimaran.client.input_processor import InputProcessor
from trimaran.client.model_files import open_model_files, with_model_path
from trimaran.client.output_processor import OutputProcessor, RequestStream
from trimaran.client.outputs import RequestOutput, RequestTimeline
from trimaran.client.prompt_embeds import Prompt
from trimaran.clock import SYSTEM_CLOCK
from trimaran.config import EngineConfig
from trimaran.errors import EngineDeadError, InvalidRequestError, UnavailableError
from trimaran.messages import AWAKE, ControlOperation, Ping, Profile, SchedulerStats, Sleep, WakeUp
from trimaran.sampling_params import SamplingParams


class LLMEngine:
    """``add_request``, then ``step`` until ``has_unfinished_requests`` is false."""

    def __init__(self, config: EngineConfig, *, multiprocess: bool = True) -> None:
        """Start the engine and wait until it is ready.

        Raises StartupError: with the engine's own first cause.
        """
        self.source, self.tokenizer, self.chat_template = open_model_files(config.model)
        self.config = config = with_model_path(config, self.source.path)
        self._client = EngineCoreClient.make_client(multiprocess, False, config)
        try:
            self._client.wait_ready(config.launch.engine_ready_timeout_s)
            self._inputs = InputProcessor(self.source, self.tokenizer, seed=config.model.seed)
            self._inputs.max_model_len = min(r.max_model_len for r in self._client.ready)
            self._outputs = OutputProcessor(self.tokenizer)
        except BaseException:
            self._client.shutdown()
            raise
        self._streams: dict[str, RequestStream] = {}
        self._news: list[str] = []

    @property
    def max_model_len(self) -> int:
        return self._inputs.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        continues_prompt: bool = True,
    ) -> None:
        """Submit a request; its items come from ``step``. Options as in ``AsyncLLM.generate``.

        Raises InvalidRequestError: nothing was submitted.
        """
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        timeline = RequestTimeline(SYSTEM_CLOCK.wall())
        ids = (
            self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        timeline.tokenised = SYSTEM_CLOCK.wall()
        requests = self._inputs.make_requests(
            ids,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=timeline.received,
        )
        stream = RequestStream(
            request_id,
            prompt if isinstance(prompt, str) else None,
            requests,
            params,
            lambda: self._news.append(request_id),
            continues_prompt=continues_prompt,
            timeline=timeline,
        )
        self._outputs.add(stream)
        self._streams[request_id] = stream
        timeline.submitted = SYSTEM_CLOCK.wall()  # before the engine can have it
        for request in requests:
            self._client.add_request(request)

    def abort_request(self, request_ids: list[str]) -> None:
        """End requests early; unknown ids are ignored."""
        gone: list[str] = []
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                gone += self._outputs.remove(stream)
        if gone:
            self._client.abort_requests(gone)

    def has_unfinished_requests(self) -> bool:
        return bool(self._streams)

    def step(self) -> list[RequestOutput]:
        """Wait for the engine's next message; what it brought, one item per request with news.

        While the engine sleeps the next message may be long in coming: see ``is_sleeping``.

        Raises EngineDeadError, UnavailableError: the engine ended, or was closed; every unfinished
        request is lost.
        """
        if not self._streams:
            return []
        try:
            message = self._client.get_output()
        except (EngineDeadError, UnavailableError) as error:
            self._outputs.fail_all(error)
            self._streams.clear()
            raise
        to_abort = self._outputs.process(message)
        if to_abort:
            self._client.abort_requests(to_abort)
        items = []
        news, self._news = dict.fromkeys(self._news), []
        for request_id in news:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            try:
                item = stream.take()
            except BaseException:
                del self._streams[request_id]
                raise
            if item is not None:
                items.append(item)
                if item.finished:
                    del self._streams[request_id]
        return items

    def control(self, operation: ControlOperation, *, timeout_s: float = 30.0) -> list[object]:
        """Run a control operation on every engine; results in order of rank (messages.py)."""
        return self._client.control(operation, timeout_s)

    def sleep(
        self,
        level: Literal[0, 1, 2] = 1,
        mode: Literal["wait", "abort"] = "abort",
        *,
        timeout_s: float = SLEEP_TIMEOUT_S,
    ) -> None:
        """As ``AsyncLLM.sleep``; mode "wait" needs an engine process."""
        self.control(Sleep(level, mode), timeout_s=timeout_s)

    def wake_up(self, *, timeout_s: float = SLEEP_TIMEOUT_S) -> None:
        """Undo ``sleep``. Raises RequestFailedError, with the cause: still asleep, try again."""
        self.control(WakeUp(), timeout_s=timeout_s)

    def is_sleeping(self) -> bool:
        """Whether any engine sleeps."""
        every = cast("list[SchedulerStats]", self.control(Ping()))
        return any(stats.sleep_level != AWAKE for stats in every)

    def start_profile(self) -> list[str]:
        """As ``AsyncLLM.start_profile``."""
        return cast("list[str]", self.control(Profile("start")))

    def stop_profile(self) -> list[str]:
        """As ``AsyncLLM.stop_profile``."""
        return cast("list[str]", self.control(Profile("stop"), timeout_s=SLEEP_TIMEOUT_S))

    def shutdown(self) -> None:
        """End the engine; may be called twice."""
        self._client.shutdown()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
