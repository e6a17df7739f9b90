"""A request as the scheduler sees it: tokens known, tokens computed, where it stands, when it ends.

Owns: the state of one sequence and its stop conditions as plain numbers and a set, worked out once.
Knows nothing of queues or pools. Made and changed by Scheduler; the fields under "KV cache" are
KVCacheManager's.
"""

from enum import IntEnum

from trimaran.ids import unique_id
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    NewRequestData,
    TokenLogprobs,
)

NEVER = 1 << 62  # entered_step of a request that is in no batch


class RequestStatus(IntEnum):
    WAITING = 0  # new or preempted: holds no blocks
    RUNNING = 1
    FINISHED = 2  # or aborted


class Request:
    """``max_model_len`` bounds prompt + output, whatever max_tokens says."""

    __slots__ = (
        "block_hashes",
        "block_tables",
        "cache_salt",
        "entered_step",
        "finish_reason",
        "first_token_at",
        "gathers_prompt_logprobs",
        "max_total_tokens",
        "min_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_registered_blocks",
        "num_released_blocks",
        "num_slots",
        "order",
        "prompt_len",
        "prompt_logprobs",
        "queued_at",
        "report_pending",
        "request_id",
        "scheduled_at",
        "source",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, source: EngineCoreRequest, max_model_len: int, queued_at: float) -> None:
        params = source.sampling_params
        self.source = source
        self.request_id = source.request_id
        self.token_ids = source.prompt_token_ids + source.prior_output_ids
        self.prompt_len = len(source.prompt_token_ids)
        self.num_computed_tokens = 0  # scheduled counts as computed: plans run in order
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.order: tuple[int, ...] = ()  # the policy's; smaller runs earlier
        self.entered_step = NEVER

        # Limits are the original ones, also where generation continues behind prior_output_ids.
        asked = max_model_len if params.max_tokens is None else params.max_tokens
        self.max_total_tokens = min(self.prompt_len + asked, max_model_len)
        self.min_total_tokens = self.prompt_len + params.min_tokens
        self.stop_ids = frozenset(params.stop_token_ids).union(
            () if params.ignore_eos else source.eos_token_ids
        )

        self.queued_at = queued_at
        self.scheduled_at: float | None = None  # first time in a batch
        self.first_token_at: float | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        # The next output tells the front end what it does not know yet of the lines above.
        self.report_pending = True
        # A continued request's client has them already: they come with the first output.
        self.gathers_prompt_logprobs = (
            params.prompt_logprobs is not None and not source.prior_output_ids
        )
        self.prompt_logprobs: TokenLogprobs | None = None

        # KV cache. Tables are indexed by position // block_size and equally long in all groups.
        self.block_tables: list[list[int]] = []
        self.num_slots = 0  # positions that have a block
        self.num_released_blocks: list[int] = []  # per group: null entries its table begins with
        # Embeddings are not told apart by their placeholder tokens: nobody shares their blocks.
        self.cache_salt = source.cache_salt if source.prompt_embeds is None else unique_id()
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0

    @property
    def num_kv_tokens(self) -> int:
        """Most tokens whose keys and values are ever stored (a last token's never are)."""
        return max(len(self.token_ids), self.max_total_tokens - 1)

    def stop_at(self, token: int) -> FinishReason | None:
        """Why the request ends with ``token``, just appended, if it does."""
        num_tokens = len(self.token_ids)
        if token in self.stop_ids and num_tokens > self.min_total_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_total_tokens else None

    def answer_at_once(self) -> EngineCoreOutput | None:
        """The end of a request whose prior output has reached one; None: there is more to come."""
        prior = self.source.prior_output_ids
        reason = self.stop_at(prior[-1]) if prior else None
        if reason is None:
            return None
        stop_reason = self.stop_reason(prior[-1]) if reason is FinishReason.STOP else None
        return EngineCoreOutput(self.request_id, len(prior), [], reason, stop_reason)

    def stop_reason(self, token: int) -> int | None:
        """The stop token id to report: one that the user gave and that is not just an EOS."""
        params = self.source.sampling_params
        ended_by_eos = not params.ignore_eos and token in self.source.eos_token_ids
        return None if ended_by_eos else token

    def as_new_data(self) -> NewRequestData:
        """All that an executor needs to take the request in, as copies."""
        source = self.source
        return NewRequestData(
            request_id=self.request_id,
            token_ids=self.token_ids.copy(),
            prompt_len=self.prompt_len,
            sampling_params=source.sampling_params,
            eos_token_ids=source.eos_token_ids,
            block_ids=[table.copy() for table in self.block_tables],
            choice_index=source.choice_index,
            bad_words_token_ids=source.bad_words_token_ids,
            prompt_embeds=source.prompt_embeds,
        )
