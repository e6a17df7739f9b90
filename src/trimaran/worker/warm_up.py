"""The plans that a worker executes before the first request.

Owns: what they are: a prompt, one token after it, a batch. Libraries choose and build code on the
first call of a shape, pools start their threads, buffers are touched; the first request shall not
pay for it. Small, since a start should be quick. Called by ``worker``.
"""

from trimaran.config import SchedulerConfig
from trimaran.messages import KVCacheConfig, NewRequestData, SchedulerOutput
from trimaran.sampling_params import SamplingParams

_PROMPT_TOKENS = 128
_BATCH = 32


def warm_up_plans(
    kv: KVCacheConfig, scheduler: SchedulerConfig, *, max_model_len: int
) -> list[SchedulerOutput]:
    """To be executed in order; they leave the batch empty.

    They write to blocks that no sequence has yet. Blocks are shared and what comes out means
    nothing: only the shapes matter.
    """
    usable = (kv.num_blocks - 1) * kv.layout.block_size
    longest = min(_PROMPT_TOKENS, usable - 1, max_model_len - 1, scheduler.max_num_batched_tokens)
    batch = min(_BATCH, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    names = [f"warm-up {i}" for i in range(batch)]
    plans = []
    if longest >= 1:
        prompt = _request("warm-up", longest, kv)
        plans = [
            _plan([], [prompt], ["warm-up"], computed=0, scheduled=longest),
            _plan([], [], ["warm-up"], computed=longest, scheduled=1),
            _plan(["warm-up"], [], [], computed=0, scheduled=0),
        ]
    return [
        *plans,
        _plan([], [_request(name, 1, kv) for name in names], names, computed=0, scheduled=1),
        _plan(names, [], [], computed=0, scheduled=0),
    ]


def _request(name: str, num_tokens: int, kv: KVCacheConfig) -> NewRequestData:
    num_blocks = num_tokens // kv.layout.block_size + 1  # one token more will come
    return NewRequestData(
        request_id=name,
        token_ids=[0] * num_tokens,
        prompt_len=num_tokens,
        sampling_params=SamplingParams(seed=0),
        eos_token_ids=[],
        block_ids=[list(range(1, num_blocks + 1)) for _ in kv.layout.groups],
    )


def _plan(
    left: list[str],
    new: list[NewRequestData],
    request_ids: list[str],
    *,
    computed: int,
    scheduled: int,
) -> SchedulerOutput:
    count = len(request_ids)
    return SchedulerOutput(
        step=0,
        left_request_ids=left,
        new_requests=new,
        request_ids=request_ids,
        num_computed_tokens=[computed] * count,
        num_scheduled_tokens=[scheduled] * count,
        new_block_ids=[None] * count,
        total_num_scheduled_tokens=scheduled * count,
    )
