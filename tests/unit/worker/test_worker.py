"""Start-up of a worker on a tiny checkpoint: what it finds out, and how it refuses."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from trimaran.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from trimaran.errors import CheckpointError, ConfigError
from trimaran.executor.inproc import InprocExecutor
from trimaran.messages import KVCacheConfig, KVCacheGroup, KVCacheLayout
from trimaran.worker.kv_tensors import allocate_kv_caches

MIB = 1 << 20


def checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    config = transformers.Gemma3TextConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    transformers.Gemma3ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def executor_for(
    folder: Path, max_num_seqs: int = 4, on_unit=lambda tokens: None, **model
) -> InprocExecutor:
    return InprocExecutor(
        EngineConfig(
            model=ModelConfig(model=str(folder), **model),
            cache=CacheConfig(block_size=8),
            executor=ExecutorConfig(threads=1, kernels="torch"),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=32),
        ),
        on_unit,
    )


def ignore(phase: str, share: float, detail: str) -> None:
    """No one watches."""


def test_facts_and_progress(tmp_path):
    """Two groups of two layers: full first, then sliding with the checkpoint's window."""
    executor = executor_for(checkpoint(tmp_path, torch.float32))
    seen: list[tuple[str, float]] = []
    facts = executor.load(lambda phase, share, detail: seen.append((phase, share)))
    assert facts.layout == KVCacheLayout(
        block_size=8,
        groups=(KVCacheGroup("full", 0, (1, 3)), KVCacheGroup("sliding", 8, (0, 2))),
        num_slots=2,
        bytes_per_block=2 * 8 * 2 * 16 * 4,  # slots, tokens, K and V, head, fp32
    )
    assert (facts.vocab_size, facts.max_model_len, facts.num_threads) == (300, 64, 1)
    assert facts.kernels == "torch"
    assert facts.weight_bytes > 300 * 32 * 4
    assert 0 < facts.available_kv_bytes < 1 << 50
    executor.initialize_kv_cache(KVCacheConfig(facts.layout, num_blocks=3))
    executor.warm_up(lambda phase, share, detail: seen.append((phase, share)))
    for phase in ("loading", "warming up"):
        shares = [share for name, share in seen if name == phase]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
    executor.shutdown()
    executor.shutdown()
    assert executor.worker is None


def test_every_layer_and_every_piece_of_the_head_is_a_unit(tmp_path):
    units: list[int] = []
    executor = executor_for(checkpoint(tmp_path, torch.float32), on_unit=units.append)
    facts = executor.load(ignore)
    executor.initialize_kv_cache(KVCacheConfig(facts.layout, num_blocks=40))
    executor.warm_up(ignore)
    # A prompt within the budget of 32 tokens, one token more, a batch of 4: each 4 layers, 1 head.
    assert units == [32] * 5 + [1] * 5 + [4] * 5


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "bfloat16"),
        (torch.float16, "float32", "float32"),
        (torch.float32, "bfloat16", "bfloat16"),
    ],
    ids=str,
)
def test_dtype(stored, asked, used, tmp_path):
    executor = executor_for(checkpoint(tmp_path, stored), dtype=asked)
    facts = executor.load(ignore)
    assert facts.dtype == used
    executor.initialize_kv_cache(KVCacheConfig(facts.layout, num_blocks=40))
    executor.warm_up(ignore)
    assert str(executor.worker.kv_caches[0].dtype) == f"torch.{used}"


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nothing-here"):
        executor_for(tmp_path / "nothing-here.gguf").load(ignore)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unheard"]}))
    with pytest.raises(CheckpointError):
        executor_for(tmp_path).load(ignore)


def test_a_cache_takes_memory_only_where_it_is_used():
    layout = KVCacheLayout(16, (KVCacheGroup("full", 0, (0,)),), 1, 2 * 16 * 64 * 4 * 16)
    num_blocks = (256 * MIB) // layout.bytes_per_block
    before = resident_bytes()
    (cache,) = allocate_kv_caches(
        KVCacheConfig(layout, num_blocks), num_kv_heads=16, head_dim=64, dtype=torch.float32
    )
    assert cache.nbytes == 256 * MIB
    assert resident_bytes() - before < 32 * MIB
    cache[: num_blocks // 2].fill_(1.0)
    assert resident_bytes() - before > 120 * MIB


def test_a_cache_beyond_all_addresses_is_refused():
    layout = KVCacheLayout(16, (KVCacheGroup("full", 0, (0,)),), 1, 2 * 16 * 64 * 4)
    with pytest.raises(ConfigError, match=r"cannot be allocated \(give less with --kv-cache"):
        allocate_kv_caches(KVCacheConfig(layout, 1 << 50), 1, 64, torch.float32)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS in /proc/self/status")
