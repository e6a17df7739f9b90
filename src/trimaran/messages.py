"""Every struct that crosses a process, positional on the wire (msgspec, array_like).

Owns: the shapes, the message types and the protocol version. Knows nothing of sockets (ipc/) or of
who sends (client/, engine/, launch/). Add a field at the end with a default, or raise
PROTOCOL_VERSION; tests/unit/test_messages.py holds the shapes.

    front end --ADD/ABORT/UTILITY-->  engine     (ROUTER -> DEALER: [identity,] type, payload,
                                                  buffers of an ADD: see ipc/codec.py)
    front end <--EngineCoreOutputs--  engine     (PUSH -> PULL: payload)
    launcher  <--Hello/Progress/..->  engine     (ROUTER <-> DEALER: the handshake)
    engine    --SchedulerOutput-->    executor --ModelRunnerOutput--> engine
"""

from enum import Enum, IntEnum
from typing import Any, ClassVar, Literal

import msgspec

from trimaran.errors import InvalidRequestError, ProtocolError
from trimaran.ipc.codec import Buffer
from trimaran.sampling_params import SamplingParams

PROTOCOL_VERSION = 2  # 2: buffer frames, prompt_embeds

# First frame of the message by which an engine says that it crashed (then: an EngineDeath).
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"

AWAKE = -1  # the sleep level of an engine that is not asleep

NULL_BLOCK_ID = 0  # never allocated, never written: stands where a block table has no block


class RequestType(Enum):
    """Second frame of what a front end sends (first on the engine's side)."""

    ADD = b"\x00"  # EngineCoreRequest
    ABORT = b"\x01"  # AbortRequests
    UTILITY = b"\x02"  # UtilityCall


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


# --------------------------------------------------------------------- requests and their outputs

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Tensor(msgspec.Struct, array_like=True, gc=False):
    """Numbers, little-endian, the last dimension innermost."""

    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, int]  # rows, columns
    data: Buffer

    def verify(self) -> None:
        """Raise ProtocolError: the bytes are not as many as the shape says."""
        rows, columns = self.shape
        if rows < 1 or columns < 1 or rows * columns * ITEM_BYTES[self.dtype] != self.data.nbytes:
            raise ProtocolError(
                f"{self.data.nbytes} bytes are not {rows} x {columns} numbers of {self.dtype}"
            )


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One sequence to generate (n > 1 is fanned out by the front end, one request per choice)."""

    request_id: str  # internal and unique; what the client sent is external_id
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # seed and max_tokens are always set here
    eos_token_ids: list[int] = []
    client_index: int = 0  # which front end gets the outputs
    choice_index: int = 0
    priority: int = 0  # lower runs earlier
    arrival_time: float = 0.0  # wall seconds
    # Tokens already generated before a replay or hand-over; limits in sampling_params stay the
    # original ones, so the engine continues at output index len(prior_output_ids).
    prior_output_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    cache_salt: str | None = None
    external_id: str = ""
    # One row per prompt token, instead of its embedding: what the first layer sees (after the
    # model's own embedding scale). prompt_token_ids then are placeholders.
    prompt_embeds: Tensor | None = None


class AbortRequests(msgspec.Struct, array_like=True, gc=False):
    request_ids: list[str]


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Columns over positions. Each row: the chosen token first, then the k most likely in order."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]  # natural log
    ranks: list[int]  # of the chosen token, 1 = most likely


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step (or several, merged) brought to one request."""

    request_id: str
    first_index: int  # output index of new_token_ids[0]: makes a resend harmless
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it, if the user gave it
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None  # once, with the first output: positions 1 … p-1
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str | None = None  # with FinishReason.ERROR: what to tell the client
    # What an engine knows of the request's life: with its first output, and again with the first
    # one after a preemption. Wall seconds; the first token's is the end of the step that drew it.
    queued_at: float = 0.0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    num_preemptions: int = 0  # so far


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A snapshot after a step, plus counters since the start of this incarnation."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use, 0 to 1
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # computed in prefill
    num_generation_tokens: int = 0
    sleep_level: int = AWAKE  # 0, 1 or 2 while asleep
    is_falling_asleep: bool = False  # what arrives waits already; what came before still ends


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    call_id: int
    result: bytes = b""  # msgpack of the operation's result type
    error: str | None = None
    error_type: str | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message from an engine to one front end."""

    rank: int
    incarnation: int
    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    utility: UtilityOutput | None = None
    timestamp: float = 0.0  # wall seconds at the end of the step


class EngineDeath(msgspec.Struct, array_like=True, gc=False):
    rank: int
    incarnation: int
    cause: str


# --------------------------------------------------------------------------- control operations


#
# An operation is a struct here, with the type of its result, and an arm in EngineCore.control.


class ResetPrefixCache(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Result: whether the cache was emptied (False while blocks are in use)."""

    result_type: ClassVar[Any] = bool


