"""GGUF models against transformers' own GGUF loader.

The files are written here with the ``gguf`` package, and with llama.cpp's permutation of Llama's
q and k rows; what they mean is then transformers' word, not ours.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.model.paged import PagedRun
from transformers import AutoModelForCausalLM, PreTrainedModel

from trimaran.formats.model_source import open_model
from trimaran.model.kernels.base import Kernels
from trimaran.model.loader import load_model

# transformers takes a head_dim of 128 for any Qwen3 GGUF, and Gemma's query scale from 256.
HEAD_DIM = {"llama": 32, "qwen2": 32, "qwen3": 128, "gemma3": 256}
HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 128, 96, 4, 2, 99
WINDOW = 24
LENGTH = 70


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves of a rotated pair next to each other."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, 2, rows // heads // 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def tensors(family: str, tied: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(11)

    def normal(*shape: int, around: float = 0.0) -> np.ndarray:
        return (around + random.normal(size=shape) * 0.2).astype("float32")

    query, key = HEADS * HEAD_DIM[family], KV_HEADS * HEAD_DIM[family]
    found = {
        "token_embd.weight": normal(VOCABULARY, HIDDEN),
        "output_norm.weight": normal(HIDDEN, around=1.0),
    }
    if not tied:
        found["output.weight"] = normal(VOCABULARY, HIDDEN)
    for block in (f"blk.{i}" for i in range(num_layers(family))):
        q, k = normal(query, HIDDEN), normal(key, HIDDEN)
        if family == "llama":
            q, k = permuted(q, HEADS), permuted(k, KV_HEADS)
        found |= {
            f"{block}.attn_norm.weight": normal(HIDDEN, around=1.0),
            f"{block}.attn_q.weight": q,
            f"{block}.attn_k.weight": k,
            f"{block}.attn_v.weight": normal(key, HIDDEN),
            f"{block}.attn_output.weight": normal(HIDDEN, query),
            f"{block}.ffn_norm.weight": normal(HIDDEN, around=1.0),
            f"{block}.ffn_gate.weight": normal(INNER, HIDDEN),
            f"{block}.ffn_up.weight": normal(INNER, HIDDEN),
            f"{block}.ffn_down.weight": normal(HIDDEN, INNER),
        }
        if family == "qwen2":
            for part, rows in (("q", query), ("k", key), ("v", key)):
                found[f"{block}.attn_{part}.bias"] = normal(rows)
        if family in ("qwen3", "gemma3"):
            for part in ("q", "k"):
                name = f"{block}.attn_{part}_norm.weight"
                found[name] = normal(HEAD_DIM[family], around=1.0)
        if family == "gemma3":
            for part in ("post_attention_norm", "post_ffw_norm"):
                found[f"{block}.{part}.weight"] = normal(HIDDEN, around=1.0)
    return found


def num_layers(family: str) -> int:
    return 7 if family == "gemma3" else 2  # the sixth layer of Gemma is its first full one


def write(
    path: Path,
    family: str,
    kind: gguf.GGMLQuantizationType,
    *,
    tied: bool,
    rope_freqs: np.ndarray | None = None,
) -> None:
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(num_layers(family))
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM[family])
    writer.add_value_length(HEAD_DIM[family])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(20_000.0)
    writer.add_vocab_size(VOCABULARY)
    if family == "llama":
        writer.add_rope_dimension_count(HEAD_DIM[family])
    if family == "gemma3":
        writer.add_sliding_window(WINDOW)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, data in tensors(family, tied).items():
        stored = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [
        ("llama", gguf.GGMLQuantizationType.F32, False),
        ("llama", gguf.GGMLQuantizationType.Q8_0, True),
        ("qwen2", gguf.GGMLQuantizationType.F16, False),
        ("qwen3", gguf.GGMLQuantizationType.Q5_0, True),
        ("gemma3", gguf.GGMLQuantizationType.BF16, True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_logits_are_those_of_transformers(tmp_path, kernels, family, kind, tied):
    path = tmp_path / "tiny.gguf"
    write(path, family, kind, tied=tied)
    reference = transformers_model(path)
    prompt = torch.randint(3, VOCABULARY, (LENGTH,))
    expected = reference_logits(reference, prompt)
    assert expected.abs().max() > 1  # not agreement on nothing
    assert (logits(path, kernels, prompt) - expected).abs().max() < 1e-4


def test_rope_freqs_divide_the_frequencies(tmp_path, kernels):
    """Llama 3.1's scaling, baked into the file. transformers drops the tensor; we put it in."""
    path = tmp_path / "tiny.gguf"
    factors = np.geomspace(1.0, 8.0, HEAD_DIM["llama"] // 2, dtype="float32")
    write(path, "llama", gguf.GGMLQuantizationType.F32, tied=False, rope_freqs=factors)
    reference = transformers_model(path)
    prompt = torch.randint(3, VOCABULARY, (LENGTH,))
    without = reference_logits(reference, prompt)
    reference.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    expected = reference_logits(reference, prompt)
    assert (expected - without).abs().max() > 0.1
    assert (logits(path, kernels, prompt) - expected).abs().max() < 1e-4


def transformers_model(path: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def reference_logits(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt[None]).logits[0]


def logits(path: Path, kernels: Kernels, prompt: torch.Tensor) -> torch.Tensor:
    model = load_model(open_model(path), dtype=torch.float32, kernels=kernels)
    return PagedRun(model, dtype=torch.float32).step({0: prompt.tolist()})[0]
