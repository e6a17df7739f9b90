"""POST /v1/completions.

Owns: the text_completion format, streamed and whole, with echo and legacy log-probabilities.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trimaran.client.outputs import CompletionOutput, PositionLogprobs
from trimaran.server.limits import read_json
from trimaran.server.openai.generation import (
    ChunkWriter,
    GenerationRun,
    PreparedPrompt,
    PromptFitter,
    to_json,
)
from trimaran.server.openai.logprobs import LegacyLogprobs, prompt_logprobs
from trimaran.server.openai.protocol import CompletionRequest
from trimaran.server.sse import EventStream, cancelled_when_gone
from trimaran.server.state import ServerState


class OpenAIServingCompletion:
    """The route."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def create_completion(self, request: Request) -> Response:
        """Complete one or several prompts, each with n choices."""
        state = self._state
        record = state.requests.track(request)
        llm = state.serving_llm()
        body = await read_json(request, CompletionRequest, state.config.server.max_request_bytes)
        model = state.check_model(body.model)
        body.check(scheduling_policy=state.config.scheduler.scheduling_policy)
        run = GenerationRun(state, llm, body, len(body.prompts()), record)
        completion = _Completion(run, body, model)
        if body.stream:
            return EventStream(completion.events())
        async with cancelled_when_gone(request.receive):
            return Response(await completion.whole(), media_type="application/json")


class _Completion:
    """One HTTP request on its way."""

    def __init__(self, run: GenerationRun, body: CompletionRequest, model: str) -> None:
        self._run = run
        self._body = body
        self._head = {
            "id": f"cmpl-{run.record.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._choices: dict[tuple[int, int], _Choice] = {}

    async def whole(self) -> bytes:
        """The answer, choices in order of prompts, then of n."""
        choices = []
        async with aclosing(self._run.outputs(self._prepare)) as outputs:
            async for prompt_index, output in outputs:
                choices += [
                    self._choice(prompt_index, completion.index).whole(completion)
                    for completion in output.outputs
                ]
        choices.sort(key=lambda choice: int(choice["index"]))
        usage = self._run.usage.as_dict()
        return to_json({**self._head, "choices": choices, "usage": usage, **self._run.timeline()})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One item per engine step that has something to show."""
        writer = ChunkWriter(self._head, self._run)
        async with aclosing(self._run.outputs(self._prepare)) as outputs:
            async for prompt_index, output in outputs:
                chunks = [
                    writer.chunk(part)
                    for completion in output.outputs
                    if (
                        part := self._choice(prompt_index, completion.index).delta(
                            completion, even_if_empty=writer.continuous
                        )
                    )
                ]
                if chunks:
                    yield b"".join(chunks)
        yield writer.end()

    def _choice(self, prompt_index: int, index: int) -> "_Choice":
        choice = self._choices.get((prompt_index, index))
        if choice is None:
            choice = _Choice(self._run, self._body, prompt_index, index)
            self._choices[prompt_index, index] = choice
        return choice

    async def _prepare(self, fitter: PromptFitter) -> list[PreparedPrompt]:
        body, llm = self._body, self._run.llm
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        params = body.sampling_params(
            llm.source.generation,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        prepared = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                end, most_tokens = fitter.end_that_counts(prompt)
                token_ids = await llm.encode(
                    end,
                    most_tokens=most_tokens,
                    add_special_tokens=body.add_special_tokens is not False,
                    allow_special=bool(body.allow_special_tokens),
                )
                prepared.append(fitter.fit(token_ids, params, text=prompt))
            else:
                prepared.append(fitter.fit(prompt, params))
        return prepared


class _Choice:
    """One choice: what was shown of it so far, and its pieces as JSON."""

    def __init__(
        self,
        run: GenerationRun,
        body: CompletionRequest,
        prompt_index: int,
        index: int,
    ) -> None:
        self._run = run
        self._body = body
        self._prompt_index = prompt_index
        self._prompt = run.prompts[prompt_index]
        self._index = prompt_index * body.choices_per_prompt + index
        self._is_first = True
        self._logprobs: LegacyLogprobs | None = None
        # With neither of these, most pieces are a text between constant bytes.
        self._is_plain = body.logprobs is None and not body.return_token_ids
        self._open = b'{"index":%d,"text":' % self._index

    def delta(self, completion: CompletionOutput, *, even_if_empty: bool) -> bytes:
        """What is new, as JSON; empty if there is nothing to show."""
        if self._is_plain and completion.finish_reason is None and not self._is_first:
            if not completion.text and not even_if_empty:
                return b""
            text = to_json(completion.text)
            return self._open + text + b',"logprobs":null,"finish_reason":null}'
        is_first = self._is_first
        piece = self._piece(completion)
        has_news = piece["text"] or piece["finish_reason"] or not self._is_plain
        if not has_news and not even_if_empty:
            return b""
        if is_first and self._body.return_token_ids:
            piece["prompt_token_ids"] = self._prompt.token_ids
        return to_json(piece)

    def whole(self, completion: CompletionOutput) -> dict[str, Any]:
        piece = self._piece(completion)
        if self._body.return_token_ids:
            piece["prompt_token_ids"] = self._prompt.token_ids
        if self._body.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_logprobs(self._prompt_positions())
        return piece

    def _piece(self, completion: CompletionOutput) -> dict[str, Any]:
        text, token_ids = completion.text, completion.token_ids
        positions: list[PositionLogprobs | None] = [*(completion.logprobs or ())]
        piece: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            piece["token_ids"] = token_ids
        echoes = bool(self._body.echo) and self._is_first
        if echoes:
            piece["text"] = self._echoed_text() + text
        if self._body.logprobs is not None:
            if echoes:
                token_ids = self._prompt.token_ids + token_ids
                positions = self._prompt_positions() + positions
            piece["logprobs"] = self._legacy_logprobs().entries(token_ids, positions)
        self._is_first = False
        return piece

    def _echoed_text(self) -> str:
        if self._prompt.text is not None and self._body.truncate_prompt_tokens is None:
            return self._prompt.text
        return self._run.llm.tokenizer.decode(
            self._prompt.token_ids, skip_special_tokens=self._skips_special
        )

    def _prompt_positions(self) -> list[PositionLogprobs | None]:
        return self._run.prompt_logprobs[self._prompt_index]

    @property
    def _skips_special(self) -> bool:
        return self._body.skip_special_tokens is not False

    def _legacy_logprobs(self) -> LegacyLogprobs:
        if self._logprobs is None:
            self._logprobs = LegacyLogprobs(
                self._run.llm.tokenizer,
                num_top=self._body.logprobs or 0,
                skip_special_tokens=self._skips_special,
            )
            if self._body.echo:
                self._logprobs.align(self._prompt.token_ids, self._echoed_text())
        return self._logprobs
