"""Warm-up plans keep the rules of real ones, whatever the sizes, and leave nothing behind."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.worker.plans import layout

from trimaran.config import SchedulerConfig
from trimaran.messages import KVCacheConfig
from trimaran.worker.warm_up import warm_up_plans


@given(
    num_blocks=st.integers(2, 100),
    max_num_seqs=st.integers(1, 300),
    budget=st.integers(1, 2000),
    max_model_len=st.integers(1, 300),
    groups=st.integers(1, 3),
)
def test_plans(num_blocks, max_num_seqs, budget, max_model_len, groups):
    kv = KVCacheConfig(layout(groups), num_blocks)
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    present: dict[str, int] = {}  # tokens that its blocks hold
    known: dict[str, int] = {}
    for plan in warm_up_plans(kv, scheduler, max_model_len=max_model_len):
        for name in plan.left_request_ids:
            del present[name]
        for request in plan.new_requests:
            assert request.request_id not in present
            assert len(request.block_ids) == groups
            for blocks in request.block_ids:
                assert all(0 < block < num_blocks for block in blocks)
                present[request.request_id] = len(blocks) * kv.layout.block_size
            known[request.request_id] = len(request.token_ids)
        assert len(present) <= max_num_seqs
        assert set(plan.request_ids) <= set(present)
        assert sum(plan.num_scheduled_tokens) == plan.total_num_scheduled_tokens <= budget
        for name, computed, scheduled in zip(
            plan.request_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            reached = computed + scheduled
            assert reached <= min(present[name], max_model_len)
            assert scheduled >= 1
            assert reached == known[name]
            known[name] += 1
    assert not present
