"""The plain-torch kernels against torch's own functions: the reference must be right itself."""

import pytest
import torch
import torch.nn.functional as F
from tests.model.kernels.scenario import Shape, make_paged

from trimaran.model.kernels.torch_kernels import TorchKernels

KERNELS = TorchKernels()


def test_norms():
    x, residual = torch.randn(3, 40), torch.randn(3, 40)
    post, pre = torch.randn(40), torch.randn(40)
    torch.testing.assert_close(KERNELS.rms_norm(x, pre, 1e-5), F.rms_norm(x, (40,), pre, 1e-5))

    stream = residual.clone()
    out = KERNELS.add_rms_norm(x, stream, pre, 1e-5)
    torch.testing.assert_close(stream, residual + x)
    torch.testing.assert_close(out, F.rms_norm(residual + x, (40,), pre, 1e-5))

    stream = residual.clone()
    out = KERNELS.norm_add_rms_norm(x, stream, post, pre, 1e-5)
    expected = residual + F.rms_norm(x, (40,), post, 1e-5)
    torch.testing.assert_close(stream, expected)
    torch.testing.assert_close(out, F.rms_norm(expected, (40,), pre, 1e-5))


def test_activations():
    gate, up = torch.randn(3, 40), torch.randn(3, 40)
    both = torch.cat((gate, up), dim=1)
    torch.testing.assert_close(KERNELS.activation_mul(both, "silu"), F.silu(gate) * up)
    gelu = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(KERNELS.activation_mul(both, "gelu_tanh"), gelu)


def test_rotation_turns_pairs_by_their_angle():
    """As complex numbers: (x[i] + j x[i + D/2]) * e^(j angle)."""
    tokens, dim, block = 5, 8, 4
    qkv = torch.randn(tokens, 3 * dim)
    angles = torch.randn(16, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([3, 4, 5, 0, 1]), torch.tensor([7, 8, 9, 12, 13])
    cache = torch.zeros(4, 2, 1, block, dim)
    q = KERNELS.qk_norm_rope_cache(
        qkv, None, None, 1e-6, cos_sin, positions, cache, slots, num_heads=1, num_kv_heads=1
    )

    def turned(x: torch.Tensor) -> torch.Tensor:
        spun = torch.complex(x[:, :4], x[:, 4:]) * torch.polar(torch.ones(5, 4), angles[positions])
        return torch.cat((spun.real, spun.imag), dim=1)

    torch.testing.assert_close(q[:, 0], turned(qkv[:, :dim]))
    torch.testing.assert_close(
        cache[:, 0, 0].reshape(-1, dim)[slots], turned(qkv[:, dim : 2 * dim])
    )
    torch.testing.assert_close(cache[:, 1, 0].reshape(-1, dim)[slots], qkv[:, 2 * dim :])
    untouched = torch.ones(16, dtype=torch.bool).index_fill(0, slots, False)
    assert not cache[:, :, 0].transpose(1, 2).reshape(16, -1)[untouched].any()


@pytest.mark.parametrize("window", [0, 9])
def test_attention(window):
    paged = make_paged(
        Shape(heads=4, kv_heads=2, head_dim=32, block_size=8, window=window, dtype=torch.float32),
        [(1, 1), (1, 30), (12, 12), (7, 40)],
    )
    out = KERNELS.paged_attention(paged.q, paged.cache, paged.metadata, paged.scale)
    begin = 0
    for r, (tokens, context) in enumerate(paged.lengths):
        at = torch.arange(context)
        query_at = at[context - tokens :].unsqueeze(1)
        visible = (at <= query_at) & (at > query_at - window if window else at >= 0)
        expected = F.scaled_dot_product_attention(
            paged.q[begin : begin + tokens].transpose(0, 1),
            paged.keys[r].nan_to_num().transpose(0, 1),
            paged.values[r].nan_to_num().transpose(0, 1),
            attn_mask=visible,
            enable_gqa=True,
        )
        got = out[begin : begin + tokens].view(tokens, 4, 32).transpose(0, 1)
        torch.testing.assert_close(got, expected)
        begin += tokens