class Ping(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Result: how things stand."""

    result_type: ClassVar[Any] = SchedulerStats


class Sleep(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Stop work (level 0), give back the KV cache too (1), and the weights (2).

    Running and waiting requests end at once (mode "abort") or by themselves (mode "wait"). What
    arrives later waits until WakeUp. Result: the level slept at; asleep already, the deeper of the
    two. Raises InvalidRequestError: no such level or mode.
    """

    level: Literal[0, 1, 2] = 1
    mode: Literal["wait", "abort"] = "abort"
    result_type: ClassVar[Any] = int

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in (0, 1, 2):
            raise InvalidRequestError("level must be 0, 1 or 2", param="level")
        if self.mode not in ("wait", "abort"):
            raise InvalidRequestError('mode must be "wait" or "abort"', param="mode")


class WakeUp(msgspec.Struct, array_like=True, tag=4, gc=False):
    """Undo Sleep, whatever its level; one that still waits for running work is called off."""

    result_type: ClassVar[Any] = None


class Profile(msgspec.Struct, array_like=True, tag=5, gc=False):
    """Record what the executor does, from "start" to "stop". Result: the file of the recording."""

    action: Literal["start", "stop"]
    result_type: ClassVar[Any] = str


ControlOperation = ResetPrefixCache | Ping | Sleep | WakeUp | Profile


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    call_id: int
    client_index: int
    operation: ControlOperation


# -------------------------------------------------------------------------------------- handshake


class EngineAddresses(msgspec.Struct, array_like=True, gc=False):
    """Per front end, by client index: where the engine connects."""

    inputs: list[str]
    outputs: list[str]


class EngineHello(msgspec.Struct, array_like=True, tag="hello", gc=False):
    protocol_version: int
    rank: int
    incarnation: int
    pid: int
    config_hash: str  # over model, dtype, block size


class EngineInit(msgspec.Struct, array_like=True, tag="init", gc=False):
    """The answer to a hello that fits."""

    addresses: EngineAddresses


class HandshakeRefusal(msgspec.Struct, array_like=True, tag="refusal", gc=False):
    """The answer to one that does not: names both sides' values and the flag to change."""

    reason: str


class EngineProgress(msgspec.Struct, array_like=True, tag="progress", gc=False):
    rank: int
    incarnation: int
    phase: str  # "spawned", "importing", "loading", "warming up", "ready"
    percent: float  # of the whole start-up, 0 to 100
    detail: str = ""


class EngineCoreReadyResponse(msgspec.Struct, array_like=True, tag="ready", gc=False):
    """What the engine found out. First message on each request link, and last of the handshake."""

    rank: int
    incarnation: int
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    dtype: str
    kv_cache_bytes: int
    weight_bytes: int
    num_threads: int
    kernels: str
    phases: list[tuple[str, float]] = []  # start-up phases and their seconds
    world_size: int = 1

    def verify(self) -> None:
        """Raise ProtocolError: no engine can have found this."""
        if min(self.num_kv_blocks, self.block_size, self.max_model_len, self.vocab_size) < 1:
            raise ProtocolError(f"an engine of rank {self.rank} that can compute nothing is ready")


HandshakeMessage = (
    EngineHello | EngineInit | HandshakeRefusal | EngineProgress | EngineCoreReadyResponse
)


class DeploymentState(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Supervisor to API servers, on change: what /ready answers while engines load."""

    ready: bool
    phase: str
    percent: float
    failure: str | None = None
    # Where the model is on this machine, once it is: located (and downloaded) in one place only.
    model_path: str | None = None


class ApiServerReady(msgspec.Struct, array_like=True, gc=False):
    """API server to supervisor, once: it answers requests from now on."""

    phases: list[tuple[str, float]] = []  # start-up phases and their seconds


# ----------------------------------------------------------------------------- the model's KV cache


class KVCacheGroup(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Layers that share one block table per request. window 0 means full attention."""

    kind: Literal["full", "sliding"]
    window: int
    layers: tuple[int, ...]


class KVCacheLayout(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How layers map to pages; see docs/decisions/001-kv-layout.md.

    A block is ``block_size`` tokens of ONE group. All groups have at most ``num_slots`` layers and
    the k-th layer of any group lives in KV tensor k, so every block costs the same bytes and one
    pool serves all groups.
    """

    block_size: int
    groups: tuple[KVCacheGroup, ...]
    num_slots: int
    bytes_per_block: int

    def place_of_layer(self, layer: int) -> tuple[int, int]:
        """(group index, slot index) of a layer."""
        for group_index, group in enumerate(self.groups):
            if layer in group.layers:
                return group_index, group.layers.index(layer)
        raise ValueError(f"layer {layer} is in no KV group")


class KVCacheConfig(msgspec.Struct, array_like=True, frozen=True, gc=False):
    layout: KVCacheLayout
    num_blocks: int  # the null block included


class ModelFacts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What an executor knows once the weights are in."""

    layout: KVCacheLayout
    vocab_size: int
    max_model_len: int  # what the model itself allows
    dtype: str
    weight_bytes: int
    available_kv_bytes: int
    num_threads: int
    kernels: str
    hidden_size: int = 0  # of a row of prompt_embeds; 0: any


# ------------------------------------------------------------------------ one step of the executor


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that enters the batch: new, or back after a preemption."""

    request_id: str
    token_ids: list[int]  # prompt, then every output token so far
    prompt_len: int
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    block_ids: list[list[int]]  # per KV group, from the start of the sequence
    choice_index: int = 0
    bad_words_token_ids: list[list[int]] = []
    prompt_embeds: Tensor | None = None  # of the first prompt_len tokens


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """The plan of one step. Columns are aligned with ``request_ids``.

    Apply in this order: leave (``left_request_ids``), enter (``new_requests``), append
    ``new_block_ids``, then compute. A request samples in this step if its scheduled tokens reach
    the end of its known tokens; others are prefill chunks that sample nothing.

    A row may read blocks that an earlier row of the same plan fills (a prefix found while it is
    being computed): each layer stores the keys and values of all rows before any row attends.
    """

    step: int
    left_request_ids: list[str]  # finished, aborted or preempted since the last plan
    new_requests: list[NewRequestData]
    request_ids: list[str]
    num_computed_tokens: list[int]  # tokens whose KV is in place before this step
    num_scheduled_tokens: list[int]
    # Blocks to append to the tables, per group; None: none. Empty for requests in new_requests.
    new_block_ids: list[list[list[int]] | None]
    total_num_scheduled_tokens: int


class ModelRunnerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Aligned with ``SchedulerOutput.request_ids``."""

    sampled_token_ids: list[list[int]]  # empty where a chunk sampled nothing
    logprobs: list[TokenLogprobs | None] | None = None
    # request id -> positions computed in this step: row i is for prompt token num_computed + 1 + i
    prompt_logprobs: dict[str, TokenLogprobs] = {}
    # request id -> why it cannot go on; whatever was sampled for it is void
    errors: dict[str, str] = {}
