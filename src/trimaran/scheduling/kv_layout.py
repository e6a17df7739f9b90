"""How layers fall into KV groups, and how many blocks a request needs at most.

Owns: the arithmetic of docs/decisions/001-kv-layout.md. Knows nothing of pools or requests. Called
by executors (``make_kv_cache_layout``), by the engine when it sizes the cache
(``plan_kv_cache``) and by KVCacheManager (``peak_blocks``).
"""

from collections.abc import Sequence
from typing import Literal

from trimaran.config import EngineConfig
from trimaran.errors import ConfigError
from trimaran.messages import KVCacheConfig, KVCacheGroup, KVCacheLayout, ModelFacts

LayerKind = tuple[Literal["full", "sliding"], int]

# Share of padded (never used) layer slots that is worth paying for fewer groups.
_MAX_WASTE = 0.1


def make_kv_cache_layout(
    layers: Sequence[LayerKind], *, block_size: int, bytes_per_layer_token: int
) -> KVCacheLayout:
    """Groups of equal size over layers of the same kind, full attention first.

    ``layers[i]`` is (kind, window in tokens; 0 for full) of layer i; ``bytes_per_layer_token`` is
    K and V of one token in one layer. A last group of a kind may be short: its missing slots are
    padding, allocated and never used.
    """
    if not layers:
        raise ValueError("a model without attention layers has no KV cache")
    by_kind: dict[LayerKind, list[int]] = {}
    for layer, (kind, window) in enumerate(layers):
        if (kind == "full") != (window == 0):
            raise ValueError(f"layer {layer}: kind {kind!r} with window {window}")
        by_kind.setdefault((kind, window), []).append(layer)
    size = _group_size([len(members) for members in by_kind.values()])
    groups = [
        KVCacheGroup(kind=kind, window=window, layers=tuple(members[start : start + size]))
        for (kind, window), members in sorted(by_kind.items())
        for start in range(0, len(members), size)
    ]
    return KVCacheLayout(
        block_size=block_size,
        groups=tuple(groups),
        num_slots=size,
        bytes_per_block=size * block_size * bytes_per_layer_token,
    )


def _group_size(counts: Sequence[int]) -> int:
    """Layers per group: the fewest groups that waste at most a tenth, then the least waste."""
    num_layers = sum(counts)

    def cost(size: int) -> tuple[bool, int, int]:
        num_groups = sum(-(-count // size) for count in counts)
        waste = num_groups * size - num_layers
        return (waste > _MAX_WASTE * num_layers, num_groups, waste)

    return min(range(1, max(counts) + 1), key=cost)


def peak_blocks(layout: KVCacheLayout, num_tokens: int, max_chunk: int) -> int:
    """Most blocks that one request of ``num_tokens`` holds at any time, over all groups.

    ``max_chunk``: most tokens of it computed in one step. A sliding group holds what the first
    query of a chunk still sees (window - 1 tokens) and the chunk, wherever block borders fall.
    """
    block_size = layout.block_size
    whole = -(-num_tokens // block_size)
    total = 0
    for group in layout.groups:
        if group.kind == "sliding":
            span = group.window - 1 + min(max_chunk, num_tokens)
            total += min(whole, -(-(span - 1) // block_size) + 1)
        else:
            total += whole
    return total


def longest_fit(layout: KVCacheLayout, num_blocks: int, max_chunk: int, limit: int) -> int:
    """The longest sequence, at most ``limit`` tokens, that ``num_blocks`` blocks can hold alone.

    The null block is one of ``num_blocks``. 0: not even one token fits.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if peak_blocks(layout, middle, max_chunk) <= num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low


def plan_kv_cache(
    facts: ModelFacts, config: EngineConfig, *, num_engines_on_host: int = 1
) -> tuple[KVCacheConfig, int]:
    """(size of the KV cache, max_model_len) for a loaded model.

    Without --kv-cache-memory-bytes it takes what max_num_seqs sequences of full length could use
    at most, and never more than the given share of the free memory, which all engines of this host
    divide among them. A length that was left open is fitted to the cache.

    Raises ConfigError: the length does not suit the model or the cache; says what would.
    """
    layout = facts.layout
    asked = config.model.max_model_len
    if asked is not None and asked > facts.max_model_len:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {facts.max_model_len} tokens that the model"
            " was made for"
        )
    max_chunk = config.scheduler.max_num_batched_tokens
    target = asked or facts.max_model_len
    one = (peak_blocks(layout, target, max_chunk) + 1) * layout.bytes_per_block
    budget = config.cache.kv_cache_memory_bytes
    if budget is None:
        most = config.scheduler.max_num_seqs * (one - layout.bytes_per_block)
        share = config.cache.kv_cache_memory_fraction / num_engines_on_host
        available = int(facts.available_kv_bytes * share)
        budget = min(available, most + layout.bytes_per_block)
    num_blocks = budget // layout.bytes_per_block
    fitted = longest_fit(layout, num_blocks, max_chunk, target)
    if fitted < (asked or min(2, target)):
        origin = (
            "--kv-cache-memory-bytes"
            if config.cache.kv_cache_memory_bytes is not None
            else f"--kv-cache-memory-fraction {config.cache.kv_cache_memory_fraction:g} of the"
            f" {facts.available_kv_bytes} bytes that are free"
        )
        fits = f"--max-model-len {fitted}, or " if fitted >= 2 else ""
        raise ConfigError(
            f"one sequence of {target} tokens (--max-model-len) needs {one} bytes of KV cache,"
            f" and there are {budget} ({origin})",
            hint=f"what would fit: {fits}--kv-cache-memory-bytes {one}",
        )
    return KVCacheConfig(layout=layout, num_blocks=num_blocks), fitted
