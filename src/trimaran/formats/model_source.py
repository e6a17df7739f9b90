"""From a path to everything a model offers: the door to formats/.

Owns: telling a folder from a .gguf file, and putting the parts together. Called by the front end
(tokenizer, limits) and by the model loader (weights); each opens for itself.
"""

from pathlib import Path

from trimaran.errors import CheckpointError
from trimaran.formats import config_json, gguf_model
from trimaran.formats.checkpoint import Checkpoint, ModelSource
from trimaran.formats.fields import Fields
from trimaran.formats.folder_tokenizer import read_tokenizer
from trimaran.formats.gguf import open_gguf
from trimaran.formats.gguf_checkpoint import GgufCheckpoint
from trimaran.formats.json_file import read_json, read_optional_json
from trimaran.formats.safetensors import SafetensorsCheckpoint


def open_model(path: Path) -> ModelSource:
    """Read and check every header of the model at ``path``; no weights.

    Raises CheckpointError naming what is missing, damaged or unsupported.
    """
    if path.is_dir():
        return _open_folder(path)
    gguf = open_gguf(path)
    try:
        architecture = gguf_model.read_architecture(gguf)
        GgufCheckpoint(gguf, architecture)
        return ModelSource(
            path,
            architecture,
            gguf_model.read_generation(gguf),
            gguf_model.read_tokenizer(gguf),
        )
    finally:
        gguf.close()


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """The weights of ``source``, mapped. Raises CheckpointError as ``open_model`` does."""
    if source.path.is_dir():
        return SafetensorsCheckpoint(source.path)
    return GgufCheckpoint(open_gguf(source.path), source.architecture)


def _open_folder(folder: Path) -> ModelSource:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(
            "has no config.json",
            file=str(folder),
            hint="give a folder with config.json and safetensors files, or a .gguf file",
        )
    config = read_json(config_path)
    checkpoint = SafetensorsCheckpoint(folder)
    try:
        weights_dtype = checkpoint.tensor("model.embed_tokens.weight").read_dtype
    finally:
        checkpoint.close()
    architecture = config_json.read_architecture(
        config, str(config_path), weights_dtype=weights_dtype
    )
    tokenizer, end_ids = read_tokenizer(folder)
    generation_path = folder / "generation_config.json"
    generation = config_json.read_generation(
        config,
        str(config_path),
        Fields(read_optional_json(generation_path), file=str(generation_path)),
        end_ids,
    )
    return ModelSource(folder, architecture, generation, tokenizer)
