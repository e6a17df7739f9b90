"""JSON objects from a model folder: bounded in size, and every fault a CheckpointError.

Owns: reading and parsing. Knows no keys. Called by everything here that reads JSON.
"""

import json
from pathlib import Path
from typing import Any

from trimaran.errors import CheckpointError

MAX_CONFIG_BYTES = 1 << 24


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """The content of ``path``. Raises CheckpointError: unreadable, or above ``max_bytes``."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", file=str(path)
        ) from None
    if len(content) > max_bytes:
        raise CheckpointError(f"has more than {max_bytes} bytes", file=str(path))
    return content


def parse_json(content: bytes, file: str) -> dict[str, Any]:
    """The object that ``content`` is; ``file`` is named in the error."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CheckpointError(
            f"is not valid JSON: {error}", file=file, hint="download it again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError("is JSON, but not an object", file=file)
    return value


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    return parse_json(read_text(path, max_bytes), str(path))


def read_optional_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file."""
    return read_json(path) if path.is_file() else {}
