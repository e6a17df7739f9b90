"""config.json and its companions, against the config classes of transformers."""

import json

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.formats.folders import TOKENIZER, make_folder
from transformers import AutoConfig

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import RopeParameters
from trimaran.formats.model_source import open_checkpoint, open_model

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
SHORT = {"full_attention": "full", "sliding_attention": "sliding"}


@pytest.fixture
def architecture(tmp_path):
    """The architecture of a config with ``changes``; None removes a key."""

    def read(model_type, /, **changes):
        config = SMALL | {"model_type": model_type} | changes
        config = {key: value for key, value in config.items() if value is not ...}
        return open_model(make_folder(tmp_path, config)).architecture

    return read


def check_against_transformers(shape, folder):
    """Every field that transformers' own reading of the same file has."""
    config = AutoConfig.from_pretrained(folder).get_text_config()
    for ours, theirs in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "max_position_embeddings": "max_position_embeddings",
        "rms_norm_eps": "rms_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
    }.items():
        assert getattr(shape, ours) == getattr(config, theirs), ours
    # transformers has a class of its own for a Mistral whose layers differ.
    assert shape.family == config.model_type.replace("ministral", "mistral")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert shape.head_dim == head_dim
    scalar = getattr(config, "query_pre_attn_scalar", None) or head_dim
    assert shape.attention_scale == pytest.approx(scalar**-0.5)
    if hasattr(config, "layer_types"):
        assert shape.layer_types == tuple(SHORT[kind] for kind in config.layer_types)
    window = getattr(config, "sliding_window", None)
    assert shape.sliding_window == (window or 0 if "sliding" in shape.layer_types else 0)
    by_type = config.rope_parameters
    if not any(key in by_type for key in SHORT):
        by_type = dict.fromkeys(SHORT, by_type)
    for hf_type, kind in SHORT.items():
        if kind in shape.layer_types:
            check_rope(shape.rope[kind], by_type[hf_type])


def check_rope(ours, theirs):
    assert ours.kind == theirs["rope_type"]
    assert ours.theta == theirs["rope_theta"]
    for key in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale",
                "beta_fast", "beta_slow", "original_max_position_embeddings"):  # fmt: skip
        if theirs.get(key) is not None:
            assert getattr(ours, key) == theirs[key], key


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("bare", [False, True])
def test_defaults_are_those_of_transformers(architecture, tmp_path, model_type, bare):
    """``bare``: only the keys without a default are in the file."""
    optional = ("num_key_value_heads", "max_position_embeddings")
    changes = dict.fromkeys(optional, ...) if bare and model_type != "llama" else {}
    if bare and model_type != "llama":
        changes |= {"num_attention_heads": 32, "hidden_size": 64}
    shape = architecture(model_type, **changes)
    check_against_transformers(shape, tmp_path)
    gemma = model_type == "gemma3_text"
    assert shape.tie_word_embeddings == gemma
    assert shape.activation == ("gelu_tanh" if gemma else "silu")
    assert shape.embedding_scale == (shape.hidden_size**0.5 if gemma else 1.0)
    assert shape.norm_weight_offset == (1.0 if gemma else 0.0)
    assert shape.attention_bias == (model_type == "qwen2")
    assert not shape.attention_output_bias
    assert shape.qk_norm == (model_type in ("qwen3", "gemma3_text"))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_save_pretrained_writes(tmp_path, model_type):
    config = AutoConfig.for_model(model_type, **SMALL, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    source = open_model(tmp_path)
    check_against_transformers(source.architecture, tmp_path)
    assert source.architecture.head_dim == 16
    checkpoint = open_checkpoint(source)
    expected = set(model.state_dict())
    if source.architecture.tie_word_embeddings:
        expected.remove("lm_head.weight")
    assert set(checkpoint.names()) == expected
    has_bias = "model.layers.0.self_attn.q_proj.bias" in expected
    assert source.architecture.attention_bias == has_bias


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_biases(architecture, model_type):
    shape = architecture(model_type, attention_bias=True)
    assert shape.attention_bias
    assert shape.attention_output_bias
    assert architecture("llama", mlp_bias=True).mlp_bias
    assert not architecture("mistral", attention_bias=True).attention_bias
    assert not architecture("qwen2", attention_bias=True).attention_output_bias


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "type": "linear"}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.5}},
        {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "truncate": False}},
        {"rope_parameters": {"rope_theta": 7e4}},
    ],
)
def test_rope_forms(architecture, tmp_path, model_type, changes):
    shape = architecture(model_type, **changes)
    check_against_transformers(shape, tmp_path)
    (rope,) = shape.rope.values()
    assert rope.truncate == ("truncate" not in changes.get("rope_parameters", {}))


