"""The gated feed-forward block: down(activation(gate(x)) * up(x)). Called by the decoder layers."""

import torch

from trimaran.formats.architecture import ModelArchitecture
from trimaran.model.kernels.base import Kernels
from trimaran.model.weights import Weights


class GatedMLP:
    def __init__(
        self, architecture: ModelArchitecture, weights: Weights, kernels: Kernels, prefix: str
    ) -> None:
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self._kernels = kernels
        self._activation = architecture.activation
        bias = architecture.mlp_bias
        self._gate_up = weights.linear(
            {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}, hidden, bias=bias
        )
        self._down = weights.linear({f"{prefix}.down_proj": hidden}, inner, bias=bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        return self._down(self._kernels.activation_mul(self._gate_up(hidden), self._activation))
