"""From prompts to engine outputs: what completions and chat completions share.

Owns: tokenised prompts and their limits, the outputs of all prompts of one HTTP request as one
stream, and the token count (usage). Does not know the two response formats.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from trimaran.client.async_llm import AsyncLLM
from trimaran.client.outputs import PositionLogprobs, RequestOutput
from trimaran.errors import InvalidRequestError, RequestFailedError
from trimaran.sampling_params import SamplingParams
from trimaran.server.openai.protocol import GenerationBody
from trimaran.server.request_book import RequestRecord
from trimaran.server.sse import DONE, merge
from trimaran.server.state import ServerState

to_json = msgspec.json.encode


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that fits, and what to do with it."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None  # as the client wrote it


class PromptFitter:
    """Cuts and checks the prompts of one HTTP request against the model's length limit."""

    def __init__(
        self, state: ServerState, llm: AsyncLLM, body: GenerationBody, num_prompts: int
    ) -> None:
        self._limit = llm.max_model_len
        self._tokenizer = llm.tokenizer
        self._vocab_size = llm.vocab_size
        self._truncate = body.truncate_prompt_tokens
        self._default_max_tokens = llm.source.generation.max_new_tokens
        self._num_choices = body.choices_per_prompt * num_prompts
        self._most_choice_tokens = state.config.server.max_total_choice_tokens

    def end_that_counts(self, text: str) -> tuple[str, int]:
        """What truncate_prompt_tokens may leave of a text, and the most tokens to make of it.

        Without it: all, and the model's limit. With it: as many characters as the longest tokens
        could cover, so that whatever is cut here would have been cut from the tokens too.
        """
        if self._truncate is None:
            return text, self._limit
        most_chars = self._limit * self._tokenizer.longest_token_bytes
        return text[-most_chars:], most_chars

    def fit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        text: str | None = None,
        max_tokens_field: str = "max_tokens",
        prompt_field: str = "prompt",
    ) -> PreparedPrompt:
        """Raises InvalidRequestError: empty, out of vocabulary, or too long; with the numbers."""
        token_ids = self._cut(token_ids, params.max_tokens)
        length = len(token_ids)
        if length == 0:
            raise InvalidRequestError("the prompt is empty", param=prompt_field)
        highest = max(token_ids)
        if highest >= self._vocab_size:
            raise InvalidRequestError(
                f"token id {highest} is outside the vocabulary (0 to {self._vocab_size - 1})",
                param=prompt_field,
            )
        room = self._limit - length
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise InvalidRequestError(
                f"the prompt has {length} tokens; the model's limit of {self._limit} tokens holds"
                " prompt and output",
                param=prompt_field,
            )
        max_tokens = self._max_tokens(params.max_tokens, room, length, max_tokens_field)
        return PreparedPrompt(
            token_ids, msgspec.structs.replace(params, max_tokens=max_tokens), text
        )

    def _max_tokens(self, asked: int | None, room: int, length: int, field: str) -> int:
        share = self._most_choice_tokens // self._num_choices
        if asked is None:
            return max(1, min(room, share, self._default_max_tokens or room))
        if asked > room:
            raise InvalidRequestError(
                f"the model's limit is {self._limit} tokens; the prompt has {length} and"
                f" {field} asks for {asked} more",
                param=field,
            )
        if asked > share:
            raise InvalidRequestError(
                f"{self._num_choices} choices of up to {asked} tokens are above the limit of"
                f" {self._most_choice_tokens} tokens in one request (--max-total-choice-tokens)",
                param=field,
            )
        return asked

    def _cut(self, token_ids: list[int], max_tokens: int | None) -> list[int]:
        """The last tokens, if truncate_prompt_tokens says so (-1: as many as fit)."""
        keep = self._truncate
        if keep is None:
            return token_ids
        if keep == -1:
            keep = self._limit - (1 if max_tokens is None else max_tokens)
        return token_ids[-keep:] if keep > 0 else []


