"""The GGUF container: what is read, and that every damage is one clear error."""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.formats.gguf_files import model_entries, model_tensors, write_gguf

from trimaran.errors import CheckpointError
from trimaran.formats.gguf import open_gguf
from trimaran.formats.model_source import open_model


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def tensor_entry(name, dimensions=(32,), kind=0, offset=0):
    return (
        string(name)
        + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        + struct.pack("<IQ", kind, offset)
    )


def raw_gguf(path, *, version=3, entries=(), tensors=(), data=b"\0" * 256, counts=None):
    """A file made by hand, for what no proper writer would write."""
    num_tensors, num_keys = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    head += b"".join(entries) + b"".join(tensors)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


@pytest.fixture
def model(path):
    return write_gguf(path, "llama", model_entries("llama"), model_tensors("llama"))


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_those_the_package_reads(model, version):
    content = bytearray(model.read_bytes())
    content[4:8] = struct.pack("<I", version)
    model.write_bytes(content)
    ours, theirs = open_gguf(model), gguf.GGUFReader(model)
    expected = {key: field.contents() for key, field in theirs.fields.items() if key[:5] != "GGUF."}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (mine.offset, mine.stored_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.type.name == tensor.tensor_type.name


def test_every_metadata_type(path):
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 1 << 31,
        "int32": -(1 << 31), "uint64": 1 << 63, "int64": -(1 << 63), "float32": 0.5,
        "float64": 0.1, "bool": True, "string": "žluť 🦀",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    arrays = {"ints": [-1, 2], "floats": [0.5, 1.5], "strings": ["", "ab"], "bools": [True, False]}
    for name, value in arrays.items():
        writer.add_array(f"x.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = open_gguf(path).metadata
    for name, value in (values | arrays).items():
        assert metadata[f"x.{name}"] == value
        assert type(metadata[f"x.{name}"]) is type(value)


def test_the_fingerprint_is_of_the_tokenizer_alone(tmp_path):
    def digest(name, entries):
        return open_gguf(write_gguf(tmp_path / name, "llama", entries)).tokenizer_sha256

    entries = model_entries("llama")
    first = digest("a", entries)
    assert digest("b", entries | {"llama.context_length": 128}) == first
    assert digest("c", entries | {"tokenizer.ggml.bos_token_id": 2}) != first


def test_another_alignment(path):
    tensors = model_tensors("llama")
    entries = model_entries("llama")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_uint32("llama.block_count", entries["llama.block_count"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    for name, tensor in file.tensors.items():
        assert tensor.offset % 256 == 0
        raw = tensor.file.view(tensor.offset, tensor.stored_bytes)
        assert np.array_equal(raw.view(np.float32), tensors[name].reshape(-1))


F32, BAD = struct.pack("<I", 6), struct.pack("<I", 77)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.write_bytes(b""), "the file is empty"),
        (lambda p: None, "cannot be read: No such file"),
        (lambda p: p.write_text("hello, this is text\n" * 9), r"not a GGUF file .*b'hell'"),
        (lambda p: p.write_bytes(b"GG"), "not a GGUF file"),
        (lambda p: p.write_bytes(b"GGUF\3"), "ends at byte 5, inside version"),
        (lambda p: raw_gguf(p, version=1), "version 1 is obsolete.*convert"),
        (lambda p: raw_gguf(p, version=3 << 24), "big-endian"),
        (lambda p: raw_gguf(p, version=4), "version 4 is not known"),
        (lambda p: raw_gguf(p, counts=(1 << 63, 0)), "tensor count is 9223372036854775808"),
        (lambda p: raw_gguf(p, counts=(0, 1 << 40)), "metadata count is 1099511627776"),
        (lambda p: raw_gguf(p, counts=(60_000, 0)), "tensor count is 60000, more than the file"),
        (lambda p: raw_gguf(p, entries=[string("k") + BAD]), "'k' has the unknown value type 77"),
        (
            lambda p: raw_gguf(p, entries=[string("k") + F32 + b"\0" * 4] * 2),
            "'k' appears twice",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w\nforged log line")]),
            r"a tensor name is not printable: 'w\\nforged log line'",
        ),
        (
            lambda p: raw_gguf(p, entries=[struct.pack("<Q", 1 << 62)], counts=(0, 1)),
            "the length of a metadata key is",
        ),
        (
            lambda p: raw_gguf(p, entries=[string("k") + struct.pack("<IIQ", 9, 4, 1 << 61)]),
            "k items is 2305843009213693952; at most",
        ),
        (
            lambda p: raw_gguf(p, entries=[string("k") + struct.pack("<IIQ", 9, 8, 1 << 20)]),
            "k items is 1048576, more than the file can hold",
        ),
        (
            lambda p: raw_gguf(p, entries=[string("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 60)]),
            r"ends inside k\[",
        ),
        (
            lambda p: raw_gguf(p, entries=[string("k") + struct.pack("<IIQ", 9, 9, 1)]),
            "unknown value type 9",
        ),
        (
            lambda p: raw_gguf(p, entries=[string("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"]),
            "k is not UTF-8",
        ),
        (
            lambda p: raw_gguf(p, entries=[string("general.alignment") + struct.pack("<II", 4, 3)]),
            "general.alignment is 3, not a power of two",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", kind=99)]),
            r"w: tensor type 99 \(unknown\) is not supported \(use a file in F32, F16",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", (256,), kind=10)]),
            r"w: tensor type 10 \(Q2_K\)",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", (1,) * 5)]),
            "w: has 5 dimensions, not 1 to 4",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", (0, 4))]),
            r"w: shape \(4, 0\) does not divide",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", (33,), kind=8)]),
            r"w: shape \(33,\) does not divide into Q8_0 blocks of 32",
        ),
        (
            # 2^32 x 2^32 elements would wrap to 0 in 64 bits.
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", (1 << 32, 1 << 32))]),
            "w: F32 data ends at byte .*cut short.*download it again",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", offset=(1 << 64) - 32)]),
            "w: F32 data ends at byte",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w", offset=4)]),
            "w: its offset 4 is not a multiple of the alignment 32",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("v"), tensor_entry("w", offset=96)]),
            "w: overlaps v",
        ),
        (
            lambda p: raw_gguf(p, tensors=[tensor_entry("w"), tensor_entry("w", offset=128)]),
            "w: appears twice",
        ),
    ],
)
def test_damage_is_one_line_that_names_it(path, make, message):
    make(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_cut_in_half_names_a_tensor(model):
    content = model.read_bytes()
    model.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"blk\.\d\..*cut short") as caught:
        open_gguf(model)
    assert caught.value.tensor in model_tensors("llama")


def write_split(folder):
    tensors = model_tensors("llama")
    write_gguf(folder / "m.gguf", "llama", model_entries("llama"), tensors, split_max_tensors=15)
    return tensors, folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf"


def test_the_first_part_of_a_split_file_loads_all(tmp_path):
    tensors, first, second = write_split(tmp_path)
    file = open_gguf(first)
    assert set(file.tensors) == set(tensors)
    assert {tensor.file.path for tensor in file.tensors.values()} == {first, second}
    for name, tensor in file.tensors.items():
        raw = tensor.file.view(tensor.offset, tensor.stored_bytes)
        assert np.array_equal(raw.view(np.float32), tensors[name].reshape(-1))
    file.close()


def test_parts_that_are_not_the_first_missing_or_strange(tmp_path):
    _, first, second = write_split(tmp_path)
    with pytest.raises(CheckpointError, match=r"part 2 of 2 \(give the first part, m-00001-of-0"):
        open_gguf(second)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 parts are missing: m-00002-of-00002\.gguf"):
        open_gguf(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf: is not part 2 of 2"):
        open_gguf(first)
    second.write_bytes(content)
    with pytest.raises(CheckpointError, match="its name does not say which"):
        open_gguf(first.rename(tmp_path / "renamed.gguf"))


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    write_gguf(path, "llama", model_entries("llama"), model_tensors("llama"))
    return path.read_bytes()


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_mutated_header_raises_nothing_else_and_allocates_little(header, tmp_path, data):
    content = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 2600))
        piece = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.integers(0, (1 << 64) - 1).map(lambda n: struct.pack("<Q", n)),
                st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 31)]),
            )
        )
        content[position : position + len(piece)] = piece
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content)] * 3 + [500, 2500]))])
    tracemalloc.start()
    try:
        open_model(path)
    except CheckpointError as error:
        message = str(error)
    else:
        message = str(path)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert str(path) in message
    assert "\n" not in message
    assert peak < 4 << 20
