"""Tokenizer files of a Hugging Face folder, and what they say of templates and token ids.

Owns: tokenizer.json (found and fingerprinted, not interpreted), tokenizer_config.json,
chat_template.jinja, chat_template.json and additional_chat_templates/. Called by model_source.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from trimaran.errors import CheckpointError
from trimaran.formats.architecture import TokenizerFiles
from trimaran.formats.fields import show
from trimaran.formats.json_file import read_optional_json, read_text
from trimaran.formats.model_facts import END_OF_TURN_TOKENS, MAX_TOKEN_ID

MAX_TOKENIZER_BYTES = 1 << 28
MAX_TEMPLATE_BYTES = 1 << 22


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerJson(msgspec.Struct):
    """The one part of tokenizer.json that is read here; the rest is skipped, not built."""

    added_tokens: list[_AddedToken] = []


def read_tokenizer(folder: Path) -> tuple[TokenizerFiles, set[int]]:
    """The files, and the ids of their end-of-sequence and end-of-turn tokens.

    Raises CheckpointError: a file that is damaged, or too large to be what its name says.
    """
    path = folder / "tokenizer.json"
    config_path = folder / "tokenizer_config.json"
    config = read_optional_json(config_path)
    content = read_text(path, MAX_TOKENIZER_BYTES) if path.is_file() else b""
    digest = hashlib.sha256(content)
    if config_path.is_file():
        digest.update(read_text(config_path))
    templates = _templates(folder, config)
    files = TokenizerFiles(
        fingerprint=digest.hexdigest(),
        tokenizer_json=str(path) if content else None,
        config=config,
        chat_template=templates.get("default"),
        chat_templates=templates if len(templates) > 1 or "default" not in templates else {},
    )
    return files, _end_ids(config, content, path, templates)


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name, the newest form winning: files, then chat_template.json, then the tokenizer's."""
    found: dict[str, str] = {}
    legacy = read_optional_json(folder / "chat_template.json")
    for value in (config.get("chat_template"), legacy.get("chat_template")):
        found |= _named_templates(value, folder)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _template_text(path)
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = _template_text(path)
    return found


def _named_templates(value: Any, folder: Path) -> dict[str, str]:
    """A template, or a list of {"name": …, "template": …}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    named = {}
    for entry in entries:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (0, 0)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(f"chat_template has {show(entry)}, no template", file=str(folder))
        named[name] = text
    return named


def _template_text(path: Path) -> str:
    try:
        return str(read_text(path, MAX_TEMPLATE_BYTES), "utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is not UTF-8: {error.reason}", file=str(path)) from None


def _end_ids(
    config: dict[str, Any], content: bytes, path: Path, templates: dict[str, str]
) -> set[int]:
    """Ids of the tokenizer's eos_token and of the end-of-turn tokens its templates write."""
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    ends = {
        token for token in END_OF_TURN_TOKENS if any(token in text for text in templates.values())
    }
    ends |= {eos} if isinstance(eos, str) else set()
    if not ends or not content:
        return set()
    try:
        added = msgspec.json.decode(content, type=_TokenizerJson).added_tokens
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(
            f"is not a tokenizer: {error}", file=str(path), hint="download it again"
        ) from None
    return {t.id for t in added if t.content in ends and 0 <= t.id <= MAX_TOKEN_ID}
