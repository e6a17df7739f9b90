"""An engine-free LLM with AsyncLLM's methods: bytes are tokens, and the output is a given text.

Deterministic: choice c of a request writes SCRIPT from its c-th character on, over and over.
"""

import asyncio
import codecs
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trimaran.client.outputs import (
    ChoiceTimeline,
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
)
from trimaran.errors import EngineDeadError, InvalidRequestError
from trimaran.formats.architecture import GenerationDefaults
from trimaran.messages import ResetPrefixCache, Sleep
from trimaran.sampling_params import RequestOutputKind, SamplingParams
from trimaran.text.chat_template import ChatTemplate

SCRIPT = 'Hi 😊 wörld, "quoted" \\ 中文\n'
BOS, EOS = 256, 257


class FakeTokenizer:
    bos_token_id, eos_token_id = BOS, EOS
    special_ids = frozenset({BOS, EOS})
    longest_token_bytes = 5

    def __init__(self, *, adds_bos: bool = True) -> None:
        self.adds_bos = adds_bos

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[int]:
        parts = text.split("<bos>") if allow_special else [text]
        ids = list(parts[0].encode())
        for part in parts[1:]:
            ids += [BOS, *part.encode()]
        return [BOS, *ids] if add_special_tokens and self.adds_bos else ids

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id) or bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in shown).decode("utf-8", "replace")


def position(token_id: int, count: int) -> PositionLogprobs:
    """The chosen token with -0.25, then the next ids with -0.25, -0.5 …"""

    def one(index: int) -> TokenLogprob:
        token = (token_id + index) % 256
        data = bytes([token])
        return TokenLogprob(
            token, -0.25 * (index + 1), index + 1, data.decode("utf-8", "replace"), data
        )

    return PositionLogprobs(one(0), [one(index) for index in range(count)])


class FakeLLM:
    """Attributes may be changed by a test before it sends requests."""

    max_model_len = 512
    vocab_size = 260

    def __init__(self, *, adds_bos: bool = True, has_template: bool = True) -> None:
        self.tokenizer = FakeTokenizer(adds_bos=adds_bos)
        self.chat_template = SimpleNamespace() if has_template else None
        self.defaults = GenerationDefaults(bos_token_id=BOS, eos_token_ids=(EOS,))
        self.source = SimpleNamespace(path=Path("fake"), generation=self.defaults)
        self.is_ready = True
        self.dead_error: EngineDeadError | None = None
        self.tokens_per_step = 1
        self.cached_tokens = 0
        self.step_s = 0.0
        self.hold_after: int | None = None  # outputs after which a request waits to be aborted
        self.fail_after: int | None = None  # outputs after which the engine is dead
        self.requests: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.holding = threading.Semaphore(0)  # released by each request that begins to wait
        self.aborted = threading.Semaphore(0)  # released by each request closed before its end
        self.num_running = 0
        self.rendered: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.sleep_phase: str | None = None
        self.slept: list[tuple[object, object]] = []  # level and mode of every sleep
        self.control_error: Exception | None = None  # what waking up and profiling fail with
        self.resets = [True, True]  # what its two engines say of a reset

    async def encode(
        self, text: str, *, most_tokens: int | None = None, **options: Any
    ) -> list[int]:
        return self.tokenizer.encode(text, **options)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        template: ChatTemplate | None,
        add_special_tokens: bool,
        **options: Any,
    ) -> list[int]:
        if template is not None:
            text = template.render(messages, **options)
        else:
            text = self._render(messages, options)
        return self.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, allow_special=True
        )

    def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        self.rendered.append((messages, options))
        if messages[0]["role"] == "system":
            raise InvalidRequestError("System role not supported", param="messages")
        text = "<bos>" + "".join(f"{m['role']}:{m.get('content')}\n" for m in messages)
        return text + ("assistant:" if options["add_generation_prompt"] else "")

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        params.verify()
        params.verify_for_model(self.vocab_size)
        if self.dead_error is not None:
            raise self.dead_error
        self.requests.append((prompt, params, {"request_id": request_id, **options}))
        timeline = options["timeline"]
        timeline.submitted = timeline.received + 1.0
        timeline.num_prompt_tokens = len(prompt)
        timeline.choices = [ChoiceTimeline(choice) for choice in range(params.n)]
        self.num_running += 1
        ended = False
        try:
            async for item in self._outputs(prompt, params, request_id):
                ended = item.finished
                for choice in timeline.choices:
                    choice.queued = choice.scheduled = choice.first_token = timeline.submitted
                    choice.first_token_received = choice.last_token = timeline.received + 2.0
                    choice.num_output_tokens = item.num_generated_tokens // params.n
                    choice.finished = timeline.received + 3.0 if ended else 0.0
                    choice.finish_reason = "length" if ended else None
                yield item
        except EngineDeadError:
            ended = True
            raise
        finally:
            self.num_running -= 1
            if not ended:
                self.aborted.release()

    async def _outputs(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        script = [
            list((SCRIPT[choice:] + SCRIPT * (params.max_tokens or 0)).encode())[
                : params.max_tokens
            ]
            for choice in range(params.n)
        ]
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in script]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(position(i, params.prompt_logprobs) for i in prompt[1:])]
        is_delta = params.output_kind is RequestOutputKind.DELTA
        step = self.tokens_per_step if is_delta else max(1, len(script[0]))
        for number, start in enumerate(range(0, max(1, len(script[0])), step)):
            await self._pause(number)
            end = start + step
            last = end >= len(script[0])
            yield RequestOutput(
                request_id,
                None,
                prompt,
                [
                    CompletionOutput(
                        choice,
                        decoders[choice].decode(bytes(ids[start:end]), last),
                        ids[start:end],
                        "length" if last else None,
                        None,
                        [position(i, params.logprobs) for i in ids[start:end]]
                        if params.logprobs is not None
                        else None,
                    )
                    for choice, ids in enumerate(script)
                ],
                last,
                self.cached_tokens,
                params.n * min(end, len(script[0])),
                prompt_logprobs if start == 0 else None,
            )

    async def _pause(self, number: int) -> None:
        if self.step_s:
            await asyncio.sleep(self.step_s)
        if number == self.hold_after:
            self.holding.release()
            await asyncio.get_running_loop().create_future()
        if number == self.fail_after:
            self.dead_error = EngineDeadError("engine 0 died", cause="/secret/path: boom")
            raise self.dead_error

    async def control(self, operation: object, *, timeout_s: float = 30) -> list[bool]:
        return self.resets if isinstance(operation, ResetPrefixCache) else []

    async def sleep(self, level: Any, mode: Any) -> None:
        operation = Sleep(level, mode)
        self.slept.append((operation.level, operation.mode))
        self.sleep_phase = "sleeping"

    async def wake_up(self) -> None:
        self._fail_if_told()
        self.sleep_phase = None

    async def is_sleeping(self) -> bool:
        return self.sleep_phase == "sleeping"

    async def start_profile(self) -> list[str]:
        self._fail_if_told()
        return ["/profiles/one", "/profiles/two"]

    stop_profile = start_profile

    def _fail_if_told(self) -> None:
        if self.control_error is not None:
            raise self.control_error

    async def shutdown(self) -> None:
        self.is_ready = False
