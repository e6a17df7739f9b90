"""placeholder until the kernels branch is merged"""

import torch
import torch.nn.functional as F


class Linear:
    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, row_block: int = 0
    ) -> None:
        self.weight, self.bias = weight, bias
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
