"""AsyncLLM: an engine (or several) for asyncio.

Owns: one engine client, the output handler task and the request streams. Called by server/ (which
attaches to engines that the supervisor started) and by users as a library (then this process is
the parent of its engines).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

from trimaran.client.core_client import SLEEP_TIMEOUT_S, EngineCoreClient
from trimaran.client.input_processor import InputProcessor
from trimaran.client.model_files import open_model_files, with_model_path
from trimaran.client.output_processor import Metrics, OutputProcessor, RequestStream
from trimaran.client.outputs import RequestOutput, RequestTimeline
from trimaran.client.prompt_embeds import Prompt
from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.config import EngineConfig
from trimaran.errors import EngineDeadError, InvalidRequestError, UnavailableError
from trimaran.formats.checkpoint import ModelSource
from trimaran.ids import external_id
from trimaran.messages import (
    AWAKE,
    ControlOperation,
    Ping,
    Profile,
    SchedulerStats,
    Sleep,
    WakeUp,
)
from trimaran.sampling_params import SamplingParams
from trimaran.text.bounded import refuse_too_long
from trimaran.text.chat_encoding import encode_chat
from trimaran.text.chat_template import ChatTemplate
from trimaran.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Below this many characters tokenising takes less time than a hop to another thread.
INLINE_CHARS = 200


class AsyncLLM:
    """Generate with asyncio. ``await AsyncLLM.create(config)``, or ``async with`` it."""

    def __init__(
        self,
        client: EngineCoreClient,
        source: ModelSource,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        seed: int = -1,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.is_ready = False
        self.dead_error: EngineDeadError | None = None
        self._client = client
        self._inputs = InputProcessor(source, tokenizer, seed=seed)
        self._outputs = OutputProcessor(tokenizer, metrics=metrics, clock=clock)
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
        self._handler: asyncio.Task[None] | None = None
        self._stats: dict[int, SchedulerStats] = {}  # of each engine, as last heard

    @classmethod
    async def create(cls, config: EngineConfig | None = None) -> "AsyncLLM":
        """Start engines of our own and wait until they are ready.

        Raises StartupError: with the engine's own first cause.
        """
        config = config or EngineConfig()
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(None, open_model_files, config.model)
        config = with_model_path(config, files.source.path)
        client = await cls._make_client(config)
        llm = cls(client, *files, seed=config.model.seed)
        try:
            await llm.start(config.launch.engine_ready_timeout_s)
        except BaseException:
            await llm.shutdown()
            raise
        return llm

    @staticmethod
    async def _make_client(config: EngineConfig) -> EngineCoreClient:
        """In a thread: it starts processes. Cancelled, it waits for the thread and closes."""
        making = asyncio.get_running_loop().run_in_executor(
            None, EngineCoreClient.make_client, True, True, config
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            [made] = await asyncio.gather(making, return_exceptions=True)
            if isinstance(made, EngineCoreClient):
                await made.shutdown_async()
            raise

    @property
    def max_model_len(self) -> int:
        return self._inputs.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._inputs.vocab_size

    @property
    def num_unfinished(self) -> int:
        """Choices that have not ended yet."""
        return self._outputs.num_unfinished

    async def start(self, timeout_s: float) -> None:
        """Wait for the engines' ready messages, then serve.

        Raises DeadlineExceededError: says which ranks are missing.
        """
        await self._client.wait_ready_async(timeout_s)
        self._inputs.max_model_len = min(r.max_model_len for r in self._client.ready)
        self._handler = asyncio.create_task(self._handle_outputs(), name="output_handler")
        self.is_ready = True

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        allow_special: bool = False,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of ``text``; long texts are tokenised off the event loop.

        Raises InvalidRequestError: it surely has more than ``most_tokens`` (default: the model's
        limit); one that is only a little too long is returned whole.
        """
        most = most_tokens or self.max_model_len

        def encode() -> list[int]:
            refuse_too_long(self.tokenizer, text, most, param="prompt")
            return self.tokenizer.encode(
                text, add_special_tokens=add_special_tokens, allow_special=allow_special
            )

        return encode() if len(text) <= INLINE_CHARS else await self._in_pool(encode)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: ChatTemplate | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation; ``template`` instead of the model's own.

        Off the event loop: a template is somebody's program. Options as in ``text.encode_chat``.
        Raises InvalidRequestError: there is no template, or it refused the messages.
        """
        chosen = template or self.chat_template
        if chosen is None:
            raise InvalidRequestError("this model has no chat template", param="messages")
        most = self.max_model_len
        return await self._in_pool(
            lambda: encode_chat(self.tokenizer, chosen, messages, most_tokens=most, **options)
        )

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        continues_prompt: bool = True,
        timeline: RequestTimeline | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Items as ``params.output_kind`` asks. Closing the iterator aborts the request.

        ``prompt``: a text, token ids, or ``{"prompt_embeds": [P, hidden_size]}``.
        ``continues_prompt``: the text reads on from the prompt's; False for an answer in a chat,
        which begins a text (a leading SentencePiece space is dropped). ``timeline``: of a request
        that was received, and tokenised, by the caller; it is kept from here on.

        Raises InvalidRequestError: before anything is submitted; EngineDeadError: the engine ended.
        """
        self._check_alive()
        timeline = timeline or RequestTimeline(self._clock.wall())
        ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        timeline.tokenised = timeline.tokenised or self._clock.wall()
        request_id = request_id or external_id("req")
        requests = self._inputs.make_requests(
            ids,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=timeline.received,
        )
        news = asyncio.Event()
        stream = RequestStream(
            request_id,
            prompt if isinstance(prompt, str) else None,
            requests,
            params,
            news.set,
            continues_prompt=continues_prompt,
            timeline=timeline,
        )
        self._outputs.add(stream)
        timeline.submitted = self._clock.wall()  # before the engine can have it
        try:
            for request in requests:
                await self._client.add_request_async(request)
            finished = False
            while not finished:
                # No deadline of its own: an engine that dies or hangs fails the stream, and the
                # consumer may close it at any time.
                await news.wait()
                news.clear()
                item = stream.take()
                if item is not None:
                    finished = item.finished
                    yield item
        finally:
            await self._abort(self._outputs.remove(stream))

    async def _abort(self, request_ids: list[str]) -> None:
        if request_ids and self.dead_error is None:
            try:
                await self._client.abort_requests_async(request_ids)
            except (EngineDeadError, UnavailableError) as error:
                logger.debug("nothing to abort: %s", error)

    async def control(
        self, operation: ControlOperation, *, timeout_s: float = 30.0
    ) -> list[object]:
        """Run a control operation on every engine; results in order of rank (messages.py)."""
        self._check_alive()
        return await self._client.control_async(operation, timeout_s)

    async def sleep(
        self,
        level: Literal[0, 1, 2] = 1,
        mode: Literal["wait", "abort"] = "abort",
        *,
        timeout_s: float = SLEEP_TIMEOUT_S,
    ) -> None:
        """Stop work and give memory back (messages.Sleep); returns once every engine sleeps.

        Requests sent while asleep wait. Raises InvalidRequestError: no such level or mode.
        Raises ConflictError: woken up first. DeadlineExceededError: running requests take longer;
        it falls asleep all the same, unless ``wake_up`` calls it off.
        """
        await self.control(Sleep(level, mode), timeout_s=timeout_s)

    async def wake_up(self, *, timeout_s: float = SLEEP_TIMEOUT_S) -> None:
        """Undo ``sleep``. Raises RequestFailedError, with the cause: still asleep, try again."""
        await self.control(WakeUp(), timeout_s=timeout_s)

    async def is_sleeping(self) -> bool:
        """Whether any engine sleeps, as the engines say."""
        every = cast("list[SchedulerStats]", await self.control(Ping()))
        return any(stats.sleep_level != AWAKE for stats in every)

    @property
    def sleep_phase(self) -> str | None:
        """ "sleeping", "falling asleep" or None, as last heard: new requests wait in the former."""
        every = self._stats.values()
        if any(stats.sleep_level != AWAKE for stats in every):
            return "sleeping"
        return "falling asleep" if any(stats.is_falling_asleep for stats in every) else None

    async def start_profile(self) -> list[str]:
        """Record what the engines do; the files to be, one per engine.

        Raises ConflictError: --profile-dir is not set, or a recording is under way.
        """
        return cast("list[str]", await self.control(Profile("start")))

    async def stop_profile(self) -> list[str]:
        """End the recording; the files. Raises ConflictError: there is none."""
        return cast("list[str]", await self.control(Profile("stop"), timeout_s=SLEEP_TIMEOUT_S))

    def _check_alive(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error.again()
        if not self.is_ready:
            raise UnavailableError("the engine is not ready yet", retry_after_s=1.0)

    async def _handle_outputs(self) -> None:
        try:
            while True:
                message = await self._client.get_output_async()
                if message.stats is not None:
                    self._stats[message.rank] = message.stats
                await self._abort(self._outputs.process(message))
        except EngineDeadError as error:
            self._die(error)
        except UnavailableError:
            self._die(EngineDeadError("the engine client was closed"))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("output handler failed")
            self._die(EngineDeadError(f"the output handler failed: {error}"))

    def _die(self, error: EngineDeadError) -> None:
        self.dead_error = error
        self._outputs.fail_all(error)

    async def shutdown(self) -> None:
        """End the streams, and the engines if they are ours; may be called twice."""
        if self._handler is not None:
            self._handler.cancel()
            await asyncio.gather(self._handler, return_exceptions=True)
        if self.dead_error is None:
            self._die(EngineDeadError("the engine client was closed"))
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._client.shutdown_async()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()
