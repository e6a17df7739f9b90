"""The one description of a model's shape, whatever file it came from.

Owns: the normalised fields. Filled by ``config_json`` (folders) and ``gguf_model`` (GGUF files);
read by text/ (ids, lengths), engine/ (limits) and model/ (the math). Holds no tensors.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of one layer type. kind decides which of the rest matter."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from factor, mscale and mscale_all_dim
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    # GGUF rope_freqs.weight: divides the inverse frequencies (llama3 baked in), length D/2.
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelArchitecture:
    """Shape and constants of a decoder-only transformer."""

    family: Literal["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    tie_word_embeddings: bool
    attention_bias: bool  # q, k and v have biases
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    # Added to every norm weight when loading: 1 for Gemma safetensors, else 0 (GGUF has it in).
    norm_weight_offset: float
    embedding_scale: float  # sqrt(hidden_size) for Gemma, else 1
    attention_scale: float  # multiplies q·k
    layer_types: tuple[Literal["full", "sliding"], ...]
    sliding_window: int  # 0: none; else a token sees itself and the window - 1 before it
    rope: dict[str, RopeParameters]  # by layer type
    file_dtype: Literal["bfloat16", "float16", "float32"]  # of the checkpoint (GGUF: bfloat16)


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's files say of generation."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # union over config, generation_config and tokenizer
    max_new_tokens: int | None = None
    # temperature, top_p, top_k, repetition_penalty … as given by generation_config.json
    sampling: dict[str, float | int] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerFiles:
    """Where the tokenizer comes from: a tokenizer.json, or the metadata of a GGUF file.

    ``gguf`` holds the ``tokenizer.*`` keys as the file has them (lists as Python lists).
    ``config`` is tokenizer_config.json (or {}).
    ``fingerprint`` is a SHA-256 over what the tokenizer is built from: the cache key of text/.
    """

    fingerprint: str
    tokenizer_json: str | None = None  # path
    gguf: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    # Jinja source; None: a base model. Named templates ({"default": …, "tool_use": …}) as given.
    chat_template: str | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)
