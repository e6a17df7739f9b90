"""The memory of the KV cache.

Owns: the shape and allocation of KV tensors and which layer uses which
(docs/decisions/001-kv-layout.md). Called by ``worker``.
"""

import torch

from trimaran.errors import ConfigError
from trimaran.messages import KVCacheConfig


def allocate_kv_caches(
    config: KVCacheConfig, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Per layer [num_blocks, 2, num_kv_heads, block_size, head_dim]; layers in one slot share.

    Not initialised: the system hands out a page when a block in it is first written, so an idle
    server does not hold its whole cache. Raises ConfigError: not even the addresses are there.
    """
    layout = config.layout
    shape = (config.num_blocks, 2, num_kv_heads, layout.block_size, head_dim)
    block_bytes = (
        layout.num_slots * dtype.itemsize * 2 * num_kv_heads * layout.block_size * head_dim
    )
    assert block_bytes == layout.bytes_per_block, (block_bytes, layout.bytes_per_block)
    try:
        slots = [torch.empty(shape, dtype=dtype) for _ in range(layout.num_slots)]
    except RuntimeError as error:
        raise ConfigError(
            f"a KV cache of {config.num_blocks * block_bytes} bytes cannot be allocated",
            hint="give less with --kv-cache-memory-bytes",
        ) from error
    num_layers = sum(len(group.layers) for group in layout.groups)
    return [slots[layout.place_of_layer(layer)[1]] for layer in range(num_layers)]
