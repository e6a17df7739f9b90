"""The plain-torch implementation of ``Kernels``: any device, written to be read, the reference."""

import torch
import torch.nn.functional as F

from trimaran.model.kernels.base import AttentionMetadata
from trimaran.model.kernels.torch_linear import TorchLinear


class TorchKernels:
    name = "torch"

    def is_batch_invariant(self, head_dim: int) -> bool:
        return False  # libraries choose other code for other row counts

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual += x.float()
        return self.rms_norm(residual, weight, eps).to(x.dtype)

    def norm_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_weight: torch.Tensor,
        pre_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        residual += wide * scale * post_weight
        return self.rms_norm(residual, pre_weight, eps).to(x.dtype)

    def activation_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (gate * up).to(gate_up.dtype)

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
        num_tokens, head_dim = qkv.shape[0], kv_cache.shape[-1]
        heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = q.float(), k.float()
        if q_weight is not None:
            q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + eps) * q_weight
        if k_weight is not None:
            k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + eps) * k_weight
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
        q, k = _rotate(q, cos, sin).to(qkv.dtype), _rotate(k, cos, sin)
        block_size = kv_cache.shape[3]
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        kv_cache[blocks, 0, :, offsets] = k.to(kv_cache.dtype)
        kv_cache[blocks, 1, :, offsets] = v.to(kv_cache.dtype)
        return q

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
        out = torch.empty_like(q)
        starts = metadata.query_start.tolist()
        for r, length in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[r], starts[r + 1]
            first_query = length - (end - begin)  # position of the first token of this step
            oldest = max(0, first_query - metadata.window + 1) if metadata.window else 0
            first_block = oldest // block_size
            table = metadata.block_table[r, first_block : -(-length // block_size)].long()
            keys, values = (
                kv_cache[table, part].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)
                for part in (0, 1)
            )
            base = first_block * block_size
            keys, values = keys[: length - base].float(), values[: length - base].float()
            key_at = torch.arange(base, length, device=q.device)
            query_at = torch.arange(first_query, length, device=q.device).unsqueeze(1)
            visible = key_at <= query_at
            if metadata.window:
                visible &= key_at > query_at - metadata.window
            grouped = q[begin:end].float().view(end - begin, num_kv_heads, -1, head_dim)
            scores = torch.einsum("qkgd,skd->kgqs", grouped, keys) * scale
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            # A slot no token has written may hold anything, NaN included; 0 x NaN would spread it.
            values = values.masked_fill(~visible.any(0)[:, None, None], 0.0)
            mixed = torch.einsum("kgqs,skd->qkgd", weights, values)
            out[begin:end] = mixed.reshape(end - begin, num_heads, head_dim).to(q.dtype)
        return out.view(num_tokens, num_heads * head_dim)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