def test_gemma3_rope_old_and_new_are_the_same_model(architecture, tmp_path):
    old = architecture(
        "gemma3_text",
        num_hidden_layers=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    check_against_transformers(old, tmp_path)
    new = architecture(
        "gemma3_text",
        num_hidden_layers=6,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    check_against_transformers(new, tmp_path)
    assert old == new
    assert old.rope == {
        "full": RopeParameters("linear", 1e6, 8.0),
        "sliding": RopeParameters(theta=1e4),
    }


@pytest.mark.parametrize(
    ("model_type", "changes", "layers", "window"),
    [
        ("mistral", {"sliding_window": 8}, "ssss", 8),
        ("mistral", {"sliding_window": None}, "ffff", 0),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "ffff", 0),
        ("llama", {"sliding_window": 8}, "ffff", 0),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 0}, "ffff", 0),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            "fffs",
            8,
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "ffff", 0),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            "fsfs",
            8,
        ),
        ("gemma3_text", {"sliding_window": 8}, "ssss", 8),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, "sfsf", 8),
        (
            "gemma3_text",
            {"sliding_window": 8, "layer_types": ["full_attention"] * 4},
            "ffff",
            0,
        ),
    ],
)
def test_windows(architecture, tmp_path, model_type, changes, layers, window):
    shape = architecture(model_type, **changes)
    assert "".join(kind[0] for kind in shape.layer_types) == layers
    assert shape.sliding_window == window
    check_against_transformers(shape, tmp_path)


def test_multimodal_gemma3_gives_its_text_model(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=SMALL | {"head_dim": 16}, vision_config=vision)
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    source = open_model(tmp_path)
    check_against_transformers(source.architecture, tmp_path)
    checkpoint = open_checkpoint(source)
    text = model.model.language_model.state_dict()
    assert set(checkpoint.names()) == {f"model.{name}" for name in text}
    for name, tensor in text.items():
        assert (checkpoint.tensor(f"model.{name}").read() == tensor.numpy()).all()


