"""Matrix products with constant weights: packed for the CPU, in fixed row blocks where asked for.

Owns: how a weight is held and multiplied. Does not know which layer it serves, nor how weights
are loaded or sharded. Model layers make one per matrix.

On the CPU a weight is laid out once as oneDNN's kernels want it (twice the speed of ``F.linear``
for few rows). Libraries choose other code, and so other roundings, for other row counts; with
``row_block`` every product is made of exactly that many rows (docs/decisions/002-cpu-kernels.md),
and then a row's result does not depend on where it stands, what stands beside it, or the number of
threads.
"""

import functools
import logging

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

# The block of `--batch-invariant`, by measurement: docs/decisions/002-cpu-kernels.md.
BATCH_INVARIANT_ROWS = 16


class Linear:
    """x [T, in] -> [T, out] in x's type, or in ``out_dtype``; x and the weight share one type.

    ``weight_bytes`` is what it holds for good, but for the padding of packed layouts.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in]; may be released by the caller afterwards
        bias: torch.Tensor | None = None,  # [out]
        *,
        row_block: int = 0,  # 0: as many rows at once as there are
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._row_block = row_block
        self._out_dtype = out_dtype
        self._bias = bias
        self._packed = weight.device.type == "cpu" and packing_works(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._in_blocks(x) if self._row_block else self._multiply(x)
        return out if self._out_dtype is None else out.to(self._out_dtype)

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        rows, block = x.shape[0], self._row_block
        missing = -rows % block
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        parts = [self._multiply(part) for part in x.split(block)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return _packed_product(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def _packed_product(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this torch and CPU multiply packed weights of a type: they are tried once."""
    weight, x = torch.eye(32, dtype=dtype), torch.arange(64.0).view(2, 32).to(dtype)
    try:
        works = torch.equal(_packed_product(x, _pack(weight), None), x)
        reason = "the result is wrong"
    except (AttributeError, RuntimeError) as error:  # no such operation, or not for this type
        works, reason = False, str(error).partition("\n")[0]
    if not works:
        logger.info("weights of type %s stay unpacked (%s): slower", dtype, reason)
    return works
