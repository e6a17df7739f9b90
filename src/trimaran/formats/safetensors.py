"""Folders of safetensors files: one file, or shards and their index; read without trusting them.

Owns: the container format (https://huggingface.co/docs/safetensors, "Format") and the rules of
model.safetensors.index.json. Names are mapped to those of the text model where the folder holds a
larger one. Fulfils the protocol of checkpoint.py. Called by model_source.
"""

import itertools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.errors import CheckpointError
from trimaran.formats.fields import show
from trimaran.formats.json_file import parse_json, read_json
from trimaran.formats.mapped_file import MappedFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 1 << 26
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 8
MAX_NAME_CHARS = 1 << 10

# As named in the files: (read_dtype, numpy type).
_WEIGHT_TYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F32": ("float32", np.dtype("<f4")),
    "F16": ("float16", np.dtype("<f2")),
    "BF16": ("bfloat16", np.dtype("<u2")),
}
# Buffers such as position ids; no weights, so not listed.
_OTHER_TYPES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "I64": 8}
# What a multimodal Gemma 3 calls its text model (transformers 4 and 5), and the rest of it.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
             "model.multi_modal_projector.")  # fmt: skip


@dataclass(frozen=True)
class SafetensorsSource:
    """One tensor in a mapped file."""

    name: str
    shape: tuple[int, ...]
    read_dtype: str
    file: MappedFile
    offset: int
    stored_bytes: int
    dtype: np.dtype[Any]

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        num_rows = self.shape[0] if self.shape else 1
        start, stop, _ = slice(start, stop).indices(num_rows)
        row_bytes = self.stored_bytes // num_rows if num_rows else 0
        length = max(stop - start, 0) * row_bytes
        raw = self.file.view(self.offset + start * row_bytes, length)
        if len(raw) and self.offset % self.dtype.itemsize:
            raw = raw.copy()  # older writers did not align
        shape = (max(stop - start, 0), *self.shape[1:]) if self.shape else ()
        return raw.view(self.dtype).reshape(shape)


class SafetensorsCheckpoint:
    """Weights of a folder. Raises CheckpointError: a shard missing, a header damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[MappedFile] = []
        self._sources: dict[str, SafetensorsSource] = {}
        for path in _weight_files(folder):
            file = MappedFile(path)
            self._files.append(file)
            for source in _read_header(file):
                if source.name in self._sources:
                    raise CheckpointError(
                        "appears in two files", file=str(path), tensor=source.name
                    )
                self._sources[source.name] = source

    def names(self) -> list[str]:
        return list(self._sources)

    def tensor(self, name: str) -> SafetensorsSource:
        source = self._sources.get(name)
        if source is None:
            raise CheckpointError(
                "no such tensor in the files of this folder",
                file=str(self._folder),
                tensor=name,
                hint="the folder does not hold the model its config.json describes",
            )
        return source

    def close(self) -> None:
        for file in self._files:
            file.close()


def _weight_files(folder: Path) -> list[Path]:
    """The single file, or all shards the index names; every one exists."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise _no_weights(folder)
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no weight_map", file=str(index))
    names = sorted({name for name in weight_map.values() if isinstance(name, str)})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"names {show(name)}, which is not a safetensors file of this folder",
                file=str(index),
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} files are missing: {', '.join(missing[:4])}",
            file=str(folder),
            hint="download the missing files into this folder",
        )
    return [folder / name for name in names]


def _no_weights(folder: Path) -> CheckpointError:
    pickled = sorted(
        path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}")
    )
    if pickled:
        return CheckpointError(
            f"weights are only in {pickled[0]}, a pickle: loading one can run any code",
            file=str(folder),
            hint="convert the model to safetensors, or get a repository that has them",
        )
    return CheckpointError(f"no weights: neither {SINGLE_FILE} nor {INDEX_FILE}", file=str(folder))


def _read_header(file: MappedFile) -> list[SafetensorsSource]:
    data, path = file.header(), str(file.path)
    if len(data) < 8:
        raise CheckpointError("not a safetensors file: shorter than its header", file=path)
    header_bytes: int = struct.unpack_from("<Q", data)[0]
    if header_bytes > MAX_HEADER_BYTES or header_bytes > len(data) - 8:
        raise CheckpointError(
            f"not a safetensors file, or cut short: its header would have {header_bytes} bytes",
            file=path,
            hint="download it again",
        )
    start = 8 + header_bytes
    entries = parse_json(bytes(data[8:start]), path)
    if len(entries) > MAX_TENSORS:
        raise CheckpointError(f"names {len(entries)} tensors, at most {MAX_TENSORS}", file=path)
    ranges: list[tuple[int, int, str]] = []
    sources = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise CheckpointError(f"has a tensor named {show(name)}", file=path)
        source, begin, end = _entry(file, name, entry, start)
        ranges.append((begin, end, name))
        if source:
            sources.append(source)
    ranges.sort()
    for (_, end, _), (begin, _, name) in itertools.pairwise(ranges):
        if begin < end:
            raise CheckpointError("overlaps another tensor", file=path, tensor=name)
    return sources


def _entry(
    file: MappedFile, name: str, entry: Any, start: int
) -> tuple[SafetensorsSource | None, int, int]:
    """The tensor (None for a buffer or another model's part) and its range after ``start``."""

    def error(problem: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(problem, file=str(file.path), tensor=name, hint=hint)

    entry = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if (
        not isinstance(kind, str)
        or not _natural_numbers(shape, MAX_DIMENSIONS)
        or not _natural_numbers(offsets, 2, 2)
    ):
        raise error("its header entry is damaged", "download the file again")
    if kind in _WEIGHT_TYPES:
        read_dtype, dtype = _WEIGHT_TYPES[kind]
        item_bytes = dtype.itemsize
    elif kind in _OTHER_TYPES:
        read_dtype, dtype, item_bytes = "", np.dtype(np.uint8), _OTHER_TYPES[kind]
    else:
        raise error(f"type {show(kind)} is not supported", "supported: F32, F16, BF16")
    begin, end = offsets
    if end - begin != math.prod(shape) * item_bytes:
        raise error(f"{end - begin} bytes do not make a {kind} tensor of shape {show(shape)}")
    if start + end > file.size:
        raise error(
            f"data ends at byte {start + end}, but the file has only {file.size}: it is cut short",
            "download it again",
        )
    text_name = _text_name(name)
    if not read_dtype or text_name is None:
        return None, begin, end
    source = SafetensorsSource(
        text_name, tuple(shape), read_dtype, file, start + begin, end - begin, dtype
    )
    return source, begin, end


def _text_name(name: str) -> str | None:
    if name.startswith(_NOT_TEXT):
        return None
    for prefix, text_prefix in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name


def _natural_numbers(value: Any, most: int, least: int = 0) -> bool:
    """A list of ``least`` to ``most`` integers below 2^63, none negative."""
    return (
        isinstance(value, list)
        and least <= len(value) <= most
        and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
    )
