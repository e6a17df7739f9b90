"""Request bodies: types, bounds, and which fields are refused rather than ignored.

Owns: the pydantic models. Ranges of sampling fields have one home, ``SamplingParams.verify``; here
are the types (strict: no "0.5" for a number, no NaN) and the sizes. Absent and null mean the same.
docs/api.md lists every field.
"""

from typing import Annotated, Any, NotRequired

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from trimaran.errors import InvalidRequestError
from trimaran.formats.architecture import GenerationDefaults
from trimaran.sampling_params import (
    MAX_LIST_ITEMS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    RequestOutputKind,
    SamplingParams,
)

MAX_PROMPTS = 2048
MAX_PROMPT_TOKENS = 1 << 22
MAX_MESSAGES = 16384
MAX_TOKEN_ID = (1 << 31) - 1
MAX_TOOLS = 512
MAX_TEMPLATE_CHARS = 1 << 18
MAX_NAME_CHARS = 512

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]


def _prompt_kind(value: Any) -> str:
    """Which form of prompt this is, by its first element, so that errors name one form only."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    if isinstance(first, list):
        return "<token batch>"
    return "<token ids>" if isinstance(first, int | float) else "<texts>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenIds, Tag("<token ids>")]
    | Annotated[
        list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")
    ]
    | Annotated[
        list[TokenIds],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
        Tag("<token batch>"),
    ],
    Discriminator(_prompt_kind),
]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(BaseModel):
    """Base of all bodies. Unknown fields are kept apart (``model_extra``) and only logged."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Name | None = None


# A field that has a meaning which is not served -> its values that ask for nothing. Anything else
# is refused: to ignore it would answer another question than the one asked.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


class GenerationBody(RequestBody):
    """What completions and chat completions have in common."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=MAX_LIST_ITEMS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[int, float], Field(max_length=MAX_LIST_ITEMS)] | None = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=1 << 20)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=MAX_TOKEN_ID)] | None = None
    cache_salt: CacheSalt | None = None
    return_token_ids: bool | None = None
    timeline: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def check(self, *, scheduling_policy: str) -> None:
        """What types cannot say. Raises InvalidRequestError naming the field."""
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value is not None and value not in _REFUSED[name]:
                raise InvalidRequestError(f"{name} is not supported by this server", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs are not given in a stream", param="prompt_logprobs"
            )
        if self.priority and scheduling_policy != "priority":
            raise InvalidRequestError(
                "priority needs a server started with --scheduling-policy priority",
                param="priority",
            )

    def sampling_params(
        self,
        defaults: GenerationDefaults,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Checked sampling parameters; the model's own defaults stand in for absent fields.

        Raises InvalidRequestError naming the field.
        """
        given: dict[str, Any] = {
            name: defaults.sampling[name] for name in _DEFAULTED if name in defaults.sampling
        }
        for name in _PLAIN:
            if (value := getattr(self, name)) is not None:
                given[name] = value
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
            if (value := getattr(self, name)) is not None:
                given[name] = tuple(value)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            output_kind=kind,
        )
        params.verify()
        return params


# Fields that generation_config.json may set, as other servers understand it.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields that pass to SamplingParams under their own name and type.
_PLAIN = (
    *_DEFAULTED,
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "skip_special_tokens",
)


class CompletionRequest(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    allow_special_tokens: bool | None = None

    def check(self, *, scheduling_policy: str) -> None:
        super().check(scheduling_policy=scheduling_policy)
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise InvalidRequestError("best_of must equal n", param="best_of")

    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts, texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class ChatMessage(TypedDict):
    """One message, handed to text/chat_template with whatever else it holds (tool calls, names …).

    What parts a content may have is checked there.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: NotRequired[str | list[dict[str, Any]] | None]


class ConversationBody(RequestBody):
    """What is rendered by the chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None

    def render_options(self) -> dict[str, Any]:
        """Keyword arguments for ``encode_chat``.

        Raises InvalidRequestError: the two ways to end a prompt exclude each other.
        """
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        return {
            "tools": self.tools or None,
            "add_generation_prompt": not continues and self.add_generation_prompt is not False,
            "continue_final_message": continues,
            "template_kwargs": self.chat_template_kwargs,
        }


class ChatCompletionRequest(ConversationBody, GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: Any = None

    def check(self, *, scheduling_policy: str) -> None:
        super().check(scheduling_policy=scheduling_policy)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        choice = self.tool_choice
        if choice not in (None, "none", "auto") or (self.tools and choice != "none"):
            raise InvalidRequestError(
                "tool calls are not parsed yet: with tools, tool_choice must be 'none'",
                param="tool_choice",
            )


class TokenizeRequest(ConversationBody):
    """POST /tokenize, for a text or for a conversation"""

    prompt: str | None = None
    add_special_tokens: bool | None = None  # default: for a text; a template writes its own
    allow_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequestError: neither or both forms were given."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")


class DetokenizeRequest(RequestBody):
    """POST /detokenize"""

    tokens: TokenIds
