"""The C++ implementation of ``Kernels`` (csrc/): loading a library, calling it on data pointers.

Owns: which compiled libraries this machine can run, and the ctypes signatures. Knows nothing of
models. ``select_kernels`` chooses it; layers call it like any ``Kernels``.

The libraries use OpenMP but carry no runtime of their own: torch's is found in this process and
made visible to them, so both share one thread pool. The number of threads is the calling thread's
``torch.get_num_threads()``.
"""

import ctypes
import logging
import platform
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import torch
import torch.nn.functional as F

from trimaran.model.kernels.base import AttentionMetadata
from trimaran.model.kernels.torch_kernels import TorchKernels

logger = logging.getLogger(__name__)
FOLDER = Path(__file__).parent / "_native"
# Must equal kInterfaceVersion in csrc/simd.h: a library left by an older build is not called.
INTERFACE_VERSION = 5
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
# Best first; the features are Linux's names in /proc/cpuinfo.
_AVX2 = {"avx2", "fma"}
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"} | _AVX2
VARIANTS = {"avx512": _AVX512, "avx2": _AVX2, "generic": set[str]()}

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_RMS_NORM = [c_void_p] * 3 + [c_int64] * 2 + [c_float]
_ADD_RMS_NORM = [c_void_p] * 5 + [c_int64] * 2 + [c_float]
_ACTIVATION = [c_void_p] * 2 + [c_int64] * 2
_ROPE = [c_void_p] * 4 + [c_float] + [c_void_p] * 4 + [c_int64] * 5
_PACK = [c_void_p] * 2 + [c_int64] * 2
_LINEAR = [c_void_p] * 4 + [c_int64] * 3
_ATTENTION = [c_void_p] * 6 + [c_int64] * 7 + [c_float]


def usable_variants() -> list[str]:
    """Names of the compiled libraries that this CPU can run, best first."""
    features = cpu_features()
    return [
        name for name, needed in VARIANTS.items() if needed <= features and library(name).is_file()
    ]


def library(variant: str) -> Path:
    return FOLDER / f"kernels_{variant}.so"


