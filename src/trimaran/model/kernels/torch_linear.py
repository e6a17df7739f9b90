"""Products with constant weights by torch: the reference, and what serves without compiled kernels.

Owns: how a weight is held. On the CPU it is laid out once as oneDNN's kernels want it, which is
twice as fast as ``F.linear`` for few rows. Libraries choose other code, and so other roundings, for
other row counts: this is not batch-invariant.
"""

import functools
import logging

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


class TorchLinear:
    """``Linear`` of kernels/base.py."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.is_packed = weight.device.type == "cpu" and packing_works(weight.dtype)
        self.held_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._bias = bias
        self._weight = _pack(weight) if self.is_packed else weight

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        multiply = _packed_product if self.is_packed else F.linear
        out = multiply(x, self._weight, self._bias)
        return out.float() if wide else out


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
