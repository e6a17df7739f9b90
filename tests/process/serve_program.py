"""``serve`` as a program: python -m tests.process.serve_program CONFIG_JSON API_ENTRY ENGINE_ENTRY.

The model is found at once, or (a model named "slow", "missing") as a test needs it; the variable
TEST_LACKS takes something from the process that it needs.
"""

import os
import resource
import sys
import tempfile
import threading

import msgspec

from trimaran.config import Config, ModelConfig
from trimaran.errors import CheckpointError
from trimaran.launch.supervisor import serve


def find_model(model: ModelConfig, on_progress: object) -> str:
    if model.model == "missing":
        raise CheckpointError("no such file or folder", file="missing", hint="give a folder")
    if model.model == "slow":
        on_progress(1, 4, "model.safetensors")
        threading.Event().wait()
    return model.model if "/" in model.model else f"/models/{model.model}"


def lack(what: str) -> None:
    if what == "a folder":
        tempfile.tempdir = "/proc/1"
    if what == "descriptors":
        limit = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


if __name__ == "__main__":
    lack(os.environ.get("TEST_LACKS", ""))
    config = msgspec.json.decode(sys.argv[1], type=Config)
    api_entry, engine_entry = sys.argv[2:]
    code = serve(config, api_entry=api_entry, engine_entry=engine_entry, find_model=find_model)
    print("torch" in sys.modules, flush=True)
    sys.exit(code)
