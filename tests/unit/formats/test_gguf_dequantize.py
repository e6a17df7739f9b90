"""Block decoding, bit for bit against the gguf package."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.formats.gguf_dequantize import TENSOR_TYPES, dequantize

QUANTISED = {t.name: t for t in TENSOR_TYPES.values() if t.decode}
CAN_QUANTISE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def bits(values):
    return np.ascontiguousarray(values).view(np.uint32)


def reference(blocks, name):
    with np.errstate(all="ignore"):
        return quants.dequantize(blocks, GGMLQuantizationType[name])


def test_the_table_is_ggmls():
    for number, tensor_type in TENSOR_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert tensor_type.name == kind.name
        expected = quants.GGML_QUANT_SIZES[kind]
        assert (tensor_type.block_elements, tensor_type.block_bytes) == expected
    assert {t.name for t in TENSOR_TYPES.values()} - set(QUANTISED) == {"F32", "F16", "BF16"}


@pytest.mark.parametrize("name", QUANTISED)
def test_any_bytes_decode_as_the_reference_does(name):
    tensor_type = QUANTISED[name]
    random = np.random.default_rng(1)
    # More than one piece, and a last piece that is not full.
    num_blocks = (1 << 17) // tensor_type.block_elements * 2 + 7
    blocks = random.integers(0, 256, (num_blocks, tensor_type.block_bytes), dtype=np.uint8)
    blocks[:256] = np.arange(256, dtype=np.uint8)[:, None]  # zeros, NaNs, infinities, all signs
    got = dequantize(blocks, tensor_type)
    assert got.dtype == np.float32
    assert got.shape == (num_blocks, tensor_type.block_elements)
    assert np.array_equal(bits(got), bits(reference(blocks, name)))


@pytest.mark.parametrize("name", CAN_QUANTISE)
def test_quantised_weights_come_back_close_to_what_they_were(name):
    weights = np.random.default_rng(2).standard_normal((16, 256), np.float32)
    blocks = quants.quantize(weights, GGMLQuantizationType[name])
    got = dequantize(blocks.reshape(-1, QUANTISED[name].block_bytes), QUANTISED[name])
    assert np.array_equal(bits(got.reshape(16, 256)), bits(reference(blocks, name)))
    largest = np.abs(weights).max()
    steps = {"Q4": 8, "Q5": 16, "Q8": 127}[name[:2]]
    assert np.abs(got.reshape(16, 256) - weights).max() < largest / steps * 1.1


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(QUANTISED)), st.data())
def test_extreme_bytes(name, data):
    tensor_type = QUANTISED[name]
    extremes = st.sampled_from([0, 1, 0x7B, 0x7C, 0x7E, 0x7F, 0x80, 0xFB, 0xFC, 0xFE, 0xFF])
    size = tensor_type.block_bytes
    block = data.draw(st.lists(extremes, min_size=size, max_size=size))
    blocks = np.array([block], np.uint8)
    assert np.array_equal(bits(dequantize(blocks, tensor_type)), bits(reference(blocks, name)))


def test_a_plain_type_is_not_decoded():
    with pytest.raises(ValueError, match="F32 is not quantised"):
        dequantize(np.zeros((1, 4), np.uint8), TENSOR_TYPES[0])
