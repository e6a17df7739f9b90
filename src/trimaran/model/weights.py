"""From tensors of a checkpoint to tensors of the model: names, shapes, types, merging, packing.

Owns: the one place where checkpoint data is cut, converted and counted (a slice for one of several
ranks would be taken here). Knows no family: the layers say which tensors they are made of.

Memory: a matrix is filled in small pieces, dequantised on all threads, packed, and dropped, so
that beyond what the model holds there is one unpacked matrix and a piece per thread.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from trimaran.errors import CheckpointError
from trimaran.formats.checkpoint import Checkpoint, TensorSource
from trimaran.model.kernels.base import Kernels, Linear

_PIECE_ELEMENTS = 1 << 19
# Parts of the decoder; what lies outside (a vision tower) is not ours to miss.
_DECODER = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")

logger = logging.getLogger(__name__)


class Weights:
    """Hands out a checkpoint's weights, each once. A context manager: it owns reading threads.

    Every method raises CheckpointError when a tensor is missing, damaged or of another shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        file: str,
        dtype: torch.dtype,
        kernels: Kernels,
        norm_weight_offset: float = 0.0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.held_bytes = 0  # by what was handed out so far
        self._checkpoint = checkpoint
        self._file = file
        self._dtype = dtype
        self._kernels = kernels
        self._norm_weight_offset = norm_weight_offset
        self._on_progress = on_progress or (lambda done, total: None)
        self._unused = dict.fromkeys(checkpoint.names())
        self._done_bytes = 0.0
        self._total_bytes = sum(
            checkpoint.tensor(name).stored_bytes for name in self._unused if _is_decoder(name)
        )
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), "load")

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def linear(self, parts: Mapping[str, int], in_features: int, *, bias: bool) -> Linear:
        """One product for all ``parts``: module name -> output features, in output order."""
        weight = self._read({f"{name}.weight": (n, in_features) for name, n in parts.items()})
        biases = self._read({f"{name}.bias": (n,) for name, n in parts.items()}) if bias else None
        linear = self._kernels.linear(weight, biases)
        self.held_bytes += linear.held_bytes
        return linear

    def tied_linear(self, table: torch.Tensor) -> Linear:
        """The head that shares its weights with an embedding, but not their layout if packed."""
        linear = self._kernels.linear(table, None)
        self.held_bytes += linear.held_bytes if linear.is_packed else 0
        return linear

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] in the model's type."""
        return self._held(self._read({name: (rows, columns)}))

    def norm(self, name: str, size: int) -> torch.Tensor:
        """fp32 [size], ready to multiply with."""
        weight = self._read({name: (size,)}, torch.float32)
        return self._held(weight.add_(self._norm_weight_offset))

    def differ(self, name: str, other: str) -> bool:
        """The file has both tensors and they are not the same: then they cannot be tied, whatever
        the configuration says. (Many files hold a tied head twice.)"""
        if name not in self._unused or other not in self._unused:
            return False
        one, two = self._checkpoint.tensor(name), self._checkpoint.tensor(other)
        same = one.shape == two.shape and all(
            self._pool.map(lambda piece: _equal_rows(one, two, *piece), _pieces(one))
        )
        if same:
            del self._unused[name]
            self._done_bytes += one.stored_bytes
            return False
        logger.warning(
            "%s: %s and %s are said to be tied but differ: both are used", self._file, name, other
        )
        return True

    def check_all_used(self) -> None:
        """Raises CheckpointError: the file has decoder weights that the architecture knows nothing
        of (a bias, a layer more): the model would compute something else than was trained."""
        strange = [name for name in self._unused if _is_decoder(name)]
        if strange:
            raise CheckpointError(
                f"the configuration names no such part (nor {len(strange) - 1} others)",
                file=self._file,
                tensor=strange[0],
                hint="config.json and weights must come from the same model",
            )
        if self._unused:
            logger.debug("unused tensors in %s: %s", self._file, ", ".join(self._unused))

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        self.held_bytes += tensor.nbytes
        return tensor

    def _read(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The named tensors under one another, in ``dtype`` or the model's type."""
        sources = [self._source(name, shape) for name, shape in shapes.items()]
        rows = sum(source.shape[0] for source in sources)
        target = torch.empty(rows, *sources[0].shape[1:], dtype=dtype or self._dtype)
        parts = target.split([source.shape[0] for source in sources])
        jobs = [
            self._pool.submit(_copy_rows, source, start, part[start : start + step])
            for source, part in zip(sources, parts, strict=True)
            for start, step in _pieces(source)
        ]
        for job in jobs:
            self._done_bytes += job.result()
            self._on_progress(round(self._done_bytes), self._total_bytes)
        return target

    def _source(self, name: str, shape: tuple[int, ...]) -> TensorSource:
        if name not in self._unused:
            raise CheckpointError(
                f"missing; the configuration asks for a tensor of shape {list(shape)}",
                file=self._file,
                tensor=name,
                hint="set tie_word_embeddings if the head is the embedding"
                if name == "lm_head.weight"
                else "config.json and weights must come from the same model",
            )
        source = self._checkpoint.tensor(name)
        if tuple(source.shape) != shape:
            raise CheckpointError(
                f"shape {list(source.shape)}; the configuration asks for {list(shape)}",
                file=self._file,
                tensor=name,
                hint="config.json and weights must come from the same model",
            )
        del self._unused[name]
        return source


def _is_decoder(name: str) -> bool:
    """A tensor without which, or with which, the decoder computes something else.

    Old checkpoints store the rotary frequencies, which follow from the configuration.
    """
    return name.startswith(_DECODER) and not name.endswith(".rotary_emb.inv_freq")


def _pieces(source: TensorSource) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of pieces that are small in fp32."""
    rows = source.shape[0] if source.shape else 0
    step = max(1, _PIECE_ELEMENTS // max(1, math.prod(source.shape[1:])))
    return ((start, min(step, rows - start)) for start in range(0, rows, step))


def _equal_rows(one: TensorSource, two: TensorSource, start: int, rows: int) -> bool:
    stop = start + rows
    return np.array_equal(one.read(start, stop), two.read(start, stop))


def _copy_rows(source: TensorSource, start: int, target: torch.Tensor) -> float:
    """Fill ``target`` with the rows from ``start``; returns the stored bytes read."""
    rows = target.shape[0]
    piece = source.read(start, start + rows)
    # torch has no read-only tensors and warns of a view of the mapped file
    values = torch.from_numpy(piece if piece.flags.writeable else piece.copy())
    if source.read_dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    with torch.inference_mode():  # a mode of each thread: the caller's does not reach here
        target.copy_(values)
    return source.stored_bytes * rows / source.shape[0]
