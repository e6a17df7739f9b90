"""How the flags most used with vLLM fare here: the same, renamed, or refused with advice.

Read by the parser (to answer unknown flags) and by ``flags_doc`` (docs/flags.md).
"""

from enum import Enum
from typing import NamedTuple


class Status(Enum):
    SAME = "same"
    RENAMED = "renamed"
    REFUSED = "refused"


class VllmFlag(NamedTuple):
    status: Status
    advice: str = ""


def _same() -> VllmFlag:
    return VllmFlag(Status.SAME)


def _renamed(advice: str) -> VllmFlag:
    return VllmFlag(Status.RENAMED, advice)


def _refused(advice: str) -> VllmFlag:
    return VllmFlag(Status.REFUSED, advice)


_LATER = "not built yet"

VLLM_FLAGS: dict[str, VllmFlag] = {
    "--host": _same(),
    "--port": _same(),
    "--api-key": _same(),
    "--served-model-name": _same(),
    "--dtype": _same(),
    "--max-model-len": _same(),
    "--max-num-seqs": _same(),
    "--max-num-batched-tokens": _same(),
    "--long-prefill-token-threshold": _same(),
    "--scheduling-policy": _same(),
    "--block-size": _same(),
    "--enable-prefix-caching": _same(),
    "--no-enable-prefix-caching": _same(),
    "--kv-cache-memory-bytes": _same(),
    "--seed": _same(),
    "--revision": _same(),
    "--download-dir": _same(),
    "--chat-template": _same(),
    "--response-role": _same(),
    "--trust-request-chat-template": _same(),
    "--allowed-origins": _same(),
    "--distributed-executor-backend": _same(),
    "--config": _same(),
    "--gpu-memory-utilization": _renamed(
        "use --kv-cache-memory-fraction (a share of free memory) or --kv-cache-memory-bytes"
    ),
    "--num-gpu-blocks-override": _renamed("use --kv-cache-memory-bytes"),
    "--uvicorn-log-level": _renamed("use --log-level"),
    "--enable-log-requests": _renamed("use --log-requests"),
    "--tokenizer": _refused("the tokenizer always comes with the model; put it into its folder"),
    "--tokenizer-mode": _refused("there is one mode; leave it out"),
    "--load-format": _refused("the format is recognised from the files; leave it out"),
    "--trust-remote-code": _refused("code from model folders is never run; leave it out"),
    "--hf-overrides": _refused("edit the folder's config.json instead"),
    "--enable-chunked-prefill": _refused("prefill is always chunked; leave it out"),
    "--enforce-eager": _refused("nothing is captured or compiled; leave it out"),
    "--compilation-config": _refused("nothing is compiled at run time; leave it out"),
    "--swap-space": _refused("preempted requests are recomputed; leave it out"),
    "--cpu-offload-gb": _refused("weights are not offloaded; choose a smaller model or dtype"),
    "--kv-cache-dtype": _refused("the KV cache has the model's dtype; leave it out"),
    "--quantization": _refused(f"{_LATER}; a quantised GGUF file loads as it is"),
    "--tensor-parallel-size": _refused(f"{_LATER}; leave it out (1)"),
    "--pipeline-parallel-size": _refused(f"{_LATER}; leave it out (1)"),
    "--data-parallel-size": _refused(f"{_LATER}; leave it out (1)"),
    "--enable-expert-parallel": _refused(f"{_LATER}; leave it out"),
    "--api-server-count": _refused(f"{_LATER}; leave it out (1)"),
    "--enable-lora": _refused(f"{_LATER}; merge the adapter into the model"),
    "--speculative-config": _refused(f"{_LATER}; leave it out"),
    "--enable-auto-tool-choice": _refused(f"{_LATER}; tool calls are not parsed"),
    "--tool-call-parser": _refused(f"{_LATER}; tool calls are not parsed"),
    "--reasoning-parser": _refused(f"{_LATER}; reasoning stays in the text"),
    "--ssl-keyfile": _refused(f"{_LATER}; put a TLS proxy in front"),
    "--ssl-certfile": _refused(f"{_LATER}; put a TLS proxy in front"),
    "--disable-log-requests": _refused("it is off unless --log-requests is given; leave it out"),
    "--disable-log-stats": _refused("use --log-level warning"),
    "--max-logprobs": _refused("the limit is 20; leave it out"),
}
