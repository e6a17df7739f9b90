"""Linear against float64 arithmetic, and a row's result bit for bit wherever the row stands."""

import logging

import pytest
import torch

from trimaran.model.layers import linear
from trimaran.model.layers.linear import BATCH_INVARIANT_ROWS, Linear

DTYPES = [torch.bfloat16, torch.float32]
ROWS = 130


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(linear, "packing_works", lambda dtype: False)
    return request.param


def make(out_features: int, in_features: int, dtype: torch.dtype, **options) -> Linear:
    return Linear(torch.randn(out_features, in_features).to(dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_block", [0, 16])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 130])
@pytest.mark.parametrize("biased", [True, False])
def test_product(packed, dtype, row_block, rows, biased):
    weight = torch.randn(96, 72).to(dtype)
    bias = torch.randn(96).to(dtype) if biased else None
    exact_weight, exact_bias = weight.double(), bias.double() if biased else 0.0
    layer = Linear(weight, bias, row_block=row_block)
    if packed:
        weight.fill_(float("nan"))  # the packed copy must be its own
    x = torch.randn(rows, 72).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    exact = x.double() @ exact_weight.T + exact_bias
    rtol, atol = (2**-8, 1e-5) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=atol)


def test_output_type():
    layer = make(64, 32, torch.bfloat16, out_dtype=torch.float32)
    assert layer(torch.randn(3, 32).bfloat16()).dtype == torch.float32


def test_weight_bytes():
    assert make(64, 32, torch.bfloat16).weight_bytes == 64 * 32 * 2
    assert make(64, 32, torch.float32, bias=torch.zeros(64)).weight_bytes == 64 * 32 * 4 + 64 * 4


def test_this_machine_packs_both_types():
    """Where the CPU supports it: otherwise every product below runs unpacked and proves less."""
    assert linear.packing_works(torch.float32)
    assert linear.packing_works(torch.bfloat16) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_what_cannot_be_packed_is_multiplied_all_the_same(caplog):
    with caplog.at_level(logging.INFO):
        layer = make(8, 8, torch.float64)
    assert "float64 stay unpacked" in caplog.text
    assert layer(torch.randn(2, 8).double()).shape == (2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [(640, 1536), (1024, 640), (640, 4096), (2048, 640), (4096, 512), (100, 37), (2048, 2049)],
)
def test_batch_invariance(packed, dtype, in_features, out_features):
    layer = make(out_features, in_features, dtype, row_block=BATCH_INVARIANT_ROWS)
    check_invariance(
        layer, torch.randn(ROWS, in_features).to(dtype), [1, 2, 15, 16, 17, 33, 64, ROWS]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariance_at_every_row_count(dtype):
    layer = make(96, 2048, dtype, row_block=BATCH_INVARIANT_ROWS)
    check_invariance(layer, torch.randn(ROWS, 2048).to(dtype), range(1, ROWS + 1))


def test_batch_invariance_of_a_large_head():
    layer = make(262144, 640, torch.bfloat16, row_block=BATCH_INVARIANT_ROWS)
    check_invariance(layer, torch.randn(20, 640).bfloat16(), [1, 16, 17])


def check_invariance(layer: Linear, x: torch.Tensor, row_counts) -> None:
    """Against all rows at once on two threads: fewer rows, other places, other company, one
    thread."""
    whole = layer(x)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        for count in row_counts:
            first = layer(x[:count])
            assert torch.equal(first, whole[:count]), f"the first {count} rows, {threads} threads"
        last = layer(x[-row_counts[-1] // 2 :])
        assert torch.equal(last, whole[-row_counts[-1] // 2 :]), f"the last ones, {threads} threads"
        order = torch.randperm(len(x))
        assert torch.equal(layer(x[order]), whole[order]), f"shuffled, {threads} threads"
