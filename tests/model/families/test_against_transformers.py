"""Every family on a tiny random checkpoint, logits against transformers in fp32.

Prompts are longer than the sliding window and the original context of the scaled rotary kinds, and
are computed whole, in chunks, and beside another request, over scrambled blocks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.model.paged import PagedRun

from trimaran.formats.model_source import open_model
from trimaran.model.kernels.base import Kernels
from trimaran.model.loader import load_model
from trimaran.model.models.decoder import CausalLM

LENGTH = 150
VOCABULARY = 97
TOLERANCE = 1e-4
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


def old_rope_form(config: dict[str, Any], type_key: str = "rope_type") -> None:
    """The form before transformers 5: rope_theta beside a rope_scaling."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {type_key: rope.pop("rope_type")} | rope


def oldest_rope_form(config: dict[str, Any]) -> None:
    old_rope_form(config, "type")


def old_gemma_form(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    full = rope["full_attention"]
    config["rope_theta"] = full.pop("rope_theta")
    config["rope_scaling"] = full
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]


@dataclass(frozen=True)
class Case:
    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    rewrite: Callable[[dict[str, Any]], None] | None = None  # of config.json

    def reference(self) -> transformers.PreTrainedModel:
        config_class = getattr(transformers, f"{self.config}Config")
        model_class = getattr(transformers, f"{self.config.removesuffix('Text')}ForCausalLM")
        torch.manual_seed(1)
        config = config_class(**COMMON | self.settings, attn_implementation="eager")
        model = model_class(config).eval()
        gemma = self.config.startswith("Gemma")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                around = 1.0 if "norm" in name and not gemma else 0.0
                parameter.normal_(around, 0.2)
        return model


CASES = [
    Case("llama-biases", "Llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    Case("llama-tied-llama3", "Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    Case("llama-llama3-old", "Llama", {"rope_parameters": LLAMA3}, old_rope_form),
    Case(
        "llama-linear-oldest",
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
        oldest_rope_form,
    ),
    Case("mistral-window", "Mistral", {"sliding_window": 24}),
    Case("mistral-no-window", "Mistral", {"sliding_window": None}),
    Case("qwen2-tied", "Qwen2", {"head_dim": 16, "tie_word_embeddings": True}),
    Case(
        "qwen2-some-windows",
        "Qwen2",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    Case("qwen3-yarn", "Qwen3", {"rope_parameters": YARN}),
    Case(
        "qwen3-yarn-old",
        "Qwen3",
        {"rope_parameters": YARN | {"attention_factor": 0.8}, "attention_bias": True},
        old_rope_form,
    ),
    Case(
        "gemma3",
        "Gemma3Text",
        {
            "num_hidden_layers": 7,  # the sixth is full
            "sliding_window": 24,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": True,
            "rope_parameters": GEMMA_ROPE,
        },
    ),
    Case(
        "gemma3-old-untied",
        "Gemma3Text",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "rope_parameters": GEMMA_ROPE,
        },
        old_gemma_form,
    ),
]


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    prompts: list[list[int]]
    expected: list[torch.Tensor]  # logits [LENGTH, vocabulary] of each


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    case: Case = request.param
    reference = case.reference()
    folder = tmp_path_factory.mktemp(case.name)
    reference.save_pretrained(folder)
    if case.rewrite is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text("utf-8"))
        case.rewrite(config)
        path.write_text(json.dumps(config), "utf-8")
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        expected = reference(ids).logits
    return Checkpoint(folder, ids.tolist(), list(expected))


@pytest.fixture
def model(checkpoint: Checkpoint, kernels: Kernels) -> CausalLM:
    with torch.inference_mode():  # as the worker does
        return load_model(open_model(checkpoint.folder), dtype=torch.float32, kernels=kernels)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() < TOLERANCE)


def test_a_prompt_in_one_piece(checkpoint, model):
    run = PagedRun(model, dtype=torch.float32)
    assert close(run.step({0: checkpoint.prompts[0]})[0], checkpoint.expected[0])


def test_chunks_and_decode_steps_beside_another_request(checkpoint, model):
    run = PagedRun(model, dtype=torch.float32, num_requests=2)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    # tokens of each request per step: chunks that straddle blocks and windows, then single ones
    plan = [(33, 0), (64, 1), (31, 90), (1, 0), (1, 40), (1, 1), (1, 1), (18, 17)]
    for step in plan:
        chunks = {
            request: checkpoint.prompts[request][run.lengths[request] :][:count]
            for request, count in enumerate(step)
            if count
        }
        for request, logits in zip(chunks, run.step(chunks), strict=True):
            rows[request].append(logits)
    assert run.lengths == [LENGTH, LENGTH]
    for request in (0, 1):
        assert close(torch.cat(rows[request]), checkpoint.expected[request])
