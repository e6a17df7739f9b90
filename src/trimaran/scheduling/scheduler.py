"""What runs in the next step, and what became of the last one.

Owns: every request from ``add`` to its last token, the token budget, fairness and preemption. Knows
nothing of tensors, processes or text. Called by EngineCore: ``schedule`` makes a plan, an executor
computes it, ``update`` takes the tokens in.

One step's budget goes to, in this order:

1. decodes: every running request that needs one token more;
2. admissions: waiting requests in policy order, as long as their whole prompt finds room;
3. prompts under way, which always keep a share of the budget, at most half, against 2.

No prompt takes more than ``long_prefill_token_threshold`` while others could use the rest, so a
short prompt passes a long one in a step or two and decodes never wait.

Running requests stand in policy order. Who lacks blocks takes them from the last (preemption by
recompute), never from one that is in this step's plan already. Progress is guaranteed: ``add``
refuses what does not fit alone, and whoever is first can always get everything.

``num_computed_tokens`` moves on when a plan is made, so plans may overlap: a request whose token is
still on its way has nothing to schedule. What a plan brings for a request that left the batch after
the plan was made is dropped; sampling being a pure function of the position, nothing is lost.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from trimaran.clock import Clock
from trimaran.config import SchedulerConfig
from trimaran.errors import InvalidRequestError
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from trimaran.scheduling.kv_cache_manager import CachedPrefix, KVCacheManager
from trimaran.scheduling.policy import POLICIES, RequestList
from trimaran.scheduling.request import NEVER, Request, RequestStatus

logger = logging.getLogger(__name__)


class Scheduler:
    """``max_model_len`` is the fitted one: prompt + output of any request."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, *, max_model_len: int, clock: Clock
    ) -> None:
        self._budget = config.max_num_batched_tokens
        # Decodes alone never use up the budget, so prompts under way always get on.
        self._max_num_seqs = min(config.max_num_seqs, self._budget)
        self._long_prefill_tokens = min(
            self._budget, config.long_prefill_token_threshold or max(1, self._budget // 2)
        )
        self._policy = POLICIES[config.scheduling_policy]
        self._has_priorities = config.scheduling_policy == "priority"
        self._kv = kv
        self._max_model_len = max_model_len
        self._clock = clock

        self._requests: dict[str, Request] = {}
        self._waiting = RequestList()
        self._running = RequestList()
        self._left_ids: list[str] = []  # out of the batch since the last plan
        self._sequence = 0
        # The waiting request that found no room, and the room there was: look again when it grows.
        self._blocked: tuple[Request, int] | None = None
        self._step = 0
        self._num_in_flight = 0  # plans made and not yet taken in
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    # ----------------------------------------------------------------------------------- requests

    def add(self, source: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request. Returns its only output where its prior output is all there is.

        Raises InvalidRequestError as ``prepare`` does.
        """
        request = self.prepare(source)
        if (answer := request.answer_at_once()) is None:
            self.enqueue(request)
        return answer

    def prepare(self, source: EngineCoreRequest) -> Request:
        """Check a request, to be queued now or later.

        Raises InvalidRequestError: it can never run here (empty, too long, known already).
        """
        if source.request_id in self._requests:
            raise InvalidRequestError(f"request id {source.request_id} is in use")
        if not source.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        request = Request(source, self._max_model_len, self._clock.wall())
        known = len(request.token_ids)
        wanted = 0 if source.prior_output_ids or source.sampling_params.max_tokens == 0 else 1
        if known + wanted > self._max_model_len:
            raise InvalidRequestError(
                f"the prompt{' with its prior output' if source.prior_output_ids else ''} has"
                f" {known} tokens; prompt and output together may have {self._max_model_len}"
                " (--max-model-len)",
                param="prompt",
            )
        needed = self._kv.peak_blocks(request.num_kv_tokens)
        usable = self._kv.pool.num_blocks - 1
        if needed > usable:
            raise InvalidRequestError(
                f"the request cannot ever fit: {request.prompt_len} prompt and up to"
                f" {request.max_total_tokens - request.prompt_len} output tokens need {needed} KV"
                f" blocks of {self._kv.block_size} tokens, and there are {usable}",
                param="max_tokens",
                hint="ask for fewer tokens, or start with more --kv-cache-memory-bytes",
            )
        return request

    def enqueue(self, request: Request) -> None:
        """Queue what ``prepare`` returned."""
        self._sequence += 1
        request.order = self._policy(request, self._sequence)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests in whatever state; unknown and finished ones are no matter."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
            queue.remove(request)
            self._end(request, FinishReason.ABORT)

    def end_all(self) -> dict[int, list[EngineCoreOutput]]:
        """Abort every request; returns a last output for each, by client index."""
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        for request in self._requests.values():
            index = len(request.token_ids) - request.prompt_len
            outputs[request.source.client_index].append(
                EngineCoreOutput(request.request_id, index, [], FinishReason.ABORT)
            )
        self.abort(list(self._requests))
        return outputs

    def has_work(self) -> bool:
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Whether the cache was emptied (not while any request holds blocks)."""
        return self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            step=self._step,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self._kv.usage,
            prefix_cache_queries=self._kv.num_prefix_queries,
            prefix_cache_hits=self._kv.num_prefix_hits,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
        )

    # ----------------------------------------------------------------------------------- schedule

    def schedule(self) -> SchedulerOutput:
        """The next plan; empty only without work (or while all of it is in flight)."""
        self._step += 1
        self._num_in_flight += 1
        plan = SchedulerOutput(
            step=self._step,
            left_request_ids=self._left_ids,  # preemptions below are still added to it
            new_requests=[],
            request_ids=[],
            num_computed_tokens=[],
            num_scheduled_tokens=[],
            new_block_ids=[],
            total_num_scheduled_tokens=0,
        )
        if self._has_priorities and self._waiting.items:
            self._make_room_for_urgent()
        prefills = self._schedule_decodes(plan)
        budget = self._budget - len(plan.request_ids)
        if self._waiting.items:
            budget = self._admit(plan, prefills, budget)
        if prefills:
            self._schedule_prefills(plan, prefills, budget)
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens)
        self._left_ids = []
        assert plan.request_ids or self._num_in_flight > 1 or not self._requests, (
            f"no progress: {self.stats()}"
        )
        return plan

    def _schedule_decodes(self, plan: SchedulerOutput) -> list[Request]:
        """Plan one token for each running request that lacks one; return those that lack more."""
        prefills = []
        step_ids, step_computed = plan.request_ids, plan.num_computed_tokens
        step_blocks = plan.new_block_ids
        running = self._running.items
        # Preemption pops from the end of this list; iteration then just ends sooner.
        for request in running:
            position = request.num_computed_tokens
            missing = len(request.token_ids) - position
            if missing != 1 or position < request.prompt_len:
                if missing:
                    prefills.append(request)
                continue
            if position < request.num_slots:
                step_blocks.append(None)
            else:
                blocks = self._kv.try_allocate(request, 1)
                while blocks is None and self._preempt(running.pop()) is not request:
                    blocks = self._kv.try_allocate(request, 1)
                if blocks is None:
                    break  # it was the last itself
                step_blocks.append(blocks)
            step_ids.append(request.request_id)
            step_computed.append(position)
            request.num_computed_tokens = position + 1
        plan.num_scheduled_tokens = [1] * len(step_ids)
        return prefills

    def _admit(self, plan: SchedulerOutput, prefills: Sequence[Request], budget: int) -> int:
        """Take waiting requests into the batch; returns what is left for prompts under way."""
        share = self._share_of_prefills(prefills, budget)
        budget -= share
        # Blocks that prompts under way will still take, and the order of whom they belong to.
        debts = [(request.order, self._kv.blocks_still_needed(request)) for request in prefills]
        waiting = self._waiting.items
        while budget > 0 and waiting and len(self._running) < self._max_num_seqs:
            request = waiting[0]
            prefix = self._find_room(request, debts)
            if prefix is None:
                break
            del waiting[0]
            self._kv.attach(request, prefix)
            missing = len(request.token_ids) - prefix.num_tokens
            others = bool(waiting or prefills)
            chunk = min(missing, budget, self._long_prefill_tokens if others else budget)
            self._enter(plan, request)
            blocks = self._kv.try_allocate(request, chunk)
            assert blocks is not None, f"{request.request_id} had room and got none"
            self._add_row(plan, request, chunk, None)
            plan.new_requests.append(request.as_new_data())
            debts.append((request.order, self._kv.blocks_still_needed(request)))
            budget -= chunk
        return budget + share

    def _share_of_prefills(self, prefills: Sequence[Request], budget: int) -> int:
        limit = self._long_prefill_tokens
        wanted = sum(min(limit, len(r.token_ids) - r.num_computed_tokens) for r in prefills)
        return min(wanted, max(1, budget // 2), budget)

    def _find_room(
        self, request: Request, debts: Sequence[tuple[tuple[int, ...], int]]
    ) -> CachedPrefix | None:
        """The prefix to begin behind, if all of the prompt fits beside what earlier ones need."""
        reserved = sum(blocks for order, blocks in debts if order < request.order)
        room = self._kv.pool.num_free - reserved
        if self._blocked is not None and self._running.items:
            blocked, least = self._blocked
            if blocked is request and room <= least:
                return None
        prefix = self._kv.find_cached_prefix(request)
        if self._kv.has_room(request, prefix, reserved):
            self._blocked = None
            return prefix
        self._blocked = (request, room)
        return None

    def _enter(self, plan: SchedulerOutput, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        request.entered_step = plan.step
        if request.scheduled_at is None:
            request.scheduled_at = self._clock.wall()
            # Of the prompt at most what leaves one token to compute, also when continued.
            block_size = self._kv.block_size
            most = (request.prompt_len - 1) // block_size * block_size
            request.num_cached_tokens = min(request.num_computed_tokens, most)
        self._running.add(request)

    def _schedule_prefills(
        self, plan: SchedulerOutput, prefills: list[Request], budget: int
    ) -> None:
        """The next chunk of prompts under way, earliest first."""
        index = 0
        while index < len(prefills) and budget > 0:
            request = prefills[index]
            index += 1
            missing = len(request.token_ids) - request.num_computed_tokens
            is_last = index == len(prefills)
            chunk = min(missing, budget, budget if is_last else self._long_prefill_tokens)
            blocks = self._kv.try_allocate(request, chunk)
            while blocks is None and len(prefills) > index:
                victim = prefills.pop()
                self._running.remove(victim)
                self._preempt(victim)
                blocks = self._kv.try_allocate(request, chunk)
            if blocks is None:
                break  # the blocks are with other rows of this plan, which get on
            self._add_row(plan, request, chunk, blocks or None)
            budget -= chunk

    def _add_row(
        self, plan: SchedulerOutput, request: Request, chunk: int, blocks: list[list[int]] | None
    ) -> None:
        plan.request_ids.append(request.request_id)
        plan.num_computed_tokens.append(request.num_computed_tokens)
        plan.num_scheduled_tokens.append(chunk)
        plan.new_block_ids.append(blocks)
        request.num_computed_tokens += chunk
        self._num_prompt_tokens += chunk

    # --------------------------------------------------------------------------------- preemption

    def _preempt(self, victim: Request) -> Request:
        """Send a request, already taken off the running list, back to wait; it will recompute."""
        self._kv.free(victim)
        victim.status = RequestStatus.WAITING
        victim.entered_step = NEVER
        victim.prompt_logprobs = None
        victim.num_preemptions += 1
        victim.report_pending = True
        self._left_ids.append(victim.request_id)
        self._waiting.add(victim)
        self._num_preemptions += 1
        return victim

    def _make_room_for_urgent(self) -> None:
        """Preempt running requests of lower priority than the first waiting one, if it needs it."""
        urgent = self._waiting.items[0]
        running, kv = self._running.items, self._kv
        lower = [r for r in running if r.source.priority > urgent.source.priority]
        within_reach = kv.pool.num_free + sum(map(kv.num_held_blocks, lower))
        if kv.peak_blocks(len(urgent.token_ids)) > within_reach:
            return  # it must wait for its equals; preempting others would be in vain
        for _ in lower:
            if len(running) < self._max_num_seqs and self._find_room(urgent, ()) is not None:
                return
            self._preempt(running.pop())

    # ------------------------------------------------------------------------------------- update

    def update(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> dict[int, list[EngineCoreOutput]]:
        """Take a computed plan in; returns what is new, by client index."""
        self._num_in_flight -= 1
        if output.prompt_logprobs:
            self._gather_prompt_logprobs(plan.step, output.prompt_logprobs)
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        for request_id, error in output.errors.items():
            self._fail(request_id, error, plan.step, outputs)
        any_ended = False
        requests, step = self._requests, plan.step
        for request_id, sampled, logprobs in zip(
            plan.request_ids,
            output.sampled_token_ids,
            output.logprobs or [None] * len(plan.request_ids),
            strict=True,
        ):
            if not sampled:
                continue
            request = requests.get(request_id)
            if request is None or request.entered_step > step:
                continue  # it left the batch while the plan was computed
            token = sampled[0]
            token_ids = request.token_ids
            index = len(token_ids) - request.prompt_len
            token_ids.append(token)
            news = EngineCoreOutput(request_id, index, sampled, None, None, logprobs)
            outputs[request.source.client_index].append(news)
            if len(token_ids) >= request.max_total_tokens or token in request.stop_ids:
                any_ended |= self._check_end(request, news)
            if request.report_pending:
                self._report(request, news)
            self._num_generation_tokens += len(news.new_token_ids)
        if any_ended:
            self._running.items = [r for r in self._running.items if r.finish_reason is None]
        return outputs

    def _fail(
        self,
        request_id: str,
        error: str,
        step: int,
        outputs: defaultdict[int, list[EngineCoreOutput]],
    ) -> None:
        """End one request with an error; the batch goes on."""
        request = self._requests.get(request_id)
        if request is None or request.entered_step > step:
            return
        index = len(request.token_ids) - request.prompt_len
        news = EngineCoreOutput(request_id, index, [], FinishReason.ERROR, error=error)
        if request.report_pending:
            self._report(request, news)
        outputs[request.source.client_index].append(news)
        external_id = request.source.external_id
        logger.warning(
            "request %s failed: %s", external_id, error, extra={"request_id": external_id}
        )
        self._running.remove(request)
        self._end(request, FinishReason.ERROR)

    def _check_end(self, request: Request, news: EngineCoreOutput) -> bool:
        token = news.new_token_ids[0]
        if len(request.token_ids) > request.max_total_tokens:
            # No token was wanted (max_tokens 0): the prompt was computed, and that is all.
            news.new_token_ids = []
            news.logprobs = None
            reason: FinishReason | None = FinishReason.LENGTH
        else:
            reason = request.stop_at(token)
        if reason is None:
            return False
        news.finish_reason = reason
        if reason is FinishReason.STOP:
            news.stop_reason = request.stop_reason(token)
        self._end(request, reason)
        return True

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Forget a request; whoever calls takes it off its queue."""
        if request.status is RequestStatus.RUNNING:
            self._left_ids.append(request.request_id)
        self._kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]

    def _report(self, request: Request, news: EngineCoreOutput) -> None:
        """Add what is told once: with the first output, and with the first after a preemption."""
        request.report_pending = False
        if news.new_token_ids and request.first_token_at is None:
            request.first_token_at = self._clock.wall()
        news.num_cached_tokens = request.num_cached_tokens
        news.queued_at = request.queued_at
        news.scheduled_at = request.scheduled_at or 0.0
        news.first_token_at = request.first_token_at or 0.0
        news.num_preemptions = request.num_preemptions
        if request.gathers_prompt_logprobs:
            news.prompt_logprobs = request.prompt_logprobs or TokenLogprobs([], [], [])
            request.prompt_logprobs = None
            request.gathers_prompt_logprobs = False

    def _gather_prompt_logprobs(self, step: int, parts: dict[str, TokenLogprobs]) -> None:
        """Join the chunks of prompts; they travel once, with the first output."""
        for request_id, part in parts.items():
            request = self._requests.get(request_id)
            if request is None or request.entered_step > step:
                continue
            if not request.gathers_prompt_logprobs:
                continue  # recomputed after a preemption: sent long ago
            if request.prompt_logprobs is None:
                request.prompt_logprobs = TokenLogprobs([], [], [])
            request.prompt_logprobs.token_ids += part.token_ids
            request.prompt_logprobs.logprobs += part.logprobs
            request.prompt_logprobs.ranks += part.ranks
