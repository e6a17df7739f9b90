"""What the front end needs of a model's files: shape, tokenizer, chat template; no weights.

Called by AsyncLLM, LLM and server/. Blocks on files (and, for a hub id, on the network).
"""

from pathlib import Path
from typing import NamedTuple

import msgspec

from trimaran.config import EngineConfig, ModelConfig
from trimaran.errors import ConfigError
from trimaran.formats.checkpoint import ModelSource
from trimaran.formats.hub import locate_model
from trimaran.formats.model_source import open_model
from trimaran.text.chat_template import ChatTemplate, choose_template
from trimaran.text.tokenizer import Tokenizer, load_tokenizer


class ModelFiles(NamedTuple):
    source: ModelSource
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def open_model_files(config: ModelConfig) -> ModelFiles:
    """Find the model and read everything but its weights.

    Raises CheckpointError, ConfigError.
    """
    path = locate_model(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        offline=config.offline,
    )
    source = open_model(path)
    tokenizer = load_tokenizer(source.tokenizer)
    return ModelFiles(source, tokenizer, _chat_template(config, source, tokenizer))


def with_model_path(config: EngineConfig, path: Path) -> EngineConfig:
    """The settings for an engine, which takes a path and never searches or downloads."""
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, model=str(path))
    )


def _chat_template(
    config: ModelConfig, source: ModelSource, tokenizer: Tokenizer
) -> ChatTemplate | None:
    text = choose_template(source.tokenizer, tools=False)
    if config.chat_template is not None:
        text = config.chat_template
        if "{" not in text:  # a path, then; a template without a single tag would be of no use
            try:
                text = Path(text).read_text("utf-8")
            except OSError as error:
                raise ConfigError(
                    f"--chat-template {config.chat_template}: {error.strerror or error}"
                ) from error
    if text is None:
        return None
    return ChatTemplate(
        text,
        bos_token=_token(tokenizer, tokenizer.bos_token_id),
        eos_token=_token(tokenizer, tokenizer.eos_token_id),
    )


def _token(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
