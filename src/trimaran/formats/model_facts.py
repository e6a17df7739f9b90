"""What the readers of config.json and of GGUF metadata share about models.

Owns: closed ranges (far above any real model, far below what overflows or exhausts), the checks of
shape that both need, Gemma 3's layer pattern, and the names of tokens that end a turn.
"""

from typing import Literal

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import ModelArchitecture

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
LayerType = Literal["full", "sliding"]

MAX_WIDTH = 1 << 20  # hidden, intermediate and head sizes
MAX_HEADS = 1 << 12
MAX_LAYERS = 1 << 10
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 30
MAX_THETA = 1e15
MAX_TOKEN_ID = (1 << 31) - 1

GEMMA3_PATTERN = 6  # every sixth layer sees everything, the others slide

# Control tokens that end an assistant's turn in the templates of the supported families. A model
# whose files leave one out of its end-of-sequence ids would never stop in a chat.
END_OF_TURN_TOKENS = frozenset(
    {"<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"}
)


def periodic_layer_types(num_layers: int, period: int) -> list[LayerType]:
    """Every ``period``-th layer full, counted from 1; the others sliding."""
    return ["sliding" if layer % period else "full" for layer in range(1, num_layers + 1)]


def check_heads(architecture: ModelArchitecture, file: str) -> None:
    """Raise CheckpointError unless query heads divide into groups and heads into rotary pairs."""
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % kv_heads:
        raise CheckpointError(f"{heads} heads do not divide by {kv_heads} KV heads", file=file)
    if architecture.head_dim % 2:
        raise CheckpointError(f"the head size {architecture.head_dim} is odd", file=file)
