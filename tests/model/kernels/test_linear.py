"""Products against float64 arithmetic, and a row's result bit for bit wherever the row stands."""

import logging

import pytest
import torch

from trimaran.model.kernels import torch_linear
from trimaran.model.kernels.native import NativeKernels, usable_variants
from trimaran.model.kernels.torch_linear import TorchLinear

DTYPES = [torch.bfloat16, torch.float32]
ROWS = 130
SHAPES = [(640, 1536), (1024, 640), (640, 4096), (2048, 640), (100, 37), (2048, 2049), (33, 31)]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch-packed", "torch-plain", *usable_variants()])
def make(request, monkeypatch):
    """weight, bias -> Linear, by each implementation this machine can run."""
    if request.param == "torch-plain":
        monkeypatch.setattr(torch_linear, "packing_works", lambda dtype: False)
    if request.param.startswith("torch"):
        return TorchLinear
    return NativeKernels(request.param).linear


@pytest.fixture(params=usable_variants())
def native(request):
    return NativeKernels(request.param)


def test_the_compiled_kernels_are_built():
    assert usable_variants(), "run: python setup.py build_ext --inplace"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 130])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), [(72, 96), (33, 31), (640, 100)])
def test_product(make, dtype, rows, biased, in_features, out_features):
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype) if biased else None
    exact_weight, exact_bias = weight.double(), bias.double() if biased else 0.0
    layer = make(weight, bias)
    if layer.is_packed:
        weight.fill_(float("nan"))  # the packed copy must be its own
    x = torch.randn(rows, in_features).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    wide = layer(x, wide=True)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), out)
    exact = x.double() @ exact_weight.T + exact_bias
    rtol, atol = (2**-8, 1e-4) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=atol)
    if not isinstance(layer, TorchLinear):
        torch.testing.assert_close(wide.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_held_bytes(make, dtype):
    size = dtype.itemsize
    assert make(torch.ones(64, 32, dtype=dtype), None).held_bytes == 64 * 32 * size
    with_bias = make(torch.ones(64, 32, dtype=dtype), torch.zeros(64, dtype=dtype)).held_bytes
    assert with_bias - 64 * 32 * size in (64 * size, 64 * 4)


def test_this_machine_packs_both_types():
    """Where the CPU supports it: otherwise the packed case above proves less."""
    assert torch_linear.packing_works(torch.float32)
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert torch_linear.packing_works(torch.bfloat16) == supported


def test_what_cannot_be_packed_is_multiplied_all_the_same(caplog):
    with caplog.at_level(logging.INFO):
        layer = TorchLinear(torch.ones(8, 8, dtype=torch.float64), None)
    assert "float64 stay unpacked" in caplog.text
    assert layer(torch.randn(2, 8).double()).shape == (2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_batch_invariance(native, dtype, in_features, out_features):
    layer = native.linear(torch.randn(out_features, in_features).to(dtype), None)
    x = torch.randn(ROWS, in_features).to(dtype)
    check_invariance(layer, x, [1, 2, 3, 7, 8, 9, 16, 33, 64, ROWS])


def test_batch_invariance_of_a_large_head():
    layer = NativeKernels(usable_variants()[0]).linear(torch.randn(262144, 640).bfloat16(), None)
    check_invariance(layer, torch.randn(20, 640).bfloat16(), [1, 16, 17])


def check_invariance(layer, x: torch.Tensor, row_counts) -> None:
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