class Usage:
    """Token counts over all prompts of one HTTP request, as they grow."""

    def __init__(self) -> None:
        self._prompt = 0
        self._cached = 0
        self._generated: dict[int, int] = {}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        if prompt_index not in self._generated:
            self._prompt += len(output.prompt_token_ids)
            self._cached += output.num_cached_tokens
        self._generated[prompt_index] = output.num_generated_tokens

    def as_dict(self) -> dict[str, Any]:
        generated = sum(self._generated.values())
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": generated,
            "total_tokens": self._prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


class GenerationRun:
    """All prompts of one HTTP request on their way through the engines."""

    def __init__(
        self,
        state: ServerState,
        llm: AsyncLLM,
        body: GenerationBody,
        num_prompts: int,
        record: RequestRecord,
        *,
        continues_prompt: bool = True,
    ) -> None:
        """``continues_prompt``: see ``AsyncLLM.generate``."""
        self.llm = llm
        self.body = body
        self.record = record
        self.usage = Usage()
        self.prompts: list[PreparedPrompt] = []
        # Per prompt; they come once, with its first output.
        self.prompt_logprobs: dict[int, list[PositionLogprobs | None]] = {}
        self._state = state
        self._num_prompts = num_prompts
        self._continues_prompt = continues_prompt

    async def outputs(
        self, prepare: Callable[[PromptFitter], Awaitable[list[PreparedPrompt]]]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) as the engines deliver. Closing it aborts what still runs.

        Raises OverloadedError: no place is free. RequestFailedError: the engine gave up. And
        what ``prepare`` and ``generate`` raise.
        """
        body, request_id = self.body, self.record.request_id
        with self._state.admission.admit(self._num_prompts * body.choices_per_prompt):
            self.prompts = await prepare(
                PromptFitter(self._state, self.llm, body, self._num_prompts)
            )
            timelines = self._state.requests.tokenised(self.record, len(self.prompts))
            streams = [
                self.llm.generate(
                    prompt.token_ids,
                    prompt.params,
                    request_id=request_id if self._num_prompts == 1 else f"{request_id}-{index}",
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt,
                    continues_prompt=self._continues_prompt,
                    timeline=timelines[index],
                )
                for index, prompt in enumerate(self.prompts)
            ]
            async with aclosing(merge(streams)) as merged:
                async for index, output in merged:
                    self._note(index, output)
                    yield index, output

    def timeline(self) -> dict[str, Any]:
        """{"timeline": …} where it was asked for."""
        return {"timeline": self.record.timeline.as_dict()} if self.body.timeline else {}

    def _note(self, index: int, output: RequestOutput) -> None:
        self.usage.add(index, output)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[index] = output.prompt_logprobs
        for completion in output.outputs:
            if completion.finish_reason in ("abort", "error"):
                raise RequestFailedError("the server ended the request before it was complete")


class ChunkWriter:
    """Events of one stream: everything that does not change is encoded once."""

    def __init__(self, head: dict[str, Any], run: GenerationRun) -> None:
        self._open = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._run = run
        self._continuous = run.body.continuous_usage
        self._close = b'],"usage":null}\n\n' if run.body.include_usage else b"]}\n\n"

    @property
    def continuous(self) -> bool:
        """Whether every output is an event, be its text empty, because its usage is news."""
        return self._continuous

    def chunk(self, choice: bytes) -> bytes:
        """An event with one choice, given as JSON."""
        if self._continuous:
            return self._open + choice + self._with_usage()
        return self._open + choice + self._close

    def end(self) -> bytes:
        """Usage and timeline where they were asked for, and the end of the stream."""
        news = self._run.timeline()
        if self._run.body.include_usage:
            news["usage"] = self._run.usage.as_dict()
        last = self._open + b"]," + to_json(news)[1:] + b"\n\n" if news else b""
        return last + DONE

    def _with_usage(self) -> bytes:
        return b'],"usage":' + to_json(self._run.usage.as_dict()) + b"}\n\n"
