"""From engine outputs to what a user reads: detokenising, stop strings, logprobs, merging.

Owns: the state of every unfinished request on the front end's side (its tokens received so far are
what a replay will need). Knows nothing of sockets, asyncio or HTTP: ``AsyncLLM`` and ``LLMEngine``
feed it engine messages and take ``RequestOutput`` items from the streams. A consumer that does not
take costs others nothing: what it has not taken is merged into one item.
"""

import logging
import math
from collections.abc import Callable
from typing import Protocol

from trimaran.client.outputs import (
    ChoiceTimeline,
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    RequestTimeline,
    TokenLogprob,
)
from trimaran.clock import SYSTEM_CLOCK, Clock
from trimaran.errors import ProtocolError, RequestFailedError, TrimaranError
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
)
from trimaran.sampling_params import RequestOutputKind, SamplingParams
from trimaran.text.detokenizer import IncrementalDetokenizer
from trimaran.text.stop import StopChecker
from trimaran.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Metrics(Protocol):
    """What the processor reports; ``metrics.recorder.MetricsRecorder`` is one."""

    def on_scheduler_stats(self, rank: int, stats: SchedulerStats) -> None: ...
    def on_first_token(self, seconds: float) -> None: ...
    def on_tokens(self, count: int, interval_s: float) -> None: ...
    def on_finished(
        self, reason: str, prompt_tokens: int, generation_tokens: int, e2e_s: float, queue_s: float
    ) -> None: ...


class _Choice:
    """One sequence of a request: its tokens, and the text they have become."""

    __slots__ = (
        "detokenizer", "finish_reason", "index", "logprobs", "parts", "request", "stop",
        "stop_reason", "stream", "taken_logprobs", "taken_parts", "taken_tokens", "timeline",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self, stream: "RequestStream", request: EngineCoreRequest, tokenizer: Tokenizer
    ) -> None:
        params = stream.params
        self.stream = stream
        self.request = request
        self.index = request.choice_index
        self.timeline = ChoiceTimeline(request.choice_index)
        self.token_ids: list[int] = []
        self.parts: list[str] = []
        self.logprobs: list[PositionLogprobs] = []
        self.taken_tokens = self.taken_parts = self.taken_logprobs = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.detokenizer: IncrementalDetokenizer | None = None
        self.stop: StopChecker | None = None
        if params.detokenize:
            # A completion reads on from its prompt; an answer in a chat is a text of its own.
            # Placeholders of embeddings have no text.
            continues = stream.continues_prompt and request.prompt_embeds is None
            before = request.prompt_token_ids if continues else ()
            self.detokenizer = IncrementalDetokenizer(
                tokenizer, before, skip_special_tokens=params.skip_special_tokens
            )
        if params.stop:
            self.stop = StopChecker(params.stop, include_stop=params.include_stop_str_in_output)
        if prior := request.prior_output_ids:
            # Its consumer has them: the text and what stop strings look at go on from there.
            self._push(prior, len(prior))
            self.taken_tokens, self.taken_parts = len(self.token_ids), len(self.parts)

    def receive(self, output: EngineCoreOutput, tokenizer: Tokenizer) -> bool:
        """Take in new tokens; True if a stop string ended the choice before the engine did."""
        params = self.stream.params
        if self.finish_reason is not None:
            return True  # by a stop string in what came before it was resumed
        # A resend starts at an index already received: what is known is dropped, never doubled.
        known = len(self.token_ids) - output.first_index
        if known < 0:
            raise RequestFailedError(
                f"tokens {len(self.token_ids)} to {output.first_index - 1} of a request were lost"
            )
        new_ids = output.new_token_ids[known:] if known else output.new_token_ids
        num_text_ids = len(new_ids)
        if (
            output.finish_reason is FinishReason.STOP
            and new_ids
            and not params.include_stop_str_in_output
        ):
            num_text_ids -= 1  # the token that ended it is no part of the text
        stopped = self._push(new_ids, num_text_ids)
        self._add_logprobs(output.logprobs, known, tokenizer)
        if stopped:
            return output.finish_reason is None
        if output.finish_reason is not None:
            self._finish(str(output.finish_reason), output.stop_reason)
        return False

    def _emit(self, text: str) -> None:
        if text:
            self.parts.append(text)

    def _push(self, new_ids: list[int], num_text_ids: int) -> bool:
        """True if a stop string ended the choice."""
        exempt = len(new_ids)
        if self.stop is not None:  # not looked for before min_tokens
            exempt = max(0, self.stream.params.min_tokens - len(self.token_ids))
        head = new_ids[:exempt]
        self.token_ids += head
        if self.detokenizer is not None and (text_ids := head[:num_text_ids]):
            self._emit(self.detokenizer.push(text_ids))
        return exempt < len(new_ids) and self._push_until_stop(
            new_ids[exempt:], num_text_ids - exempt
        )

    def _push_until_stop(self, new_ids: list[int], num_text_ids: int) -> bool:
        # Token by token, so that nothing after a stop string is counted or returned.
        assert self.stop is not None
        assert self.detokenizer is not None
        for position, token_id in enumerate(new_ids):
            self.token_ids.append(token_id)
            if position >= num_text_ids:
                break
            text, matched = self.stop.push(self.detokenizer.push([token_id]))
            self._emit(text)
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched
                return True
        return False

    def _finish(self, reason: str, stop_reason: int | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.detokenizer is None:
            return
        tail = self.detokenizer.finish()
        if self.stop is not None:
            text, matched = self.stop.push(tail)
            self._emit(text)
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched
                return
            tail = self.stop.flush()
        self._emit(tail)

    def _add_logprobs(
        self, columns: TokenLogprobs | None, known: int, tokenizer: Tokenizer
    ) -> None:
        if columns is not None:
            self.logprobs += position_logprobs(columns, tokenizer)[known:]
            del self.logprobs[len(self.token_ids) :]

    def output(self, kind: RequestOutputKind) -> CompletionOutput | None:
        """What this choice adds to the next item; None if it has no news."""
        if kind is not RequestOutputKind.DELTA:
            token_ids, text, logprobs = list(self.token_ids), "".join(self.parts), self.logprobs[:]
        else:
            if self.taken_tokens == len(self.token_ids) and self.finish_reason is None:
                return None
            if self.taken_tokens < 0:  # its last item has been handed over
                return None
            token_ids = self.token_ids[self.taken_tokens :]
            text = "".join(self.parts[self.taken_parts :])
            logprobs = self.logprobs[self.taken_logprobs :]
            self.taken_tokens = -1 if self.finish_reason is not None else len(self.token_ids)
            self.taken_parts, self.taken_logprobs = len(self.parts), len(self.logprobs)
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.finish_reason,
            self.stop_reason,
            logprobs if self.stream.params.logprobs is not None else None,
        )


