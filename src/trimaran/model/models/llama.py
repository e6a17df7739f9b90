"""Llama, and every family that differs from it only in fields of the architecture (registry.py).

stream ─┬─ norm ─ attention ─(+)─┬─ norm ─ mlp ─(+)─ …
        └────────────────────┘   └───────────┘
"""

import torch

from trimaran.formats.architecture import ModelArchitecture
from trimaran.model.kernels.base import AttentionMetadata, Kernels
from trimaran.model.layers.attention import Attention
from trimaran.model.layers.mlp import GatedMLP
from trimaran.model.layers.rotary import RotaryEmbedding
from trimaran.model.models.decoder import DecoderForCausalLM
from trimaran.model.weights import Weights


class LlamaLayer:
    """Norms before attention and before the feed-forward block."""

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
        self._mlp_norm = weights.norm(
            f"{prefix}.post_attention_layernorm.weight", architecture.hidden_size
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
        attended = self._attention(hidden, positions, kv_cache, metadata)
        hidden = self._kernels.add_rms_norm(attended, residual, self._mlp_norm, self._eps)
        return self._kernels.add_rms_norm(self._mlp(hidden), residual, next_norm, self._eps)


class LlamaForCausalLM(DecoderForCausalLM):
    def layer(self, weights: Weights, prefix: str, rotary: RotaryEmbedding) -> LlamaLayer:
        return LlamaLayer(self.architecture, weights, self._kernels, prefix, rotary)
