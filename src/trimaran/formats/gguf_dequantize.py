"""GGUF tensor types: their block layouts, and decoding blocks to float32 with numpy.

Owns: the table of types and the arithmetic, which is bit for bit that of ggml's reference
(formulas: ggml/src/ggml-quants.c, dequantize_row_*). Called by gguf (sizes) and gguf_checkpoint.
Decoding goes through cache-sized pieces, so that temporaries stay small and cheap.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_PIECE_ELEMENTS = 1 << 17
_Decoder = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class TensorType:
    """``block_bytes`` bytes in the file hold ``block_elements`` values."""

    name: str
    block_elements: int
    block_bytes: int
    # Fills float32[n, block_elements] from uint8[n, block_bytes]; None: stored as plain values.
    decode: _Decoder | None = None
    plain_dtype: str = "float32"  # what reading gives; bfloat16 as bit patterns in uint16


def dequantize(blocks: np.ndarray, tensor_type: TensorType) -> np.ndarray:
    """float32[n, block_elements] of uint8[n, block_bytes]; a quantised ``tensor_type`` only."""
    decode = tensor_type.decode
    if decode is None:
        raise ValueError(f"{tensor_type.name} is not quantised")
    out = np.empty((len(blocks), tensor_type.block_elements), np.float32)
    step = _PIECE_ELEMENTS // tensor_type.block_elements
    # Scales of a damaged file may be infinite or NaN; the values then are too, without warnings.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], out[start : start + step])
    return out


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """float32[n, 1]: the float16 at byte ``offset`` of each block."""
    return blocks[:, offset : offset + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8[..., 2, k] of uint8[..., k]: all low halves, then all high halves."""
    out = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0x0F, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])
    return out


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """uint8[n, 32] of the fifth bits, uint8[n, 4], and the nibbles, uint8[n, 16]."""
    values = _nibbles(low).reshape(-1, 32)
    values |= np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    return values


def _signed(values: np.ndarray, zero: int) -> np.ndarray:
    """int8 of ``values`` - ``zero``."""
    values -= np.uint8(zero)  # wraps, and the view reads it as negative
    return values.view(np.int8)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _signed(_nibbles(blocks[:, 2:]), 8).reshape(-1, 32)
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _nibbles(blocks[:, 4:]).reshape(-1, 32)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _signed(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16)
    out *= _half(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _scale_and_minimum(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[n, 8, 1] each: scale and offset of the 8 sub-blocks of Q4_K and Q5_K.

    Twelve bytes hold 8 + 8 six-bit numbers: bytes 0-3 scales 0-3, bytes 4-7 minima 0-3, bytes 8-11
    low halves of scales (low nibble) and minima (high nibble) 4-7, whose top bits are those of 0-7.
    """
    packed = blocks[:, 4:16]
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (low & 0x0F) | ((first >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([second & 0x3F, (low >> 4) | ((second >> 2) & 0x30)], axis=-1)
    return (
        (_half(blocks, 0) * scales.astype(np.float32))[..., None],
        (_half(blocks, 2) * minima.astype(np.float32))[..., None],
    )


def _scale_k(values: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
    scale, minimum = _scale_and_minimum(blocks)
    parts = out.reshape(-1, 8, 32)
    parts[...] = values.reshape(-1, 8, 32)
    parts *= scale
    parts -= minimum


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _scale_k(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)), blocks, out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    values = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]  # bit i: sub-block i
    high &= 1
    high <<= 4
    values |= high
    _scale_k(values, blocks, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    values = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts
    high &= 3
    high <<= 4
    values |= high
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    parts = out.reshape(-1, 16, 16)
    parts[...] = _signed(values, 32).reshape(-1, 16, 16)
    parts *= scale[..., None]


# By the numbers that GGUF files use (ggml.h, enum ggml_type).
TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2, plain_dtype="float16"),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    6: TensorType("Q5_0", 32, 22, _q5_0),
    7: TensorType("Q5_1", 32, 24, _q5_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    30: TensorType("BF16", 1, 2, plain_dtype="bfloat16"),
}
# Names of the others, for messages only.
UNSUPPORTED_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