class RequestStream:
    """All choices of one user request, and the items its consumer has not taken yet."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: list[EngineCoreRequest],
        params: SamplingParams,
        on_news: Callable[[], None],
        *,
        continues_prompt: bool = True,
        timeline: RequestTimeline | None = None,
    ) -> None:
        """``on_news`` is called when ``take`` may have something. ``timeline``: as begun."""
        self.continues_prompt = continues_prompt
        self.request_id = request_id
        self.prompt = prompt
        self.requests = requests
        self.params = params
        self.choices: list[_Choice] = []
        self.error: Exception | None = None
        self.timeline = timeline or RequestTimeline(requests[0].arrival_time)
        self.timeline.num_prompt_tokens = len(requests[0].prompt_token_ids)
        self.num_unfinished = len(requests)
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._on_news = on_news

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def notify(self) -> None:
        if self.params.output_kind is not RequestOutputKind.FINAL_ONLY or self.finished:
            self._on_news()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which the consumer raises after what came before it."""
        if self.error is None:
            self.error = error
        self._on_news()

    def take(self) -> RequestOutput | None:
        """The next item, or None if there is no news.

        Raises what the stream failed with.
        """
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            if self.error is not None:
                raise self.error
            return None
        outputs = [o for choice in self.choices if (o := choice.output(kind)) is not None]
        if not outputs:
            if self.error is not None:
                raise self.error
            return None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.requests[0].prompt_token_ids,
            outputs,
            self.finished,
            self.timeline.num_cached_tokens,
            sum([len(choice.token_ids) for choice in self.choices]),
            prompt_logprobs,
            self.timeline,
        )

    def set_prompt_logprobs(self, columns: TokenLogprobs, tokenizer: Tokenizer) -> None:
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None, *position_logprobs(columns, tokenizer)]


