"""GGUF models: names, row order and metadata, against transformers' own GGUF loader."""

import dataclasses

import gguf
import numpy as np
import pytest
import torch
from tests.unit.formats.gguf_files import VOCAB, model_entries, model_tensors, write_gguf
from transformers import AutoModelForCausalLM

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import RopeParameters
from trimaran.formats.hub import locate_model
from trimaran.formats.model_source import open_checkpoint, open_model

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def entries_of(architecture, **changes):
    if architecture == "gemma3":
        changes = {"attention__key_length": 8, "attention__sliding_window": 16} | changes
    return model_entries(architecture, **changes)


@pytest.fixture
def write(tmp_path):
    def call(architecture, *, tensors=None, entries=None, **changes):
        return write_gguf(
            tmp_path / "m.gguf",
            architecture,
            entries_of(architecture, **changes) | (entries or {}),
            model_tensors(architecture) if tensors is None else tensors,
        )

    return call


def read_all(source):
    checkpoint = open_checkpoint(source)
    return {name: checkpoint.tensor(name).read() for name in checkpoint.names()}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_weights_and_config_are_those_transformers_reads(write, architecture, tmp_path):
    # transformers takes 128 for Qwen 3, whatever attention.key_length says.
    head_dim = 128 if architecture == "qwen3" else 8
    tensors = model_tensors(architecture, head_dim=head_dim)
    if architecture == "qwen2":
        random = np.random.default_rng(3)
        for layer in range(2):
            for name, size in (("q", 32), ("k", 16), ("v", 16)):
                bias = random.standard_normal(size, np.float32)
                tensors[f"blk.{layer}.attn_{name}.bias"] = bias
    path = write(
        architecture, tensors=tensors, rope__freq_base=5000.0, attention__key_length=head_dim
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    source = open_model(path)
    ours, theirs = read_all(source), model.state_dict()
    tied = source.architecture.tie_word_embeddings
    assert tied
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    for name, tensor in ours.items():
        # transformers takes Gemma's 1 off the norms again; GGUF holds it.
        stored = theirs[name] + 1 if architecture == "gemma3" and "norm" in name else theirs[name]
        np.testing.assert_allclose(tensor, stored.numpy(), atol=2e-7, err_msg=name)
    shape, config = source.architecture, model.config
    assert shape.family == FAMILIES[architecture]
    assert (shape.vocab_size, shape.hidden_size) == (8, config.hidden_size)
    assert shape.intermediate_size == config.intermediate_size
    assert (shape.num_heads, shape.num_kv_heads) == (4, config.num_key_value_heads)
    assert (shape.num_layers, shape.head_dim) == (2, head_dim)
    assert shape.max_position_embeddings == config.max_position_embeddings
    assert shape.rms_norm_eps == config.rms_norm_eps
    assert shape.attention_bias == (architecture == "qwen2")
    assert shape.qk_norm == (architecture in ("qwen3", "gemma3"))
    assert shape.norm_weight_offset == 0.0
    assert {p.theta for t, p in shape.rope.items() if t == "full"} <= {5000.0}
    assert source.generation.bos_token_id == config.bos_token_id


@pytest.mark.parametrize("quantised", [False, True])
def test_q_and_k_rows_of_llama_go_back_in_order(write, quantised):
    """The converter's own formula: reshape (heads, 2, D/2, …), swap the middle, flatten."""
    tensors = model_tensors("llama")
    expected = {}
    for name, heads in (("q", 4), ("k", 2)):
        random = np.random.default_rng(ord(name))
        for kind, shape in (("weight", (heads * 8, 32)), ("bias", (heads * 8,))):
            original = random.standard_normal(shape, np.float32)
            blocks = original
            if quantised and kind == "weight":
                blocks = gguf.quants.quantize(original, gguf.GGMLQuantizationType.Q8_0)
                original = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            rows = blocks.reshape(heads, 2, 4, *blocks.shape[1:]).swapaxes(1, 2)
            stored = np.ascontiguousarray(rows).reshape(blocks.shape)
            is_q8 = quantised and kind == "weight"
            q8 = (stored, gguf.GGMLQuantizationType.Q8_0)
            tensors[f"blk.0.attn_{name}.{kind}"] = q8 if is_q8 else stored
            expected[f"model.layers.0.self_attn.{name}_proj.{kind}"] = original
    checkpoint = open_checkpoint(open_model(write("llama", tensors=tensors)))
    for name, original in expected.items():
        tensor = checkpoint.tensor(name)
        assert tensor.shape == original.shape
        assert np.array_equal(tensor.read(), original)
        assert np.array_equal(tensor.read(3, 13), original[3:13])


def test_reading_by_pieces_and_types(write):
    tensors = model_tensors("qwen2")
    original = tensors["blk.0.ffn_up.weight"]
    kinds = gguf.GGMLQuantizationType
    tensors["blk.0.ffn_up.weight"] = original.astype(np.float16)
    bf16 = gguf.quants.quantize(original, kinds.BF16)
    tensors["blk.1.ffn_up.weight"] = (bf16, kinds.BF16)
    q5 = gguf.quants.quantize(tensors["blk.0.ffn_gate.weight"], kinds.Q5_0)
    tensors["blk.0.ffn_gate.weight"] = (q5, kinds.Q5_0)
    checkpoint = open_checkpoint(open_model(write("qwen2", tensors=tensors)))

    half = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert (half.read_dtype, half.stored_bytes) == ("float16", 48 * 32 * 2)
    assert np.array_equal(half.read(5, 9), original[5:9].astype(np.float16))
    brain = checkpoint.tensor("model.layers.1.mlp.up_proj.weight")
    assert brain.read_dtype == "bfloat16"
    assert brain.read().dtype == np.uint16
    assert np.array_equal(brain.read(), bf16.view(np.uint16))
    quantised = checkpoint.tensor("model.layers.0.mlp.gate_proj.weight")
    assert (quantised.read_dtype, quantised.shape) == ("float32", (48, 32))
    whole = gguf.quants.dequantize(q5, kinds.Q5_0)
    assert np.array_equal(quantised.read(), whole)
    assert np.array_equal(np.concatenate([quantised.read(0, 7), quantised.read(7)]), whole)
    assert quantised.read(48).shape == (0, 32)
    assert not checkpoint.tensor("model.norm.weight").read().flags.writeable
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: no such tensor"):
        checkpoint.tensor("lm_head.weight")


def test_what_was_read_survives_closing(write):
    checkpoint = open_checkpoint(open_model(write("qwen2")))
    view = checkpoint.tensor("model.norm.weight").read()
    checkpoint.close()
    checkpoint.close()
    assert np.array_equal(view, model_tensors("qwen2")["output_norm.weight"])


def test_an_untied_head_and_an_odd_vocabulary(write):
    tensors = model_tensors("llama", vocab_size=32003)
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    source = open_model(write("llama", tensors=tensors))
    assert source.architecture.vocab_size == 32003
    assert not source.architecture.tie_word_embeddings
    head = open_checkpoint(source).tensor("lm_head.weight")
    assert np.array_equal(head.read(32000), tensors["output.weight"][32000:])


def test_rope_frequencies_become_factors_not_a_tensor(write):
    factors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    tensors = model_tensors("llama") | {"rope_freqs.weight": factors}
    source = open_model(write("llama", tensors=tensors, rope__freq_base=500000.0))
    assert source.architecture.rope["full"] == RopeParameters(
        theta=500000.0, frequency_factors=(1.0, 1.5, 4.0, 8.0)
    )
    assert "rope_freqs.weight" not in open_checkpoint(source).names()
    for bad in (factors[:3], factors * 0, factors * np.nan):
        tensors["rope_freqs.weight"] = bad
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight: (is F32|holds)"):
            open_model(write("llama", tensors=tensors))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeParameters(theta=10_000.0)),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 2.0}, RopeParameters()),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            RopeParameters("linear", factor=4.0),
        ),
        ({"rope__scale_linear": 2.0}, RopeParameters("linear", factor=2.0)),
        (
            {
                "rope__freq_base": 1e6,
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 16,
            },
            RopeParameters("yarn", 1e6, 4.0, original_max_position_embeddings=16),
        ),
    ],
)
def test_rope_scaling(write, changes, expected):
    assert open_model(write("qwen2", **changes)).architecture.rope == {"full": expected}


