"""config.json and generation_config.json of a Hugging Face folder to our descriptions.

Owns: the keys of the families llama, mistral, qwen2, qwen3 and gemma3 (text), in their old and new
spellings, with transformers' defaults for absent ones. Keys that would change the math in ways not
supported are refused by name; auto_map and trust_remote_code are not looked at. Called by
model_source.
"""

from typing import Any, Literal

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import GenerationDefaults, ModelArchitecture
from trimaran.formats.fields import Fields, show
from trimaran.formats.model_facts import (
    GEMMA3_PATTERN,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_TOKEN_ID,
    MAX_VOCAB,
    MAX_WIDTH,
    Family,
    LayerType,
    check_heads,
    periodic_layer_types,
)
from trimaran.formats.rope_config import read_rope

FileDtype = Literal["bfloat16", "float16", "float32"]

_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3_text",
}
_MODEL_TYPES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3_text",
    "gemma3": "gemma3_text",
}
# What transformers' config classes take for absent keys. Files lean on them: the first Gemma 3
# configs give only what differs from these.
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
_QWEN_WINDOW_FROM_LAYER = 28
_DTYPES: dict[str, FileDtype] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}


def text_config(config: dict[str, Any], file: str) -> tuple[Family, Fields]:
    """The family, and the keys of its text model with transformers' defaults beneath them."""
    top = Fields(config, file=file)
    family = _family(top)
    text = top.section("text_config").values
    values = config | {key: value for key, value in text.items() if value is not None}
    for key, default in _DEFAULTS[family].items():
        values.setdefault(key, default)
    return family, Fields(values, file=file)


def read_architecture(
    config: dict[str, Any], file: str, *, weights_dtype: str
) -> ModelArchitecture:
    """``weights_dtype`` is the file's own, for a config that names none.

    Raises CheckpointError: an unknown family, a missing key, a value out of range, or a feature
    that is not supported.
    """
    family, fields = text_config(config, file)
    gemma = family == "gemma3_text"
    _refuse_variants(fields)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = fields.integer("head_dim", 1, MAX_WIDTH, hidden_size // num_heads or 1)
    bias = family not in ("mistral", "qwen2") and fields.boolean("attention_bias", False)
    layer_types, window = _layer_types(family, fields)
    scalar = fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0) if gemma else head_dim
    architecture = ModelArchitecture(
        family=family,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=len(layer_types),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        activation=_activation(family, fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=bias or family == "qwen2",
        attention_output_bias=bias,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
        qk_norm=family in ("qwen3", "gemma3_text"),
        norm_weight_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        attention_scale=scalar**-0.5,
        layer_types=layer_types,
        sliding_window=window,
        rope=read_rope(
            fields, layer_types, theta=1e6 if gemma else 1e4, local_theta=1e4 if gemma else None
        ),
        file_dtype=_file_dtype(fields, weights_dtype),
    )
    check_heads(architecture, file)
    return architecture


def read_generation(
    config: dict[str, Any], file: str, generation: Fields, tokenizer_eos_ids: set[int]
) -> GenerationDefaults:
    """Defaults from generation_config.json; end-of-sequence ids from wherever one is named."""
    text = text_config(config, file)[1]
    places = (generation, text, Fields(config, file=file))
    eos = tokenizer_eos_ids.union(*map(_token_ids, places))
    bos = next((place for place in places if place.get("bos_token_id") is not None), None)
    sampling: dict[str, float | int] = {}
    for key, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-3, 100.0),
    ):
        value = generation.optional_number(key, low, high)
        if value is not None:
            sampling[key] = value
    if generation.get("top_k") is not None:
        sampling["top_k"] = generation.integer("top_k", -1, MAX_TOKEN_ID)
    return GenerationDefaults(
        bos_token_id=bos.integer("bos_token_id", 0, MAX_TOKEN_ID) if bos else None,
        eos_token_ids=tuple(sorted(eos)),
        max_new_tokens=(
            generation.integer("max_new_tokens", 1, MAX_TOKEN_ID)
            if generation.get("max_new_tokens") is not None
            else None
        ),
        sampling=sampling,
    )


