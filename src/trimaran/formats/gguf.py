"""GGUF files: header, metadata, tensor directory and split files, read without trusting any number.

Owns: the container format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2
and 3, little endian. Every count, length and offset is checked against the file before anything is
allocated for it. Does not know what the metadata means (gguf_model) nor HF names (gguf_checkpoint).
"""

import hashlib
import itertools
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.errors import CheckpointError
from trimaran.formats.fields import show
from trimaran.formats.gguf_dequantize import TENSOR_TYPES, UNSUPPORTED_TYPES, TensorType
from trimaran.formats.mapped_file import MappedFile

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 22
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
MAX_PARTS = 10_000
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
# Scalar value types of metadata, by number, as struct and numpy little-endian codes.
_SCALARS = {
    0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8",
    12: "f8",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is row-major (rows first), the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file: MappedFile
    offset: int  # from the start of the file
    stored_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """All parts of one model. ``metadata`` is that of the first part, arrays as lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    tokenizer_sha256: str  # of the bytes of all tokenizer.* entries
    files: tuple[MappedFile, ...]

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_gguf(path: Path) -> GgufFile:
    """Read headers of ``path`` and, if it is the first of several parts, of the others.

    Raises CheckpointError naming the file (and tensor) that is missing, damaged or unsupported.
    """
    first = _read_part(path)
    count = _split_number(first, "split.count", 1)
    if count <= 1:
        return first
    names = _part_paths(path, first, count)
    parts = [first]
    for number, name in enumerate(names[1:], 1):
        part = _read_part(name)
        if (_split_number(part, "split.no", -1), _split_number(part, "split.count", -1)) != (
            number,
            count,
        ):
            raise CheckpointError(
                f"is not part {number + 1} of {count} of this model",
                file=str(name),
                hint="download all parts of one model into one folder",
            )
        parts.append(part)
    tensors: dict[str, GgufTensor] = {}
    for tensor in itertools.chain.from_iterable(part.tensors.values() for part in parts):
        if tensor.name in tensors:
            raise CheckpointError(
                "appears in two parts", file=str(tensor.file.path), tensor=tensor.name
            )
        tensors[tensor.name] = tensor
    files = tuple(file for part in parts for file in part.files)
    return GgufFile(path, first.metadata, tensors, first.tokenizer_sha256, files)


def _part_paths(path: Path, first: GgufFile, count: int) -> list[Path]:
    """Paths of all ``count`` parts, all present; ``path`` must be the first."""
    match = _PART_NAME.fullmatch(path.name)
    if not match or int(match[3]) != count:
        raise CheckpointError(
            f"this is one of {count} parts, but its name does not say which",
            file=str(path),
            hint=f"name the parts NAME-00001-of-{count:05}.gguf and so on",
        )
    names = [path.with_name(f"{match[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    number = _split_number(first, "split.no", 0)
    if number != 0 or path != names[0]:
        raise CheckpointError(
            f"this is part {number + 1} of {count}",
            file=str(path),
            hint=f"give the first part, {names[0].name}",
        )
    missing = [name.name for name in names if not name.is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {count} parts are missing: {', '.join(missing[:4])}",
            file=str(path),
            hint="download all parts into the same folder",
        )
    return names


def _split_number(part: GgufFile, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int) or not -1 <= value <= MAX_PARTS:
        raise CheckpointError(
            f"{key} is {value!r}, not a number up to {MAX_PARTS}", file=str(part.path)
        )
    return value


def _read_part(path: Path) -> GgufFile:
    file = MappedFile(path)
    cursor = _Cursor(file)
    _check_magic(cursor)
    num_tensors = cursor.count("tensor count", MAX_TENSORS, item_bytes=24)
    num_keys = cursor.count("metadata count", MAX_KEYS, item_bytes=13)
    metadata: dict[str, Any] = {}
    digest = hashlib.sha256()
    for _ in range(num_keys):
        start = cursor.position
        key = cursor.name("a metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
        if key.startswith("tokenizer."):
            digest.update(cursor.data[start : cursor.position])
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.error(
            f"general.alignment is {alignment!r}, not a power of two from 8 to {MAX_ALIGNMENT}"
        )
    directory = [cursor.tensor() for _ in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _place(directory, file, data_start, alignment)
    return GgufFile(path, metadata, tensors, digest.hexdigest(), (file,))


def _check_magic(cursor: "_Cursor") -> None:
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise cursor.error(
            f"not a GGUF file (it begins with {magic!r})", hint="give a .gguf model file"
        )
    cursor.position = 4
    version = cursor.u32("version")
    if version == 1:
        raise cursor.error("GGUF version 1 is obsolete", hint="convert the model again")
    if version & 0xFFFF == 0:
        raise cursor.error(
            "the file is big-endian", hint="get the little-endian file of this model"
        )
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not known", hint="versions 2 and 3 are read")


@dataclass(frozen=True)
class _Entry:
    """A line of the tensor directory, its size known, its place not yet checked."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of the data section
    stored_bytes: int


def _place(
    directory: list[_Entry], file: MappedFile, data_start: int, alignment: int
) -> dict[str, GgufTensor]:
    """Check that tensors are aligned, inside the file, apart from one another and of one name."""
    tensors: dict[str, GgufTensor] = {}
    previous, previous_end = "", 0
    for entry in sorted(directory, key=lambda entry: entry.offset):
        problem = hint = None
        end = entry.offset + entry.stored_bytes
        if entry.name in tensors:
            problem = "appears twice"
        elif entry.offset % alignment:
            problem = f"its offset {entry.offset} is not a multiple of the alignment {alignment}"
        elif entry.offset < previous_end:
            problem = f"overlaps {previous}"
        elif data_start + end > file.size:
            problem = (
                f"{entry.type.name} data ends at byte {data_start + end}, but the file has only"
                f" {file.size}: it is cut short"
            )
            hint = "download it again"
        if problem:
            raise CheckpointError(problem, file=str(file.path), tensor=entry.name, hint=hint)
        tensors[entry.name] = GgufTensor(
            entry.name,
            entry.shape,
            entry.type,
            file,
            data_start + entry.offset,
            entry.stored_bytes,
        )
        previous, previous_end = entry.name, end
    return tensors


class _Cursor:
    """Walks a header; every step is checked against the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.data = file.header()
        self.position = 0

    def error(self, problem: str, *, hint: str | None = None) -> CheckpointError:
        return CheckpointError(problem, file=str(self.path), hint=hint)

    def take(self, size: int, what: str) -> memoryview:
        end = self.position + size
        if end > len(self.data):
            raise self.error(
                f"the file ends at byte {len(self.data)}, inside {what}: it is cut short or"
                " damaged",
                hint="download it again",
            )
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def count(self, what: str, most: int, *, item_bytes: int) -> int:
        """A number of items of at least ``item_bytes`` each that must still follow."""
        value = self.u64(what)
        if value > most:
            raise self.error(f"{what} is {value}; at most {most} are accepted")
        if value * item_bytes > len(self.data) - self.position:
            raise self.error(
                f"{what} is {value}, more than the file can hold: it is cut short or damaged",
                hint="download it again",
            )
        return value

    def string(self, most: int, what: str) -> str:
        length = self.count(f"the length of {what}", most, item_bytes=1)
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}") from None

    def name(self, what: str) -> str:
        name = self.string(MAX_NAME_BYTES, what)
        if not name.isprintable():
            raise self.error(f"{what} is not printable: {show(name)}")
        return name

    def value(self, key: str) -> Any:
        kind = self.u32(key)
        if kind == _STRING:
            return self.string(MAX_STRING_BYTES, key)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str) -> list[Any]:
        kind = self.u32(key)
        if kind == _STRING:
            return self._strings(self.count(f"{key} items", MAX_ARRAY_ITEMS, item_bytes=8), key)
        return self._scalars(kind, self.count(f"{key} items", MAX_ARRAY_ITEMS, item_bytes=1), key)

    def _scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self.error(f"metadata key {key!r} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize, key), dtype).tolist()
        return values

    def _strings(self, count: int, key: str) -> list[str]:
        """The vocabulary: hundreds of thousands, so without a call for each."""
        data, position, end = self.data, self.position, len(self.data)
        values = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + _U64.unpack_from(data, position)[0]
                if position > end:
                    break
                values.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.error(f"{key}[{len(values)}] is not UTF-8: {error.reason}") from None
        except struct.error:
            position = end + 1
        if position > end:
            raise self.error(
                f"the file ends inside {key}[{len(values)}]: it is cut short or damaged",
                hint="download it again",
            )
        self.position = position
        return values

    def tensor(self) -> _Entry:
        name = self.name("a tensor name")
        num_dimensions = self.u32(name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(
                f"has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}",
                file=str(self.path),
                tensor=name,
            )
        shape = tuple(self.u64(name) for _ in range(num_dimensions))[::-1]
        number = self.u32(name)
        tensor_type = TENSOR_TYPES.get(number)
        if tensor_type is None:
            known = UNSUPPORTED_TYPES.get(number, "unknown")
            raise CheckpointError(
                f"tensor type {number} ({known}) is not supported",
                file=str(self.path),
                tensor=name,
                hint="use a file in " + ", ".join(t.name for t in TENSOR_TYPES.values()),
            )
        elements = 1
        for size in shape:
            elements *= size
        if elements < 1 or shape[-1] % tensor_type.block_elements:
            raise CheckpointError(
                f"shape {shape} does not divide into {tensor_type.name} blocks of"
                f" {tensor_type.block_elements}",
                file=str(self.path),
                tensor=name,
            )
        stored = elements // tensor_type.block_elements * tensor_type.block_bytes
        return _Entry(name, shape, tensor_type, self.u64(name), stored)
