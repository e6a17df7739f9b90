"""safetensors folders: what is read, and that every damage is one clear error."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from trimaran.errors import CheckpointError
from trimaran.formats.safetensors import SafetensorsCheckpoint

TENSORS = {
    "model.embed_tokens.weight": torch.randn(16, 8, generator=torch.manual_seed(0)),
    "model.norm.weight": torch.randn(8, generator=torch.manual_seed(1)).to(torch.bfloat16),
    "model.layers.0.mlp.up_proj.weight": torch.randn(4, 8).half(),
    "lm_head.weight": torch.randn(16, 8),
    "model.layers.0.self_attn.position_ids": torch.arange(5),
}


def bits(tensor):
    """Bit patterns of a torch tensor, for a comparison that knows no rounding."""
    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(width).numpy()


def write_raw(path, header, data=b"\0" * 64):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_tensors_are_those_that_were_saved(folder):
    checkpoint = SafetensorsCheckpoint(folder)
    weights = {name: t for name, t in TENSORS.items() if "position_ids" not in name}
    assert set(checkpoint.names()) == set(weights)
    dtypes = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    for name, tensor in weights.items():
        source = checkpoint.tensor(name)
        assert source.name == name
        assert source.shape == tuple(tensor.shape)
        assert source.read_dtype == dtypes[tensor.dtype]
        assert source.stored_bytes == tensor.numel() * tensor.element_size()
        got = source.read()
        assert got.dtype.itemsize == tensor.element_size()
        assert np.array_equal(got.view(f"i{got.itemsize}"), bits(tensor))
        rows = source.read(1, 3)
        assert np.array_equal(rows.view(f"i{rows.itemsize}"), bits(tensor[1:3]))
        assert not got.flags.writeable
    with pytest.raises(CheckpointError, match=r"model\.nothing: no such tensor") as caught:
        checkpoint.tensor("model.nothing")
    assert caught.value.file == str(folder)
    checkpoint.close()


def write_shards(folder, weight_map=None):
    names = sorted(TENSORS)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: TENSORS[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map or files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def test_shards(tmp_path):
    files = write_shards(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name in set(checkpoint.names()):
        expected = load_file(tmp_path / files[name])[name]
        assert np.array_equal(checkpoint.tensor(name).read().view("i2"), bits(expected).view("i2"))
    assert len(checkpoint.names()) == 4


def test_a_stale_index_names_the_missing_shard(tmp_path):
    files = write_shards(tmp_path)
    extra = files | {"more": "model-00003-of-00003.safetensors"}
    write_shards(tmp_path, extra)
    with pytest.raises(CheckpointError, match=r"1 of 3 files are missing: model-00003-of-00003\."):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin"]
)
def test_an_index_stays_in_its_folder(tmp_path, name):
    write_shards(tmp_path, {"model.norm.weight": name})
    with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": ', "is not valid JSON"),
        ("[]", "not an object"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_damaged_index(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_a_folder_without_safetensors(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights: neither model\.safetensors nor"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"only in pytorch_model\.bin, a pickle.*convert"):
        SafetensorsCheckpoint(tmp_path)


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff", "is not valid JSON"),
        (b"[1]", "is JSON, but not an object"),
        ({"w": entry("F8_E4M3", (16,))}, "w: type 'F8_E4M3' is not supported"),
        ({"w": entry("F64", (2,))}, "w: type 'F64' is not supported"),
        ({"w": entry(["F32"])}, "w: its header entry is damaged"),
        ({"w\nforged": entry()}, r"has a tensor named 'w\\nforged'"),
        ({"w": 5}, "w: its header entry is damaged"),
        ({"w": entry(shape=(-4,))}, "w: its header entry is damaged"),
        ({"w": entry(shape=(True,))}, "w: its header entry is damaged"),
        ({"w": entry(shape=(1 << 64,))}, "w: its header entry is damaged"),
        ({"w": entry(shape=(1,) * 9)}, "w: its header entry is damaged"),
        ({"w": entry(offsets=(0,))}, "w: its header entry is damaged"),
        ({"w": entry(offsets=(16, 0))}, "w: -16 bytes do not make"),
        ({"w": entry(shape=(5,))}, "w: 16 bytes do not make a F32 tensor of shape"),
        ({"w": entry(shape=(1 << 40, 1 << 40))}, "w: 16 bytes do not make"),
        ({"w": entry(offsets=(64, 80))}, "w: data ends at byte .*cut short.*download it again"),
        ({"v": entry(), "w": entry(offsets=(8, 24))}, "w: overlaps another tensor"),
    ],
)
def test_damage_is_one_line_that_names_it(tmp_path, header, message):
    write_raw(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert caught.value.file == str(tmp_path / "model.safetensors")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"abc", "shorter than its header"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header would have 4611686018427387904 bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "not a safetensors file, or cut short"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    write_shards(tmp_path)
    for number in (1, 2):
        save_file({"w": torch.zeros(4)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="w: appears in two files"):
        SafetensorsCheckpoint(tmp_path)


def test_unaligned_data_is_read(tmp_path):
    values = np.arange(4, dtype=np.float32)
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    header += b" " * (1 - len(header) % 4 + 4)  # so that the data begins at an odd address
    write_raw(tmp_path / "model.safetensors", header, values.tobytes())
    source = SafetensorsCheckpoint(tmp_path).tensor("w")
    assert source.offset % 4
    assert np.array_equal(source.read(), values)
    assert source.read().flags.aligned


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file(TENSORS, path)
    return path.read_bytes()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_mutated_header_raises_nothing_else_and_allocates_little(content, tmp_path, data):
    mutated = bytearray(content)
    pieces = [b"9" * 6, b"-1", b"[[", b'"', b"}", b"null", b"1e99", b"F8", b"\xff", b"NaN"]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 560))
        piece = data.draw(st.one_of(st.sampled_from(pieces), st.binary(min_size=1, max_size=4)))
        mutated[position : position + len(piece)] = piece
    path = tmp_path / "model.safetensors"
    path.write_bytes(mutated[: data.draw(st.sampled_from([len(mutated)] * 3 + [9, 300]))])
    tracemalloc.start()
    try:
        checkpoint = SafetensorsCheckpoint(tmp_path)
    except CheckpointError as error:
        message = str(error)
    else:
        message = str(tmp_path)
        for name in checkpoint.names():
            checkpoint.tensor(name).read()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert str(tmp_path) in message
    assert "\n" not in message
    assert peak < 4 << 20