def _family(top: Fields) -> Family:
    architectures = top.get("architectures")
    if isinstance(architectures, list) and architectures:
        key, value, table = "architectures", architectures[0], _ARCHITECTURES
    else:
        key, value, table = "model_type", top.get("model_type"), _MODEL_TYPES
    if not isinstance(value, str) or value not in table:
        raise top.error(
            key,
            f"is {show(value)}, which is not supported",
            hint=f"supported: {', '.join(table)}",
        )
    return table[value]


def _refuse_variants(fields: Fields) -> None:
    """Features that need math, or kernels, that are not there."""
    quantization = fields.get("quantization_config") or fields.get("compression_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise fields.error(
            "quantization_config",
            f"names {show(method or quantization)}, which is not supported",
            hint="use the unquantised model, or a GGUF file of it",
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.get(key):
            raise fields.error(key, f"is {show(fields.get(key))}, which is not supported")


def _layer_types(family: Family, fields: Fields) -> tuple[tuple[LayerType, ...], int]:
    """What each layer sees, and the window (0 where none slides). A list of types always wins."""
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    qwen = family in ("qwen2", "qwen3")
    given = fields.get("layer_types")
    has_window = fields.get("sliding_window") is not None
    if qwen and not fields.boolean("use_sliding_window", False):
        given, has_window = None, False
    types: list[LayerType]
    if given is not None:
        types = _given_layer_types(fields, given, num_layers)
    elif family == "gemma3_text":
        period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, GEMMA3_PATTERN)
        types = periodic_layer_types(num_layers, period)
    elif has_window and family == "mistral":
        types = ["sliding"] * num_layers
    elif has_window and qwen:
        first = fields.integer("max_window_layers", 0, MAX_LAYERS, _QWEN_WINDOW_FROM_LAYER)
        types = ["sliding" if layer >= first else "full" for layer in range(num_layers)]
    else:
        types = ["full"] * num_layers
    if "sliding" not in types:
        return tuple(types), 0
    return tuple(types), fields.integer("sliding_window", 1, MAX_POSITIONS)


def _given_layer_types(fields: Fields, given: Any, num_layers: int) -> list[LayerType]:
    names: dict[str, LayerType] = {"full_attention": "full", "sliding_attention": "sliding"}
    if not isinstance(given, list) or len(given) != num_layers:
        raise fields.error("layer_types", f"is not a list of {num_layers} layer types")
    for name in given:
        if not isinstance(name, str) or name not in names:
            raise fields.error(
                "layer_types",
                f"has {show(name)}, which is not supported",
                hint=f"supported: {', '.join(names)}",
            )
    return [names[name] for name in given]


def _activation(family: Family, fields: Fields) -> Literal["silu", "gelu_tanh"]:
    gemma = family == "gemma3_text"
    key = "hidden_activation" if gemma else "hidden_act"
    accepted = ("gelu_pytorch_tanh",) if gemma else ("silu", "swish")
    value = fields.text(key, accepted[0])
    if value not in accepted:
        raise fields.error(key, f"is {show(value)}; only {accepted[0]} is supported")
    return "gelu_tanh" if gemma else "silu"


def _file_dtype(fields: Fields, weights_dtype: str) -> FileDtype:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.text(key, weights_dtype)
    dtype = _DTYPES.get(value.removeprefix("torch."))
    if dtype is None:
        raise fields.error(
            key,
            f"is {show(value)}, which is not supported",
            hint="supported: bfloat16, float16, float32",
        )
    return dtype


def _token_ids(fields: Fields) -> set[int]:
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise CheckpointError(f"eos_token_id has {show(item)}, not an id", file=fields.file)
    return set(ids)
