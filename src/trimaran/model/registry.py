"""Which class computes which family.

Owns: the table. Knows nothing of what the classes do; they are imported when chosen. The loader
asks. A family gets a class of its own only where the computation differs; what the architecture's
fields can say (biases, norms of q and k, windows, rotary kinds) needs none.
"""

import importlib

from trimaran.errors import CheckpointError
from trimaran.model.models.decoder import DecoderForCausalLM

_LLAMA = "trimaran.model.models.llama:LlamaForCausalLM"
MODELS: dict[str, str] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,  # a sliding window on all layers
    "qwen2": _LLAMA,  # biases on q, k and v
    "qwen3": _LLAMA,  # norms on the heads of q and k
    "gemma3_text": "trimaran.model.models.gemma3:Gemma3ForCausalLM",
}


def model_class(family: str) -> type[DecoderForCausalLM]:
    """Raises CheckpointError: an unknown family (names the known ones)."""
    if family not in MODELS:
        raise CheckpointError(
            f"model family {family!r} is not supported", hint=f"supported: {', '.join(MODELS)}"
        )
    module, name = MODELS[family].split(":")
    found: type[DecoderForCausalLM] = getattr(importlib.import_module(module), name)
    return found
