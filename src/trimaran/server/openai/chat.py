"""POST /v1/chat/completions.

Owns: the chat.completion format, streamed and whole. The conversation becomes a prompt in
text/chat_template, off the event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trimaran.client.async_llm import AsyncLLM
from trimaran.client.outputs import CompletionOutput
from trimaran.errors import InvalidRequestError
from trimaran.server.limits import read_json
from trimaran.server.openai.generation import (
    ChunkWriter,
    GenerationRun,
    PreparedPrompt,
    PromptFitter,
    to_json,
)
from trimaran.server.openai.logprobs import chat_logprobs, prompt_logprobs
from trimaran.server.openai.protocol import ChatCompletionRequest, ConversationBody
from trimaran.server.sse import EventStream, cancelled_when_gone
from trimaran.server.state import ServerState
from trimaran.text.chat_template import ChatTemplate


async def encode(
    state: ServerState, llm: AsyncLLM, body: ConversationBody, *, add_special_tokens: bool
) -> list[int]:
    """The conversation as the model's template writes it, or the request's own where trusted.

    Raises InvalidRequestError: there is no template, or it refuses these messages.
    """
    messages: list[dict[str, Any]] = [{**message} for message in body.messages or ()]
    options = body.render_options()
    template = None
    if body.chat_template is not None:
        if not state.config.server.trust_request_chat_template:
            raise InvalidRequestError(
                "chat_template is not accepted in requests",
                param="chat_template",
                hint="start the server with --trust-request-chat-template",
            )
        tokenizer = llm.tokenizer
        bos, eos = (
            None if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        template = await asyncio.to_thread(
            ChatTemplate, body.chat_template, bos_token=bos, eos_token=eos
        )
    elif llm.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template",
            param="messages",
            hint="use /v1/completions, or start the server with --chat-template FILE",
        )
    return await llm.encode_chat(
        messages, template=template, add_special_tokens=add_special_tokens, **options
    )


class OpenAIServingChat:
    """The route."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def create_chat_completion(self, request: Request) -> Response:
        """Answer a conversation with n choices."""
        state = self._state
        record = state.requests.track(request)
        llm = state.serving_llm()
        body = await read_json(
            request, ChatCompletionRequest, state.config.server.max_request_bytes
        )
        model = state.check_model(body.model)
        body.check(scheduling_policy=state.config.scheduler.scheduling_policy)
        # An answer is a text of its own, unless it goes on within the last message.
        continues = bool(body.continue_final_message)
        run = GenerationRun(state, llm, body, 1, record, continues_prompt=continues)
        chat = _Chat(state, run, body, model)
        if body.stream:
            return EventStream(chat.events())
        async with cancelled_when_gone(request.receive):
            return Response(await chat.whole(), media_type="application/json")


class _Chat:
    """One HTTP request on its way."""

    def __init__(
        self,
        state: ServerState,
        run: GenerationRun,
        body: ChatCompletionRequest,
        model: str,
    ) -> None:
        self._state = state
        self._run = run
        self._body = body
        self._role = state.config.server.response_role
        self._started: set[int] = set()
        # With neither of these, most pieces are a text between constant bytes.
        self._is_plain = not body.logprobs and not body.return_token_ids
        self._head = {
            "id": f"chatcmpl-{run.record.request_id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> bytes:
        choices: list[dict[str, Any]] = []
        async with aclosing(self._run.outputs(self._prepare)) as outputs:
            async for _, output in outputs:
                choices += [self._choice(completion) for completion in output.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        answer: dict[str, Any] = {
            **self._head,
            "choices": choices,
            "usage": self._run.usage.as_dict(),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._run.prompts[0].token_ids
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._run.prompt_logprobs[0])
        answer.update(self._run.timeline())
        return to_json(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One item per engine step that has something to show."""
        writer = ChunkWriter(self._head, self._run)
        async with aclosing(self._run.outputs(self._prepare)) as outputs:
            async for _, output in outputs:
                chunks = []
                for completion in output.outputs:
                    if completion.index not in self._started:
                        self._started.add(completion.index)
                        chunks.append(writer.chunk(self._opening(completion.index)))
                    if delta := self._delta(completion, even_if_empty=writer.continuous):
                        chunks.append(writer.chunk(delta))
                if chunks:
                    yield b"".join(chunks)
        yield writer.end()

    async def _prepare(self, fitter: PromptFitter) -> list[PreparedPrompt]:
        body, llm = self._body, self._run.llm
        # max_tokens is the older name of the same field.
        newer = body.max_completion_tokens is not None
        params = body.sampling_params(
            llm.source.generation,
            max_tokens=body.max_completion_tokens if newer else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        # The template spells the special tokens itself, the start token among them.
        token_ids = await encode(
            self._state, llm, body, add_special_tokens=bool(body.add_special_tokens)
        )
        prompt = fitter.fit(
            token_ids,
            params,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
            prompt_field="messages",
        )
        return [prompt]

    def _opening(self, index: int) -> bytes:
        opening: dict[str, Any] = {
            "index": index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            opening["prompt_token_ids"] = self._run.prompts[0].token_ids
        return to_json(opening)

    def _delta(self, completion: CompletionOutput, *, even_if_empty: bool) -> bytes:
        """What is new, as JSON; empty if there is nothing to show."""
        if self._is_plain and completion.finish_reason is None:
            if not completion.text and not even_if_empty:
                return b""
            return (
                b'{"index":%d,"delta":{"content":' % completion.index
                + to_json(completion.text)
                + b'},"logprobs":null,"finish_reason":null}'
            )
        piece: dict[str, Any] = {
            "index": completion.index,
            "delta": {"content": completion.text} if completion.text else {},
        }
        return to_json({**piece, **self._details(completion)})

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        message = {"role": self._role, "content": completion.text}
        return {"index": completion.index, "message": message, **self._details(completion)}

    def _details(self, completion: CompletionOutput) -> dict[str, Any]:
        details: dict[str, Any] = {
            "logprobs": chat_logprobs(completion.logprobs or (), self._body.top_logprobs or 0)
            if self._body.logprobs
            else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            details["token_ids"] = completion.token_ids
        return details