def test_gemma3_layers(write):
    shape = open_model(write("gemma3", block_count=14, rope__scaling__factor=8.0)).architecture
    assert [i for i, kind in enumerate(shape.layer_types, 1) if kind == "full"] == [6, 12]
    assert shape.sliding_window == 16
    assert shape.rope == {
        "full": RopeParameters("linear", 1e6, 8.0),
        "sliding": RopeParameters(theta=1e4),
    }
    assert shape.embedding_scale == 32**0.5
    assert shape.attention_scale == 8**-0.5
    assert shape.activation == "gelu_tanh"
    pattern = {"gemma3.attention.sliding_window_pattern": [True, False]}
    assert open_model(write("gemma3", entries=pattern)).architecture.layer_types == (
        "sliding",
        "full",
    )
    shape = open_model(write("gemma3", attention__sliding_window_pattern=2)).architecture
    assert shape.layer_types == ("sliding", "full")


def test_the_query_scale_of_gemma3_27b(write):
    """5376 wide, 32 heads of 128: scaled by 168 ** -0.5, not 128 ** -0.5."""
    source = open_model(
        write(
            "gemma3",
            block_count=62,
            embedding_length=5376,
            attention__head_count=32,
            attention__head_count_kv=16,
            attention__key_length=128,
        )
    )
    assert source.architecture.attention_scale == pytest.approx(168**-0.5)


def test_end_of_sequence_ids_are_the_union(write):
    # <|im_end|> (5) is a control token; <end_of_turn> (6) is not one in this vocabulary.
    assert open_model(write("llama")).generation.eos_token_ids == (2, 5)
    both = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eos_token_id": 2}
    assert open_model(write("llama", entries=both)).generation.eos_token_ids == (2, 5, 7)
    control = {"tokenizer.ggml.token_type": [3] * len(VOCAB)}
    assert open_model(write("llama", entries=control)).generation.eos_token_ids == (2, 5, 6)


