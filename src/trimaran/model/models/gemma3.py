"""Gemma 3 (text): norms on both sides of each block, two kinds of layers, a scaled embedding.

stream ─┬─ norm ─ attention ─ norm ─(+)─┬─ norm ─ mlp ─ norm ─(+)─ …
        └───────────────────────────┘   └──────────────────┘
"""

import torch

from trimaran.formats.architecture import ModelArchitecture
from trimaran.model.kernels.base import AttentionMetadata, Kernels
from trimaran.model.layers.attention import Attention
from trimaran.model.layers.mlp import GatedMLP
from trimaran.model.layers.rotary import RotaryEmbedding
from trimaran.model.models.decoder import DecoderForCausalLM
from trimaran.model.weights import Weights


class Gemma3Layer:
    """Attention and feed-forward block, each between two norms."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: Weights,
        kernels: Kernels,
        prefix: str,
        rotary: RotaryEmbedding,
    ) -> None:
        self._kernels = kernels
        self._eps = architecture.rms_norm_eps
        self._mlp = GatedMLP(architecture, weights, kernels, f"{prefix}.mlp")
        self._attention = Attention(architecture, weights, kernels, f"{prefix}.self_attn", rotary)
        self._post_attention_norm, self._pre_mlp_norm, self._post_mlp_norm = (
            weights.norm(f"{prefix}.{name}.weight", architecture.hidden_size)
            for name in (
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        next_norm: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        fused = self._kernels.norm_add_rms_norm
        attended = self._attention(hidden, positions, kv_cache, metadata)
        hidden = fused(attended, residual, self._post_attention_norm, self._pre_mlp_norm, self._eps)
        return fused(self._mlp(hidden), residual, self._post_mlp_norm, next_norm, self._eps)


class Gemma3ForCausalLM(DecoderForCausalLM):
    def layer(self, weights: Weights, prefix: str, rotary: RotaryEmbedding) -> Gemma3Layer:
        return Gemma3Layer(self.architecture, weights, self._kernels, prefix, rotary)
