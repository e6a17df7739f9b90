"""A checkpoint in memory, and a Llama small enough to make one of by hand."""

from dataclasses import dataclass

import numpy as np

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import ModelArchitecture, RopeParameters

TINY = ModelArchitecture(
    family="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    activation="silu",
    tie_word_embeddings=False,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    norm_weight_offset=0.0,
    embedding_scale=1.0,
    attention_scale=6**-0.5,
    layer_types=("full", "full"),
    sliding_window=0,
    rope={"full": RopeParameters()},
    file_dtype="float32",
)


def tiny_tensors(dtype: str = "float32") -> dict[str, np.ndarray]:
    """The tensors of TINY, random."""
    random = np.random.default_rng(5)
    shapes = {
        "model.embed_tokens.weight": (40, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (40, 16),
    }
    for prefix in ("model.layers.0", "model.layers.1"):
        shapes |= {
            f"{prefix}.input_layernorm.weight": (16,),
            f"{prefix}.post_attention_layernorm.weight": (16,),
            f"{prefix}.self_attn.q_proj.weight": (24, 16),
            f"{prefix}.self_attn.k_proj.weight": (12, 16),
            f"{prefix}.self_attn.v_proj.weight": (12, 16),
            f"{prefix}.self_attn.o_proj.weight": (16, 24),
            f"{prefix}.mlp.gate_proj.weight": (24, 16),
            f"{prefix}.mlp.up_proj.weight": (24, 16),
            f"{prefix}.mlp.down_proj.weight": (16, 24),
        }
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


@dataclass(frozen=True)
class MemoryTensor:
    """bfloat16 is held as bit patterns in uint16, as a Checkpoint gives it."""

    name: str
    data: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def stored_bytes(self) -> int:
        return self.data.nbytes

    @property
    def read_dtype(self) -> str:
        return "bfloat16" if self.data.dtype == np.uint16 else str(self.data.dtype)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A read-only view, as of a mapped file."""
        view = self.data[start:stop]
        view.flags.writeable = False
        return view


class MemoryCheckpoint:
    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> MemoryTensor:
        if name not in self._tensors:
            raise CheckpointError("no such tensor", tensor=name)
        return MemoryTensor(name, self._tensors[name])

    def close(self) -> None:
        pass
