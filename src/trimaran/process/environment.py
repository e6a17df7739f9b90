"""The environment that children get.

Owns: which variables are secrets (removed: a child receives what it needs in its spec) and how the
parent's import path reaches a child that is not started from the same script.
"""

import fnmatch
import os
import sys
from collections.abc import Mapping

_SECRETS = ("TRIMARAN_*KEY*", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of ours without secrets, with our import path and ``extra``."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRETS)
    }
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment.update(extra or {})
    return environment
