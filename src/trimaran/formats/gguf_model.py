"""What the metadata of a GGUF file says: architecture, generation defaults, tokenizer.

Owns: the meaning of the keys for the architectures llama (also what Mistral converts to), qwen2,
qwen3 and gemma3, with llama.cpp's defaults for absent ones. Called by model_source.
"""

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import (
    GenerationDefaults,
    ModelArchitecture,
    RopeParameters,
    TokenizerFiles,
)
from trimaran.formats.fields import Fields, show
from trimaran.formats.gguf import GgufFile
from trimaran.formats.gguf_checkpoint import ROPE_FREQUENCIES, GgufTensorSource
from trimaran.formats.model_facts import (
    END_OF_TURN_TOKENS,
    GEMMA3_PATTERN,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_THETA,
    MAX_TOKEN_ID,
    MAX_WIDTH,
    Family,
    LayerType,
    check_heads,
    periodic_layer_types,
)

_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}
_GEMMA3_27B_LAYERS = 62  # the one size whose query scale is not its head size
_CONTROL_TOKEN = 3


def read_architecture(gguf: GgufFile) -> ModelArchitecture:
    """Raises CheckpointError: an unknown architecture, or a key missing or out of range."""
    general = Fields(gguf.metadata, file=str(gguf.path))
    name = general.text("general.architecture")
    if name not in _FAMILIES:
        raise general.error(
            "general.architecture",
            f"is {show(name)}, which is not supported",
            hint=f"supported: {', '.join(_FAMILIES)}",
        )
    fields = Fields(gguf.metadata, file=str(gguf.path), prefix=f"{name}.")
    gemma = name == "gemma3"
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            "is missing or no matrix", file=str(gguf.path), tensor="token_embd.weight"
        )
    hidden_size = fields.integer("embedding_length", 1, MAX_WIDTH)
    num_heads = _same_in_all_layers(fields, "attention.head_count", MAX_HEADS)
    head_dim = fields.integer("attention.key_length", 1, MAX_WIDTH, hidden_size // num_heads or 1)
    _refuse_variants(fields, head_dim)
    layer_types = _layer_types(fields, gemma)
    architecture = ModelArchitecture(
        family=_FAMILIES[name],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_same_in_all_layers(fields, "feed_forward_length", MAX_WIDTH),
        num_layers=len(layer_types),
        num_heads=num_heads,
        num_kv_heads=_same_in_all_layers(fields, "attention.head_count_kv", MAX_HEADS, num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length", 1, MAX_POSITIONS),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        activation="gelu_tanh" if gemma else "silu",
        tie_word_embeddings="output.weight" not in gguf.tensors,
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        attention_output_bias="blk.0.attn_output.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_up.bias" in gguf.tensors,
        qk_norm=name in ("qwen3", "gemma3"),
        norm_weight_offset=0.0,  # converters add Gemma's 1
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        attention_scale=_attention_scale(fields, gemma, head_dim, hidden_size // num_heads),
        layer_types=layer_types,
        sliding_window=(
            fields.integer("attention.sliding_window", 1, MAX_POSITIONS)
            if "sliding" in layer_types
            else 0
        ),
        rope=_rope(gguf, fields, layer_types, head_dim),
        file_dtype="bfloat16",
    )
    check_heads(architecture, str(gguf.path))
    return architecture


def read_generation(gguf: GgufFile) -> GenerationDefaults:
    """The end-of-sequence ids are those the file names and its end-of-turn control tokens."""
    fields = Fields(gguf.metadata, file=str(gguf.path), prefix="tokenizer.ggml.")
    ids = {
        key: fields.integer(key, 0, MAX_TOKEN_ID)
        for key in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
        if fields.get(key) is not None
    }
    bos_token_id = ids.pop("bos_token_id", None)
    tokens, types = fields.get("tokens") or [], fields.get("token_type") or []
    if not isinstance(tokens, list) or not isinstance(types, list):
        raise fields.error("tokens", "and token_type must be arrays")
    ends = {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL_TOKEN and token in END_OF_TURN_TOKENS
    }
    return GenerationDefaults(bos_token_id, tuple(sorted(ends.union(ids.values()))))


def read_tokenizer(gguf: GgufFile) -> TokenizerFiles:
    entries = {k: v for k, v in gguf.metadata.items() if k.startswith("tokenizer.")}
    named = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in entries.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    fields = Fields(entries, file=str(gguf.path))
    template = fields.text("tokenizer.chat_template", "") or None
    if named and template:
        named["default"] = template
    return TokenizerFiles(
        fingerprint=gguf.tokenizer_sha256,
        gguf=entries,
        chat_template=template,
        chat_templates=named,
    )


def _same_in_all_layers(fields: Fields, key: str, high: int, default: int | None = None) -> int:
    """An integer from 1 to ``high``, given once or as an equal value for every layer."""
    value = fields.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise fields.error(key, f"differs by layer ({show(value)}), which is not supported")
        fields = Fields({fields.prefix + key: value[0]}, file=fields.file, prefix=fields.prefix)
    return fields.integer(key, 1, high, default)


def _refuse_variants(fields: Fields, head_dim: int) -> None:
    """Keys that change the math in ways the supported families do not know."""
    must_be = {
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "expert_count": 0,
        "attn_logit_softcapping": 0,
        "final_logit_softcapping": 0,
        "rope.scaling.attn_factor": 1,
    }
    for key, only in must_be.items():
        value = fields.get(key)
        if value is not None and value != only:
            raise fields.error(key, f"is {show(value)}; only {only} is supported")


def _layer_types(fields: Fields, gemma: bool) -> tuple[LayerType, ...]:
    num_layers = fields.integer("block_count", 1, MAX_LAYERS)
    if not gemma or not fields.get("attention.sliding_window"):
        return tuple(periodic_layer_types(num_layers, 1))
    key = "attention.sliding_window_pattern"
    pattern = fields.get(key)
    if isinstance(pattern, list):  # one entry a layer, true where it slides
        if len(pattern) != num_layers:
            raise fields.error(key, f"has {len(pattern)} entries for {num_layers} layers")
        types: list[LayerType] = ["sliding" if slides else "full" for slides in pattern]
        return tuple(types)
    period = fields.integer(key, 1, MAX_LAYERS, GEMMA3_PATTERN)
    return tuple(periodic_layer_types(num_layers, period))


def _attention_scale(fields: Fields, gemma: bool, head_dim: int, hidden_per_head: int) -> float:
    scale = fields.optional_number("attention.scale", 1e-6, 1e6)
    if scale is not None:
        return scale
    if gemma and fields.get("block_count") == _GEMMA3_27B_LAYERS:
        return float(hidden_per_head**-0.5)
    return float(head_dim**-0.5)


def _rope(
    gguf: GgufFile, fields: Fields, layer_types: tuple[str, ...], head_dim: int
) -> dict[str, RopeParameters]:
    gemma = fields.prefix == "gemma3."
    theta = fields.number("rope.freq_base", 1.0, MAX_THETA, 1e6 if gemma else 1e4)
    rope = {"full": _scaled_rope(gguf, fields, theta, head_dim)}
    if "sliding" in layer_types:
        local = fields.number("rope.freq_base_swa", 1.0, MAX_THETA, 1e4)
        rope["sliding"] = RopeParameters(theta=local)
    return rope


def _scaled_rope(gguf: GgufFile, fields: Fields, theta: float, head_dim: int) -> RopeParameters:
    factors = _frequency_factors(gguf, head_dim)
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.number("rope.scaling.factor", 0.0, 1e6, 0.0) or fields.number(
        "rope.scale_linear", 0.0, 1e6, 0.0
    )
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeParameters(theta=theta, frequency_factors=factors)
    if kind == "linear":
        return RopeParameters("linear", theta, factor, frequency_factors=factors)
    if kind != "yarn":
        raise fields.error(
            "rope.scaling.type",
            f"is {show(kind)}, which is not supported",
            hint="supported: none, linear, yarn",
        )
    factor = factor or 1.0
    return RopeParameters(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length",
            1,
            MAX_POSITIONS,
            fields.integer("context_length", 1, MAX_POSITIONS),
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 0.0, 1e6, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 0.0, 1e6, 1.0),
        frequency_factors=factors,
    )


def _frequency_factors(gguf: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    """Llama 3.1's scaling, which its converter writes out as a tensor of divisors."""
    stored = gguf.tensors.get(ROPE_FREQUENCIES)
    if stored is None:
        return None
    if stored.shape != (head_dim // 2,) or stored.type.name != "F32":
        raise CheckpointError(
            f"is {stored.type.name} of shape {stored.shape}, not F32 of ({head_dim // 2},)",
            file=str(gguf.path),
            tensor=ROPE_FREQUENCIES,
        )
    factors = GgufTensorSource(ROPE_FREQUENCIES, stored).read()
    if not ((factors > 0) & (factors < 1e6)).all():
        raise CheckpointError(
            "holds factors that are not above 0 and finite",
            file=str(gguf.path),
            tensor=ROPE_FREQUENCIES,
        )
    return tuple(factors.tolist())
