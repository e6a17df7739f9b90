"""Each compiled library against the plain-torch kernels, on everything a shape can be.

bf16 results are held against the reference computed in fp32 from the same bf16 inputs, so that the
only error allowed is the one rounding at the end (and, in attention, that of bf16 weights).
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.kernels.scenario import Shape, make_paged

from trimaran.model.kernels.native import NativeKernels
from trimaran.model.kernels.torch_kernels import TorchKernels

REFERENCE = TorchKernels()
DTYPES = [torch.bfloat16, torch.float32]
BF16_ROUNDING = 2.0**-8
TOKENS = [1, 2, 3, 33, 130]
WIDTHS = [640, 16, 7, 65]


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """``expected`` in fp32, exact but for fp32 rounding."""
    rtol = BF16_ROUNDING if got.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.float(), expected, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_norms(native, tokens, width, dtype):
    x, residual = (3 * torch.randn(tokens, width)).to(dtype), 3 * torch.randn(tokens, width)
    post, pre = torch.randn(width), torch.randn(width)
    assert_near(native.rms_norm(x, pre, 1e-5), REFERENCE.rms_norm(x.float(), pre, 1e-5))

    stream = residual.clone()
    out = native.add_rms_norm(x, stream, pre, 1e-5)
    assert_near(stream, residual.float() + x.float())
    assert_near(out, REFERENCE.rms_norm(stream.float(), pre, 1e-5))

    stream = residual.clone()
    out = native.norm_add_rms_norm(x, stream, post, pre, 1e-5)
    expected = residual.float() + REFERENCE.rms_norm(x.float(), post, 1e-5)
    # Where the two addends cancel, their own fp32 rounding shows.
    torch.testing.assert_close(
        stream.float(), expected, rtol=BF16_ROUNDING if dtype == torch.bfloat16 else 2e-6, atol=1e-5
    )
    assert_near(out, REFERENCE.rms_norm(stream.float(), pre, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [2048, 16, 7])
@pytest.mark.parametrize("tokens", TOKENS)
def test_activations(native, tokens, width, activation, dtype):
    gate_up = (4 * torch.randn(tokens, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)  # torch's own fp32 gelu is the less exact one
    exact = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    assert_near(native.activation_mul(gate_up, activation), exact.float())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_over_the_whole_range(native, activation):
    """Dense in value, to the ends of fp32: no overflow turns into NaN, no tail is lost."""
    gate = torch.cat((torch.linspace(-100, 100, 200_001), torch.tensor([-3e38, 3e38, 0.0, -0.0])))
    gate_up = torch.stack((gate, torch.ones_like(gate))).T.contiguous().view(-1, 2)
    got = native.activation_mul(gate_up, activation)[:, 0].double()
    wide = gate.double()
    inner = 2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    exact = wide * torch.sigmoid(wide if activation == "silu" else inner)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)
    assert native.activation_mul(torch.tensor([[float("nan"), 1.0]]), activation).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 256), (8, 8, 64), (6, 2, 20)])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_qk_norm_rope_cache(native, tokens, heads, kv_heads, dim, normed, dtype):
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    q_weight, k_weight = (torch.randn(dim) if normed else None for _ in range(2))
    cos_sin = torch.randn(100, dim)
    positions = torch.randint(100, (tokens,))
    slots = torch.randperm(8 * 16)[:tokens]
    caches = [
        torch.full((8, 2, kv_heads, 16, dim), float("nan"), dtype=t) for t in (dtype, torch.float32)
    ]
    got, expected = (
        kernels.qk_norm_rope_cache(
            x, q_weight, k_weight, 1e-6, cos_sin, positions, cache, slots, heads, kv_heads
        )
        for kernels, x, cache in zip((native, REFERENCE), (qkv, qkv.float()), caches, strict=True)
    )
    assert_near_or_cancelled(got, expected)
    # NaN where no token was put, in both.
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert_near_or_cancelled(caches[0].nan_to_num(), caches[1].nan_to_num())


def assert_near_or_cancelled(got: torch.Tensor, expected: torch.Tensor) -> None:
    """A rotation subtracts: fp32 errors of the products remain where they cancel."""
    rtol = BF16_ROUNDING if got.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.float(), expected, rtol=rtol, atol=1e-5)


def check_attention(native: NativeKernels, shape: Shape, lengths: list[tuple[int, int]]) -> None:
    paged = make_paged(shape, lengths)
    got = native.paged_attention(paged.q, paged.cache, paged.metadata, paged.scale)
    expected = REFERENCE.paged_attention(
        paged.q.float(), paged.cache.float(), paged.metadata, paged.scale
    )
    assert got.dtype == shape.dtype
    wide = shape.dtype == torch.float32
    torch.testing.assert_close(
        got.float(), expected, rtol=1e-5 if wide else BF16_ROUNDING, atol=1e-5 if wide else 4e-3
    )


MIXED = [(1, 1), (1, 160), (37, 300), (130, 130), (1, 513), (5, 1030), (1, 256), (1, 257)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window"),
    [
        (4, 1, 256, 16, 0),
        (4, 1, 256, 16, 100),
        (3, 3, 64, 8, 1),
        (4, 2, 16, 24, 0),
        (8, 2, 128, 64, 100),
        (8, 1, 80, 16, 512),
        (70, 1, 48, 32, 0),
    ],
)
def test_attention(native, heads, kv_heads, dim, block_size, window, dtype):
    check_attention(native, Shape(heads, kv_heads, dim, block_size, window, dtype), MIXED)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Shape, list[tuple[int, int]]]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    shape = Shape(
        heads=kv_heads * draw(st.sampled_from([1, 2, 4, 5, 8])),
        kv_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, 16)),
        block_size=draw(st.integers(8, 64)),
        window=draw(st.one_of(st.just(0), st.integers(1, 600))),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    request = st.tuples(st.one_of(st.just(1), st.integers(1, 90)), st.integers(0, 600))
    lengths = draw(st.lists(request, min_size=1, max_size=5))
    return shape, [(tokens, before + tokens) for tokens, before in lengths]


@given(batch=batches())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_attention_of_any_batch(variant, batch):
    check_attention(NativeKernels(variant), *batch)


def test_attention_takes_a_wider_table(native):
    """Rows of a persistent block table: more columns than this batch needs, stale beyond."""
    paged = make_paged(Shape(), [(1, 40), (3, 20)])
    wide = torch.full((2, 99), 2**31 - 1, dtype=torch.int32)
    columns = paged.metadata.block_table.shape[1]
    wide[:, :columns] = paged.metadata.block_table
    view = wide[:, : columns + 3]
    metadata = paged.metadata.__class__(**{**vars(paged.metadata), "block_table": view})
    got = native.paged_attention(paged.q, paged.cache, metadata, paged.scale)
    same = native.paged_attention(paged.q, paged.cache, paged.metadata, paged.scale)
    assert torch.equal(got, same)


def test_a_head_size_beyond_the_kernel_is_served_by_the_reference(native, caplog):
    for head_dim in (272, 40, 272):
        check_attention(native, Shape(heads=2, kv_heads=1, head_dim=head_dim), [(3, 20)])
    assert [record.message[:13] for record in caplog.records] == ["head size 272"]