def test_the_first_gemma3_configs_lean_on_defaults(tmp_path):
    """As google published the 4B: only what differs is in text_config."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024, "eos_token_id": 7,
        },
    }  # fmt: skip
    source = open_model(make_folder(tmp_path, config))
    shape = source.architecture
    check_against_transformers(shape, tmp_path)
    assert (shape.vocab_size, shape.num_heads, shape.num_kv_heads) == (262_208, 8, 4)
    assert shape.layer_types[4:7] == ("sliding", "full", "sliding")
    assert shape.file_dtype == "bfloat16"
    assert source.generation.eos_token_ids == (1, 7, 106)


def test_family_by_architectures_or_model_type(architecture):
    assert architecture(..., architectures=["Qwen2ForCausalLM"]).family == "qwen2"
    assert architecture("mistral", architectures=None).family == "mistral"
    with pytest.raises(CheckpointError, match=r"architectures is 'GPT2LM.*supported: LlamaForC"):
        architecture("llama", architectures=["GPT2LMHeadModel"])
    with pytest.raises(CheckpointError, match="model_type is 'gpt2', which is not supported"):
        architecture("gpt2")
    with pytest.raises(CheckpointError, match="model_type is None"):
        architecture(...)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("spelling", ["{}", "torch.{}"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_spellings(architecture, key, spelling, dtype):
    assert architecture("llama", **{key: spelling.format(dtype)}).file_dtype == dtype


def test_without_a_dtype_the_weights_tell(tmp_path):
    config = SMALL | {"model_type": "llama"}
    for dtype in ("bfloat16", "float16", "float32"):
        folder = make_folder(tmp_path, config, dtype=dtype)
        assert open_model(folder).architecture.file_dtype == dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4', which is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'.*llama3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, not a number from"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2', not a number"),
        ({"rope_scaling": 3}, "rope_scaling is 3, not an object"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is below 1"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size is -1, not an integer from 1 to"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0, not an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, "4 heads do not divide by 3"),
        ({"head_dim": 7}, "head size 7 is odd"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config names 'gptq'"),
        ({"layer_types": ["full_attention"]}, "layer_types is not a list of 4"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ({"eos_token_id": "2"}, "eos_token_id has '2', not an id"),
        ({"text_config": []}, r"text_config is \[\], not an object"),
    ],
)
def test_what_is_refused_names_the_key(architecture, tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        architecture("llama", **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_code_in_the_folder_is_not_looked_at(architecture, tmp_path):
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModel": "modeling_evil.Model"}
    assert architecture("llama", auto_map=auto_map, trust_remote_code=True).family == "llama"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([0, -1, 1 << 31, 1 << 64, 10**400, "default", "yarn", "full_attention"]),
)  # fmt: skip
NESTED = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["rope_type", "type", "factor", "full_attention", "rope_theta", "name"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
KEYS = [
    *SMALL, "architectures", "model_type", "text_config", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "rope_theta", "rope_scaling", "rope_parameters",
    "head_dim", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "rms_norm_eps",
    "hidden_act", "tie_word_embeddings", "attention_bias", "quantization_config",
    "original_max_position_embeddings", "partial_rotary_factor", "query_pre_attn_scalar",
]  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(FAMILIES), st.dictionaries(st.sampled_from(KEYS), NESTED, min_size=1))
def test_any_values_either_load_or_are_refused(architecture, tmp_path, model_type, changes):
    try:
        shape = architecture(model_type, **changes)
    except CheckpointError as error:
        message = str(error)
    else:
        message = str(tmp_path)
        assert 0 < shape.hidden_size <= 1 << 20
        assert shape.num_layers == len(shape.layer_types)
        assert set(shape.rope) == set(shape.layer_types)
    assert str(tmp_path) in message
    assert "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b"[]", "not an object"),
        (b" " * (1 << 25), "has more than 16777216 bytes"),
    ],
)
def test_a_config_that_is_none(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, {"eos_token_id": [2, 7]}, (2, 7)),
        ([2, 3], {}, (2, 3)),
        (None, {"eos_token_id": 7}, (7,)),
        (2, None, (2,)),
    ],
)
def test_eos_is_the_union(tmp_path, config_eos, generation, expected):
    config = SMALL | {"model_type": "qwen2", "eos_token_id": config_eos}
    files = {} if generation is None else {"generation_config.json": generation}
    assert open_model(make_folder(tmp_path, config, files)).generation.eos_token_ids == expected


def test_eos_of_the_tokenizer_and_of_its_template_counts(tmp_path):
    """The ids of </s> (4) and <|im_end|> (5), which neither config names."""
    config = SMALL | {"model_type": "qwen2", "eos_token_id": 2}
    for eos in ("</s>", {"content": "</s>", "special": True}):
        settings = {"eos_token": eos, "chat_template": "{{ m }}<|im_end|>"}
        files = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": settings}
        folder = make_folder(tmp_path, config, files)
        assert open_model(folder).generation.eos_token_ids == (2, 4, 5)
    files["tokenizer_config.json"] = {}
    assert open_model(make_folder(tmp_path, config, files)).generation.eos_token_ids == (2,)


def test_generation_defaults(tmp_path):
    given = {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "min_p": None,
        "max_new_tokens": 77, "do_sample": True, "bos_token_id": 11,
    }  # fmt: skip
    config = SMALL | {"model_type": "llama", "bos_token_id": 1}
    folder = make_folder(tmp_path, config, {"generation_config.json": given})
    generation = open_model(folder).generation
    assert generation.sampling == {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert (generation.bos_token_id, generation.max_new_tokens) == (11, 77)
    for bad in ({"temperature": float("nan")}, {"top_p": 2}, {"top_k": 1.5}, {"min_p": "x"}):
        (tmp_path / "generation_config.json").write_text(json.dumps(bad))
        with pytest.raises(CheckpointError, match=f"generation_config.json: {next(iter(bad))} is"):
            open_model(tmp_path)
