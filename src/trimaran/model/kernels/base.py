"""The interface of the fused operations, and the metadata that attention needs.

Owns: signatures and semantics (docs/decisions/001-kv-layout.md). Two implementations exist, tested
against each other: ``torch_kernels`` (any device, the reference) and ``native`` (C++ on the CPU).
Layers receive a ``Kernels`` object; there is no global.

Common rules: T tokens of a step lie one after another without padding; H query heads, KH key/value
heads (H a multiple of KH: query head h reads KV head h // (H // KH)), D head size. Activations are
bf16 or fp32; norm weights are fp32 and final (a family that stores w - 1 adds the 1 when loading).
Arithmetic inside an operation is fp32 and rounds to the activation type once, at its end. Every
output row depends on its own inputs only, by the same operations in the same order whatever T is.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a step belong, for one KV group. R requests, T tokens.

    All tensors lie on the model's device; R >= 1, every request has at least one token.
    """

    query_start: (
        torch.Tensor
    )  # int32 [R + 1]; request r owns tokens query_start[r] : query_start[r+1]
    seq_lens: torch.Tensor  # int32 [R]; context length including this step's tokens
    block_table: torch.Tensor  # int32 [R, max_blocks]; entry b holds positions b*block_size …
    slot_mapping: torch.Tensor  # int64 [T]; block id * block_size + offset where a token's KV goes
    max_query_len: int
    max_seq_len: int
    window: int  # 0: full; else a token sees itself and the window - 1 before it


class Linear(Protocol):
    """A product with a constant weight: x [T, in] -> x @ weight.T + bias, [T, out] in x's type."""

    held_bytes: int  # what it keeps, the given weight included unless it was packed
    is_packed: bool  # it holds a copy of its own; the given weight may be dropped

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """``wide``: fp32, not rounded to x's type where the implementation can help it, in memory
        that the next wide call may reuse."""
        ...


class Kernels(Protocol):
    """Fused operations. Inputs are contiguous unless said otherwise; outputs are new tensors."""

    name: str

    def is_batch_invariant(self, head_dim: int) -> bool:
        """Whether a row's result never depends on what else is computed with it."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Prepare products with ``weight`` [out, in] and ``bias`` [out] of one type."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension. x [T, N], weight fp32 [N]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place, then the norm of the new residual in x's type.

        The residual stream is fp32 [T, N] whatever x [T, N] is: it is what every layer's rounding
        would add up in.
        """
        ...

    def norm_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_weight: torch.Tensor,
        pre_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Gemma's sandwich: residual += rms_norm(x, post_weight) in place, then the norm of the
        new residual with pre_weight in x's type. residual fp32."""
        ...

    def activation_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up. gate_up [T, 2F] holds gate then up; returns [T, F].

        activation: "silu", or "gelu_tanh" (the tanh approximation).
        """
        ...

    def qk_norm_rope_cache(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> torch.Tensor:
        """Norm of each q and k head (if weights are given), rotary embedding, KV cache write.

        qkv [T, (H + 2 KH) * D]: q heads, k heads, v heads. cos_sin fp32 [max positions, D]: first
        half cosines, second half sines of D/2 frequencies; rotation pairs dimension i with
        i + D/2 (the Hugging Face convention). positions int64 [T]. kv_cache
        [num_blocks, 2, KH, block_size, D] gets k (index 0) and v (1) of each token at its slot.
        Returns q [T, H, D].
        """
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of this step's tokens over the paged cache, their own KV included.

        q [T, H, D], kv_cache [num_blocks, 2, KH, block_size, D]. Request r's token number i of n
        stands at position seq_lens[r] - n + i and sees positions 0 … itself, or the last
        ``metadata.window`` of these. Blocks that lie wholly before every token's window are never
        read (they may be freed). Returns [T, H * D] in q's type.
        """
        ...
