"""What Weights makes of a checkpoint's tensors, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.model.memory_checkpoint import TINY, MemoryCheckpoint, tiny_tensors

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import ModelArchitecture
from trimaran.model.kernels.torch_kernels import TorchKernels
from trimaran.model.layers.embedding import Embedding
from trimaran.model.models.decoder import CausalLM
from trimaran.model.registry import MODELS, model_class
from trimaran.model.weights import Weights

Q_PROJ = "model.layers.1.self_attn.q_proj"


def weights_of(tensors: dict[str, np.ndarray], **options) -> Weights:
    options = {
        "file": "tiny.safetensors",
        "dtype": torch.float32,
        "kernels": TorchKernels(),
    } | options
    return Weights(MemoryCheckpoint(tensors), **options)


def build(
    tensors: dict[str, np.ndarray], architecture: ModelArchitecture = TINY, **options
) -> CausalLM:
    with weights_of(tensors, **options) as weights:
        model = model_class(architecture.family)(architecture, weights, TorchKernels())
        weights.check_all_used()
    return model


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_every_stored_type_becomes_every_model_type(stored, wanted):
    values = torch.randn(33, 16, generator=torch.Generator().manual_seed(3))
    held = values.to(getattr(torch, stored))
    data = held.view(torch.uint16).numpy() if stored == "bfloat16" else held.numpy()
    with weights_of({"model.embed_tokens.weight": data}, dtype=wanted) as weights:
        read = weights.matrix("model.embed_tokens.weight", 33, 16)
        assert weights.held_bytes == read.nbytes
    assert torch.equal(read, held.to(wanted))


def test_a_large_matrix_is_read_in_pieces_and_their_bytes_are_reported():
    data = np.arange(3000 * 512, dtype=np.float32).reshape(3000, 512)
    seen: list[tuple[int, int]] = []
    with weights_of(
        {"lm_head.weight": data, "vision_tower.weight": data},
        on_progress=lambda done, total: seen.append((done, total)),
    ) as weights:
        read = weights.matrix("lm_head.weight", 3000, 512)
    assert torch.equal(read, torch.from_numpy(data))
    rows = [1024, 2048, 3000]
    assert seen == [(n * 512 * 4, 3000 * 512 * 4) for n in rows]


def test_merged_parts_lie_in_the_order_asked_for():
    parts = {"b": np.full((2, 4), 2.0, "float32"), "a": np.full((3, 4), 1.0, "float32")}
    biases = {"b.bias": np.array([20, 21], "float32"), "a.bias": np.array([10, 11, 12], "float32")}
    with weights_of({f"{name}.weight": data for name, data in parts.items()} | biases) as weights:
        merged = weights.linear({"a": 3, "b": 2}, 4, bias=True)
    out = merged(torch.ones(1, 4))
    assert out.tolist() == [[14, 15, 16, 28, 29]]


def test_norms_are_fp32_with_the_familys_offset():
    stored = np.array([0.5, -0.25], "float16")
    with weights_of({"n": stored}, dtype=torch.bfloat16, norm_weight_offset=1.0) as weights:
        norm = weights.norm("n", 2)
    assert norm.dtype == torch.float32
    assert norm.tolist() == [1.5, 0.75]
    assert stored.tolist() == [0.5, -0.25]


def test_all_is_read_and_counted():
    seen: list[tuple[int, int]] = []
    tensors = tiny_tensors()
    model = build(tensors, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(data.nbytes for data in tensors.values())
    assert seen[-1] == (total, total)
    assert model.weight_bytes == total  # fp32 stays fp32, unpacked


@pytest.mark.parametrize("name", ["lm_head.weight", f"{Q_PROJ}.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named_with_file_and_shape(name):
    tensors = tiny_tensors()
    shape = list(tensors.pop(name).shape)
    with pytest.raises(CheckpointError) as caught:
        build(tensors)
    assert (caught.value.file, caught.value.tensor) == ("tiny.safetensors", name)
    assert str(shape) in str(caught.value)


def test_an_untied_head_that_is_absent_is_never_made_up():
    tensors = tiny_tensors()
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head.weight: missing.*tie_word_embeddings"):
        build(tensors)


@pytest.mark.parametrize("shape", [(16, 24), (24, 15), (24, 16, 1), (384,)])
def test_a_wrong_shape_is_named_with_both_shapes(shape):
    tensors = tiny_tensors()
    tensors[f"{Q_PROJ}.weight"] = np.zeros(shape, "float32")
    with pytest.raises(CheckpointError) as caught:
        build(tensors)
    assert caught.value.tensor == f"{Q_PROJ}.weight"
    assert str(list(shape)) in caught.value.message
    assert "[24, 16]" in caught.value.message


def test_a_missing_bias_is_named():
    with pytest.raises(CheckpointError, match=r"q_proj.bias: missing.*\[24\]"):
        build(tiny_tensors(), replace(TINY, attention_bias=True))


@pytest.mark.parametrize(
    "name", [f"{Q_PROJ}.bias", "model.layers.2.input_layernorm.weight", f"{Q_PROJ}.lora_A"]
)
def test_decoder_weights_that_the_configuration_does_not_know_are_refused(name):
    tensors = tiny_tensors() | {name: np.zeros(24, "float32")}
    with pytest.raises(CheckpointError, match="names no such part") as caught:
        build(tensors)
    assert caught.value.tensor == name


def test_what_is_no_part_of_the_decoder_is_listed_at_debug(caplog):
    caplog.set_level("DEBUG", "trimaran")
    others = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, "float32"),
        "vision_tower.patch_embedding.weight": np.zeros((2, 2), "float32"),
    }
    build(tiny_tensors() | others)
    assert all(name in caplog.text for name in others)


def test_a_tied_head_that_the_file_holds_as_well_is_shared():
    tensors = tiny_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    seen: list[tuple[int, int]] = []
    model = build(
        tensors,
        replace(TINY, tie_word_embeddings=True),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    hidden = torch.randn(2, 16)
    table = torch.from_numpy(tensors["model.embed_tokens.weight"].copy())
    assert torch.allclose(model.logits(hidden), hidden @ table.T, atol=1e-6)


def test_a_head_that_differs_is_used_although_it_is_said_to_be_tied(caplog):
    tensors = tiny_tensors()
    model = build(tensors, replace(TINY, tie_word_embeddings=True))
    hidden = torch.randn(2, 16)
    head = torch.from_numpy(tensors["lm_head.weight"].copy())
    assert torch.allclose(model.logits(hidden), hidden @ head.T, atol=1e-6)
    assert "differ: both are used" in caplog.text


@pytest.mark.parametrize("shape", [(), (0,), (40, 0), (40, 15)])
def test_a_tied_head_of_a_wrong_shape_is_named(shape):
    tensors = tiny_tensors() | {"lm_head.weight": np.zeros(shape, "float32")}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: shape"):
        build(tensors, replace(TINY, tie_word_embeddings=True))


def test_the_embedding_scale_is_rounded_to_the_models_type():
    table = torch.randn(40, 16).bfloat16()
    ids = torch.tensor([3, 39, 3])
    # sqrt(640) = 25.298…; the nearest bfloat16 is 25.25
    assert torch.equal(Embedding(table, 640**0.5)(ids), table[ids] * 25.25)
    assert torch.equal(Embedding(table, 1.0)(ids), table[ids])


def test_every_family_of_the_architecture_has_a_class():
    for family in MODELS:
        assert model_class(family).__name__.endswith("ForCausalLM")
    with pytest.raises(CheckpointError, match=r"'gpt2' is not supported.*gemma3_text"):
        model_class("gpt2")
