"""LLM: the offline API. Prompts in, results in the same order out.

Owns: nothing but convenience over ``LLMEngine``.
"""

import contextlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, cast

import msgspec

from trimaran.client.llm_engine import LLMEngine
from trimaran.client.outputs import RequestOutput
from trimaran.client.prompt_embeds import Prompt
from trimaran.config import resolve
from trimaran.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    UnavailableError,
)
from trimaran.ids import external_id
from trimaran.sampling_params import RequestOutputKind, SamplingParams
from trimaran.text.chat_encoding import encode_chat

Message = dict[str, Any]


class LLM:
    """``LLM("demo").generate(["Hello"], SamplingParams(max_tokens=16))``

    Keyword arguments are the settings of ``trimaran serve`` (docs/flags.md) in snake_case.
    ``multiprocess=False`` runs the engine in this process.
    """

    def __init__(self, model: str = "demo", *, multiprocess: bool = True, **settings: Any) -> None:
        """Start the engine and wait until it is ready.

        Raises ConfigError, CheckpointError, ChildFailedError: with the first cause.
        """
        config = resolve({"model": model, **settings})
        self._engine = LLMEngine(config.engine, multiprocess=multiprocess)

    @property
    def engine(self) -> LLMEngine:
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, one result each, in order.

        A prompt is a text, token ids, or ``{"prompt_embeds": array [P, hidden_size]}``: float32
        rows that stand instead of the embeddings of P tokens (``client.prompt_embeds``).

        ``sampling_params``: one for all, or one per prompt. ``use_progress``: a progress bar on
        stderr (default: where that is a terminal).
        Raises InvalidRequestError: a prompt or parameter is wrong; nothing is left running.
        Raises ConflictError: the engine sleeps, so that nothing would ever come.
        """
        batch = cast("list[Prompt]", [prompts] if _is_one(prompts) else list(prompts))
        return self._run(batch, sampling_params, use_progress, is_chat=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; the model's chat template is applied.

        Raises InvalidRequestError: the model has no template, or it refused the messages.
        """
        template = self._engine.chat_template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template", hint="give one: LLM(…, chat_template=…)"
            )
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_one else messages)
        prompts: list[Prompt] = [
            encode_chat(self._engine.tokenizer, template, conversation, **template_options)
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_progress, is_chat=True)

    def _run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_progress: bool | None,
        *,
        is_chat: bool,
    ) -> list[RequestOutput]:
        each = _params_per_prompt(params, len(prompts))
        if self._engine.is_sleeping():
            raise ConflictError("the engine sleeps", hint="wake_up() first")
        ids = [external_id("offline") for _ in prompts]
        results: dict[str, RequestOutput] = {}
        show = sys.stderr.isatty() if use_progress is None else use_progress
        try:
            for request_id, prompt, one in zip(ids, prompts, each, strict=True):
                self._engine.add_request(
                    request_id,
                    prompt,
                    one,
                    add_special_tokens=not is_chat,
                    continues_prompt=not is_chat,
                )
            with _Progress(len(prompts), show) as progress:
                while self._engine.has_unfinished_requests():
                    for item in self._engine.step():
                        results[item.request_id] = item
                        progress.advance(item.num_generated_tokens)
        except BaseException:
            # Also Ctrl-C in a notebook: the next call must not meet this one's outputs.
            with contextlib.suppress(EngineDeadError, UnavailableError):  # nothing to abort then
                self._engine.abort_request(ids)
            raise
        return [results[request_id] for request_id in ids]

    def sleep(self, level: Literal[0, 1, 2] = 1, mode: Literal["wait", "abort"] = "abort") -> None:
        """Give back the KV cache (level 1) and the weights (2) until ``wake_up``.

        Level 0 only stops work. Raises InvalidRequestError: no such level or mode.
        """
        self._engine.sleep(level, mode)

    def wake_up(self) -> None:
        """Undo ``sleep``; weights are read from their file again.

        Raises RequestFailedError, with the cause: still asleep, and may be woken again.
        """
        self._engine.wake_up()

    def start_profile(self) -> list[str]:
        """Record what the engine does (needs ``profile_dir``); the files to be written."""
        return self._engine.start_profile()

    def stop_profile(self) -> list[str]:
        """End the recording; its files: Chrome traces, for ui.perfetto.dev."""
        return self._engine.stop_profile()

    def shutdown(self) -> None:
        """End the engine; may be called twice."""
        self._engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str | dict) or (bool(prompts) and type(prompts[0]) is int)


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        each = [params or SamplingParams()] * count
    else:
        each = list(params)
        if len(each) != count:
            raise InvalidRequestError(
                f"{count} prompts but {len(each)} sampling_params", param="sampling_params"
            )
    return [msgspec.structs.replace(p, output_kind=RequestOutputKind.FINAL_ONLY) for p in each]


class _Progress:
    """A bar of finished prompts with tokens per second, or nothing."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar: Any = None
        if show:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._bar = Progress(
                TextColumn("generating"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("generating", total=total, tokens=0)
            self._tokens = 0

    def advance(self, num_tokens: int) -> None:
        if self._bar is not None:
            self._tokens += num_tokens
            self._bar.update(self._task, advance=1, tokens=self._tokens)

    def __enter__(self) -> "_Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
