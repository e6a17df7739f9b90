"""Self-attention of one layer over the paged KV cache.

Owns: the projections and the order of the kernels. Knows nothing of requests or blocks: those are
in the metadata that the worker makes. Called by the decoder layers.
"""

import torch

from trimaran.formats.architecture import ModelArchitecture
from trimaran.model.kernels.base import AttentionMetadata, Kernels
from trimaran.model.layers.rotary import RotaryEmbedding
from trimaran.model.weights import Weights


class Attention:
    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: Weights,
        kernels: Kernels,
        prefix: str,
        rotary: RotaryEmbedding,
    ) -> None:
        heads, kv_heads, size = (
            architecture.num_heads,
            architecture.num_kv_heads,
            architecture.head_dim,
        )
        self._architecture = architecture
        self._kernels = kernels
        self._rotary = rotary
        self._qkv = weights.linear(
            {
                f"{prefix}.q_proj": heads * size,
                f"{prefix}.k_proj": kv_heads * size,
                f"{prefix}.v_proj": kv_heads * size,
            },
            architecture.hidden_size,
            bias=architecture.attention_bias,
        )
        self._out = weights.linear(
            {f"{prefix}.o_proj": architecture.hidden_size},
            heads * size,
            bias=architecture.attention_output_bias,
        )
        norms = architecture.qk_norm
        self._q_norm = weights.norm(f"{prefix}.q_norm.weight", size) if norms else None
        self._k_norm = weights.norm(f"{prefix}.k_norm.weight", size) if norms else None

    def __call__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]; the tokens' keys and values are cached."""
        shape = self._architecture
        query = self._kernels.qk_norm_rope_cache(
            self._qkv(hidden),
            self._q_norm,
            self._k_norm,
            shape.rms_norm_eps,
            self._rotary.cos_sin(metadata.max_seq_len),
            positions,
            kv_cache,
            metadata.slot_mapping,
            shape.num_heads,
            shape.num_kv_heads,
        )
        mixed = self._kernels.paged_attention(query, kv_cache, metadata, shape.attention_scale)
        return self._out(mixed)
