"""Model folders for the tests: a config, one embedding and whatever else is given."""

import json

import torch
from safetensors.torch import save_file

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 4, "content": "</s>", "special": True},
        {"id": 5, "content": "<|im_end|>", "special": True},
    ],
    "model": {"type": "BPE", "vocab": {"added_tokens": 0}, "merges": []},
}


def make_folder(folder, config, files=None, *, dtype="float32"):
    """Write config.json, weights of ``dtype`` and ``files`` (name -> object or text)."""
    weights = {"model.embed_tokens.weight": torch.zeros(4, 4, dtype=getattr(torch, dtype))}
    save_file(weights, folder / "model.safetensors")
    for name, content in {"config.json": config, **(files or {})}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
