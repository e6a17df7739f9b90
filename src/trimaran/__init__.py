"""trimaran: an LLM serving engine that loses nobody's request.

Public names are resolved on first use (PEP 562), so ``import trimaran`` loads no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "trimaran.client.llm",
    "AsyncLLM": "trimaran.client.async_llm",
    "RequestOutput": "trimaran.client.outputs",
    "CompletionOutput": "trimaran.client.outputs",
    "SamplingParams": "trimaran.sampling_params",
}

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
