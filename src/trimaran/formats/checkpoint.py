"""What a loader may ask of model files, whatever their format.

Owns: the interface. Names are those of Hugging Face checkpoints
(``model.layers.0.self_attn.q_proj.weight``, ``model.embed_tokens.weight``, ``lm_head.weight`` …);
GGUF names are mapped to them and its row permutations of q and k undone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from trimaran.formats.architecture import GenerationDefaults, ModelArchitecture, TokenizerFiles


class TensorSource(Protocol):
    """One tensor in a file, read piece by piece so that no whole copy is needed."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file; what a progress bar counts."""
        ...

    @property
    def read_dtype(self) -> str:
        """What ``read`` returns: "float32", "float16" or "bfloat16" (bit patterns in uint16)."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop of dimension 0, dequantised where needed. May be a read-only view.

        Raises CheckpointError: the file is cut or damaged here.
        """
        ...


class Checkpoint(Protocol):
    """Memory-mapped weights."""

    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> TensorSource:
        """Raises CheckpointError: no such tensor (names file and tensor)."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ModelSource:
    """Everything a model path offers, headers read and checked, weights not touched."""

    path: Path  # folder or .gguf file
    architecture: ModelArchitecture
    generation: GenerationDefaults
    tokenizer: TokenizerFiles