def test_the_tokenizer_is_handed_on_as_the_file_has_it(write):
    source = open_model(write("llama"))
    assert source.tokenizer.gguf["tokenizer.ggml.tokens"] == VOCAB
    assert source.tokenizer.tokenizer_json is None
    assert source.tokenizer.chat_template is None
    templates = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    files = open_model(write("llama", entries=templates)).tokenizer
    assert files.chat_template == "A"
    assert files.chat_templates == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    ("architecture", "entries", "message"),
    [
        ("falcon", {}, "general.architecture is 'falcon', which is not supported"),
        ("llama", {"llama.block_count": 1 << 20}, "block_count is 1048576, not an integer from 1"),
        ("llama", {"llama.block_count": "2"}, "block_count is '2', not an integer"),
        ("llama", {"llama.embedding_length": 0}, "embedding_length is 0"),
        ("llama", {"llama.attention.head_count_kv": 3}, "4 heads do not divide by 3 KV heads"),
        ("llama", {"llama.attention.head_count": [4, 2]}, r"head_count differs by layer \(\[4, 2"),
        ("llama", {"llama.attention.key_length": 7}, "the head size 7 is odd"),
        ("llama", {"llama.rope.freq_base": float("nan")}, "freq_base is nan, not a number"),
        ("llama", {"llama.expert_count": 8}, "expert_count is 8; only 0 is supported"),
        ("llama", {"llama.rope.dimension_count": 4}, "dimension_count is 4; only 8"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "scaling.type is 'longrope'"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "softcapping is 30.0; only 0"),
        ("llama", {"tokenizer.ggml.eos_token_id": True}, "eos_token_id is True, not an integer"),
    ],
)
def test_metadata_out_of_range_names_the_key(write, architecture, entries, message):
    path = write(architecture, tensors=model_tensors("llama"), entries=entries)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_model(path)
    assert str(path) in str(caught.value)


def test_tensors_that_do_not_belong_are_named(write):
    tensors = model_tensors("llama") | {"blk.0.ffn_gate_inp.weight": np.zeros(4, np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_inp\.weight: is not part of a ll"):
        open_model(write("llama", tensors=tensors))
    del tensors["blk.0.ffn_gate_inp.weight"], tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd\.weight: is missing"):
        open_model(write("llama", tensors=tensors))


@pytest.mark.demo
def test_the_packaged_gemma():
    path = locate_model("demo")
    source = open_model(path)
    shape = source.architecture
    assert dataclasses.replace(shape, rope={}, layer_types=()) == dataclasses.replace(
        shape,
        family="gemma3_text", vocab_size=262144, hidden_size=640, intermediate_size=2048,
        num_layers=18, num_heads=4, num_kv_heads=1, head_dim=256, max_position_embeddings=32768,
        tie_word_embeddings=True, attention_scale=256**-0.5, sliding_window=512,
        qk_norm=True, norm_weight_offset=0.0, rope={}, layer_types=(),
    )  # fmt: skip
    assert [i for i, kind in enumerate(shape.layer_types, 1) if kind == "full"] == [6, 12, 18]
    assert {kind: rope.theta for kind, rope in shape.rope.items()} == {"full": 1e6, "sliding": 1e4}
    assert source.generation.bos_token_id == 2
    assert source.generation.eos_token_ids == (1, 106)
    assert source.tokenizer.gguf["tokenizer.ggml.tokens"][106] == "<end_of_turn>"
    assert source.tokenizer.chat_template is None

    checkpoint = open_checkpoint(source)
    reader = gguf.GGUFReader(path)
    layer_names = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                   "post_feedforward_layernorm", "self_attn.q_proj", "self_attn.k_proj",
                   "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
                   "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}  # fmt: skip
    assert set(checkpoint.names()) == {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{layer}.{name}.weight" for layer in range(18) for name in layer_names
    }
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.3.self_attn.q_proj.weight": "blk.3.attn_q.weight",
        "model.layers.3.self_attn.v_proj.weight": "blk.3.attn_v.weight",
        "model.layers.17.self_attn.o_proj.weight": "blk.17.attn_output.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.5.pre_feedforward_layernorm.weight": "blk.5.ffn_norm.weight",
        "model.layers.5.post_attention_layernorm.weight": "blk.5.post_attention_norm.weight",
    }
    stored = {tensor.name: tensor for tensor in reader.tensors}
    kinds = set()
    for ours, theirs in pairs.items():
        tensor = stored[theirs]
        kinds.add(tensor.tensor_type.name)
        rows = slice(0, min(len(tensor.data), 2000))
        expected = gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type)
        got = checkpoint.tensor(ours)
        assert got.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(got.read(rows.start, rows.stop), expected), ours
    assert kinds == {"F32", "Q5_0", "Q8_0", "Q4_K", "Q6_K"}
