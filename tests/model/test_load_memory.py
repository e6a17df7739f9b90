"""Peak memory while loading, measured by the kernel in a process of its own."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

LOAD = """
import json, sys
from pathlib import Path
import torch
from trimaran.formats.model_source import open_model
from trimaran.model.kernels.torch_kernels import TorchKernels
from trimaran.model.loader import load_model

def kib(key):
    line = next(x for x in open("/proc/self/status") if x.startswith(key + ":"))
    return int(line.split()[1])

torch.set_num_threads(2)
source = open_model(Path(sys.argv[1]))
# what the libraries allocate at their first use is not the model's
load_model(open_model(Path(sys.argv[2])), dtype=torch.bfloat16, kernels=TorchKernels())
before = kib("VmRSS")
model = load_model(source, dtype=torch.bfloat16, kernels=TorchKernels())
peak = kib("VmHWM")
print(json.dumps({"held": model.weight_bytes, "peak": (peak - before) * 1024}))
"""


def save(folder, **sizes) -> int:
    """A Llama of zeros in bf16; returns the bytes of its weights."""
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_stays_below_1_3_of_what_is_held(tmp_path, tied):
    stored = save(
        tmp_path / "model",
        vocab_size=49_152,  # head and embedding: 50 MB each, most of the model
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        tie_word_embeddings=tied,
    )
    save(
        tmp_path / "tiny",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
    )
    script = [sys.executable, "-c", LOAD, tmp_path / "model", tmp_path / "tiny"]
    done = subprocess.run(script, check=True, capture_output=True, text=True, timeout=60)
    found = json.loads(done.stdout)
    assert found["held"] >= stored
    assert found["held"] * 0.9 < found["peak"] < found["held"] * 1.3