class OutputProcessor:
    """Routes engine outputs to request streams."""

    def __init__(
        self, tokenizer: Tokenizer, *, metrics: Metrics | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._choices: dict[str, _Choice] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._choices)

    def add(self, stream: RequestStream) -> None:
        """Register before the requests are submitted, so that no output finds nobody."""
        stream.choices = [_Choice(stream, r, self._tokenizer) for r in stream.requests]
        stream.timeline.choices = [choice.timeline for choice in stream.choices]
        for choice in stream.choices:
            self._choices[choice.request.request_id] = choice

    def remove(self, stream: RequestStream) -> list[str]:
        """Forget a stream whose consumer left; the internal ids the engine must abort."""
        return self._end_early(stream, "abort")

    def fail_all(self, error: TrimaranError) -> None:
        """The engine is gone: every unfinished stream ends with its error."""
        streams = {id(choice.stream): choice.stream for choice in self._choices.values()}
        for stream in streams.values():
            self._end_early(stream, "error")
            stream.fail(error.again())  # raised in as many tasks as there are streams

    def _end_early(self, stream: RequestStream, reason: str) -> list[str]:
        now = self._clock.wall()
        gone = []
        for choice in stream.choices:
            if self._choices.pop(choice.request.request_id, None) is not None:
                choice.timeline.finished, choice.timeline.finish_reason = now, reason
                gone.append(choice.request.request_id)
        if gone:
            self._report_finished(stream, reason)
        return gone

    def process(self, message: EngineCoreOutputs) -> list[str]:
        """Take in one engine message; the internal ids to abort (ended by a stop string)."""
        to_abort: list[str] = []
        now = self._clock.wall()
        if message.stats is not None and self._metrics is not None:
            self._metrics.on_scheduler_stats(message.rank, message.stats)
        for output in message.outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue  # aborted or failed here, and the engine had not heard of it yet
            try:
                if output.finish_reason is FinishReason.ERROR:
                    raise RequestFailedError(output.error or "the request failed in the engine")
                self._process_one(choice, output, now, to_abort)
            except TrimaranError as error:
                to_abort += self._end_early(choice.stream, "error")
                choice.stream.fail(error)
        return to_abort

    def _process_one(
        self, choice: _Choice, output: EngineCoreOutput, now: float, to_abort: list[str]
    ) -> None:
        stream = choice.stream
        _verify(output)
        self._mark(choice, output, now)
        if output.prompt_logprobs is not None:
            stream.set_prompt_logprobs(output.prompt_logprobs, self._tokenizer)
        if choice.receive(output, self._tokenizer):
            to_abort.append(output.request_id)
        timeline = choice.timeline
        timeline.num_output_tokens = len(choice.token_ids)
        if choice.finish_reason is not None:
            timeline.finished, timeline.finish_reason = now, choice.finish_reason
            del self._choices[output.request_id]
            stream.num_unfinished -= 1
            if stream.finished:
                self._report_finished(stream, choice.finish_reason)
        stream.notify()

    def _mark(self, choice: _Choice, output: EngineCoreOutput, now: float) -> None:
        """Keep the timeline; what the metrics are told is read from it."""
        whole, timeline = choice.stream.timeline, choice.timeline
        if output.scheduled_at:
            if not timeline.scheduled:
                if not whole.scheduled:
                    whole.num_cached_tokens = output.num_cached_tokens
                timeline.queued, timeline.scheduled = output.queued_at, output.scheduled_at
                timeline.num_cached_tokens = output.num_cached_tokens
            timeline.first_token = timeline.first_token or output.first_token_at
            timeline.num_preemptions = output.num_preemptions
        count = len(output.new_token_ids)
        if not count:
            return
        before = timeline.last_token
        if not timeline.first_token_received:
            # The request's first token is one choice's; the others' first come after it.
            before = whole.first_token_received
            timeline.first_token_received = now
        timeline.last_token = now
        if self._metrics is None:
            return
        if not before:
            self._metrics.on_first_token(whole.first_token_received - whole.received)
            before = now
            count -= 1
        if count:
            self._metrics.on_tokens(count, now - before)

    def _report_finished(self, stream: RequestStream, reason: str) -> None:
        if self._metrics is None:
            return
        timeline = stream.timeline
        self._metrics.on_finished(
            reason,
            timeline.num_prompt_tokens,
            timeline.num_output_tokens,
            timeline.finished - timeline.received,
            timeline.scheduled - timeline.received if timeline.scheduled else 0.0,
        )


def _verify(output: EngineCoreOutput) -> None:
    """Raise ProtocolError: no engine of ours sends this."""
    count = len(output.new_token_ids)
    if output.first_index < 0:
        raise ProtocolError(f"outputs from the token with the index {output.first_index}")
    for columns in (output.logprobs, output.prompt_logprobs):
        if columns is None:
            continue
        sizes = {len(columns.token_ids), len(columns.logprobs), len(columns.ranks)}
        if len(sizes) > 1 or (columns is output.logprobs and sizes != {count}):
            raise ProtocolError(f"log-probabilities of {sorted(sizes)} tokens for {count}")
        for ids, values in zip(columns.token_ids, columns.logprobs, strict=True):
            if not ids or len(ids) != len(values) or any(map(math.isnan, values)):
                raise ProtocolError("log-probabilities that are not numbers, one a token")


def position_logprobs(columns: TokenLogprobs, tokenizer: Tokenizer) -> list[PositionLogprobs]:
    """Columns of ids and numbers -> one entry per position with texts and bytes.

    A row is the chosen token followed by the k most likely, so candidate j >= 1 has rank j.
    """
    positions = []
    for ids, values, rank in zip(columns.token_ids, columns.logprobs, columns.ranks, strict=True):
        candidates = [
            TokenLogprob(
                token_id,
                value,
                rank if place == 0 else place,
                tokenizer.token_text(token_id),
                tokenizer.token_bytes(token_id),
            )
            for place, (token_id, value) in enumerate(zip(ids, values, strict=True))
        ]
        positions.append(PositionLogprobs(candidates[0], candidates[1:]))
    return positions