def cpu_features() -> set[str]:
    """What the first core of this machine can do, in Linux's words; empty where that is unknown."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass  # not Linux, or /proc is not mounted: the generic build needs no feature
    return set()


def _openmp_runtime() -> str:
    """The OpenMP library that torch brought into this process.

    GNU's, or Intel's or LLVM's, which answer to the same names. The fallback is the system's.
    """
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(("libgomp", "libiomp5", "libomp")):
            return "/" + path
    return "libgomp.so.1"


def _check(*activations: torch.Tensor, weight: torch.Tensor | None = None) -> None:
    """What a data pointer cannot tell, and a wrong guess would turn into stray memory writes."""
    for tensor in activations:
        assert tensor.is_contiguous(), tensor.stride()
        assert tensor.dtype == activations[0].dtype, (tensor.dtype, activations[0].dtype)
    assert weight is None or weight.dtype == torch.float32, weight


def _has_attention_for(head_dim: int) -> bool:
    return head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_STEP == 0


class NativeKernels:
    """``Kernels`` in C++ for the CPU.

    Raises OSError: the library of this variant is missing, damaged, or of another version.
    """

    def __init__(self, variant: str) -> None:
        self.name = f"native-{variant}"
        ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library(variant)))
        version = self._library.interface_version()
        if version != INTERFACE_VERSION:
            raise OSError(f"{library(variant).name} is of version {version}, not the code's")
        self._rms_norm = self._bind("rms_norm", _RMS_NORM)
        self._add_rms_norm = self._bind("add_rms_norm", _ADD_RMS_NORM)
        self._activations = {
            "silu": self._bind("silu_mul", _ACTIVATION),
            "gelu_tanh": self._bind("gelu_tanh_mul", _ACTIVATION),
        }
        self._rope = self._bind("qk_norm_rope_cache", _ROPE)
        self._attention = self._bind("paged_attention", _ATTENTION)
        self._pack = self._bind("pack_linear", _PACK)
        self._linear = self._bind("linear", _LINEAR)
        self._linear_wide = self._bind("linear_wide", _LINEAR)
        self._library.packed_linear_size.argtypes = [c_int64] * 2
        self._library.packed_linear_size.restype = c_int64
        self._reference = TorchKernels()
        self._told_of_head_dim = False

    def _bind(self, name: str, argtypes: list) -> dict:
        functions = {}
        for dtype, suffix in _SUFFIXES.items():
            functions[dtype] = function = getattr(self._library, f"{name}_{suffix}")
            function.argtypes, function.restype = argtypes, None
        return functions

    def is_batch_invariant(self, head_dim: int) -> bool:
        return _has_attention_for(head_dim)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> "NativeLinear":
        return NativeLinear(self, weight, bias)

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` [out, in] in the layout of ``multiply_packed`` (csrc/linear.cpp), flat."""
        out_features, in_features = weight.shape
        size = self._library.packed_linear_size(out_features, in_features)
        packed = torch.empty(size, dtype=weight.dtype)
        self._pack[weight.dtype](packed.data_ptr(), weight.data_ptr(), out_features, in_features)
        return packed

    def multiply_packed(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        out_features: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, in] -> [T, out] in x's type, or into ``out`` fp32 [T, out]; ``bias`` fp32 [out]."""
        _check(x, packed, weight=bias)
        rows, in_features = x.shape
        function = self._linear[x.dtype]
        if out is None:
            out = torch.empty((rows, out_features), dtype=x.dtype)
        else:
            assert out.shape == (rows, out_features), out.shape
            _check(out, weight=out)
            function = self._linear_wide[x.dtype]
        function(
            out.data_ptr(), x.data_ptr(), packed.data_ptr(),
            None if bias is None else bias.data_ptr(), rows, out_features, in_features,
        )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        _check(x, weight=weight)
        out, (rows, width) = torch.empty_like(x), x.shape
        self._rms_norm[x.dtype](out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, width, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._join_and_norm(x, residual, None, weight, eps)

    def norm_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_weight: torch.Tensor,
        pre_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        return self._join_and_norm(x, residual, post_weight.data_ptr(), pre_weight, eps)

    def _join_and_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_weight: int | None,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        _check(x, weight=weight)
        _check(residual, weight=residual)
        assert x.shape == residual.shape, (x.shape, residual.shape)
        out, (rows, width) = torch.empty_like(x), x.shape
        self._add_rms_norm[x.dtype](
            out.data_ptr(), x.data_ptr(), residual.data_ptr(), post_weight, weight.data_ptr(),
            rows, width, eps,
        )  # fmt: skip
        return out

    def activation_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        _check(gate_up)
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        self._activations[activation][gate_up.dtype](
            out.data_ptr(), gate_up.data_ptr(), rows, width // 2
        )
        return out

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
        _check(qkv, kv_cache, weight=cos_sin)
        assert positions.dtype == slot_mapping.dtype == torch.int64
        tokens, block_size, head_dim = qkv.shape[0], kv_cache.shape[3], kv_cache.shape[4]
        out = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype)
        self._rope[qkv.dtype](
            out.data_ptr(), qkv.data_ptr(),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            eps, cos_sin.data_ptr(), positions.data_ptr(), kv_cache.data_ptr(),
            slot_mapping.data_ptr(), tokens, num_heads, num_kv_heads, block_size, head_dim,
        )  # fmt: skip
        return out

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        if not _has_attention_for(head_dim):
            if not self._told_of_head_dim:
                logger.warning("head size %d: plain torch computes attention, slower", head_dim)
                self._told_of_head_dim = True
            return self._reference.paged_attention(q, kv_cache, metadata, scale)
        _check(q, kv_cache)
        _, _, kv_heads, block_size, _ = kv_cache.shape
        table = metadata.block_table
        assert table.dtype == metadata.seq_lens.dtype == metadata.query_start.dtype == torch.int32
        out = torch.empty((tokens, heads * head_dim), dtype=q.dtype)
        self._attention[q.dtype](
            out.data_ptr(), q.data_ptr(), kv_cache.data_ptr(), metadata.query_start.data_ptr(),
            metadata.seq_lens.data_ptr(), table.data_ptr(), table.shape[0], heads, kv_heads,
            block_size, head_dim, table.stride(0), metadata.window, scale,
        )  # fmt: skip
        return out


class NativeLinear:
    """``Linear`` of kernels/base.py: the weight packed once, rows independent of their company."""

    is_packed = True

    def __init__(
        self, kernels: NativeKernels, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._out_features, in_features = weight.shape
        # Lanes hold pairs of bf16; no model has odd sizes, but the layout must not assume it.
        self._pad = in_features % 2
        weight = F.pad(weight, (0, self._pad)) if self._pad else weight.contiguous()
        self._wide = torch.empty((0, self._out_features))
        self._kernels = kernels
        self._packed = kernels.pack_linear(weight)
        self._bias = None if bias is None else bias.float().contiguous()
        self.held_bytes = self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        if self._pad:
            x = F.pad(x, (0, self._pad))
        out = None
        if wide:
            # Logits of a batch are tens of megabytes: new memory each step costs more than they do.
            if self._wide.shape[0] < x.shape[0]:
                self._wide = torch.empty((x.shape[0], self._out_features))
            out = self._wide[: x.shape[0]]
        return self._kernels.multiply_packed(x, self._packed, self._bias, self._out_features, out)
