"""The choice of kernels, and what a user hears of it."""

import logging
import shutil

import pytest
import torch

from trimaran.errors import ConfigError
from trimaran.model.kernels import native
from trimaran.model.kernels.select import select_kernels

CPU = torch.device("cpu")


def test_auto_takes_the_best_compiled_library(caplog):
    with caplog.at_level(logging.WARNING):
        kernels = select_kernels("auto", CPU)
    assert kernels.name == f"native-{native.usable_variants()[0]}"
    assert not caplog.records


def test_torch_when_asked_for():
    assert select_kernels("torch", CPU).name == "torch"


def test_a_device_without_compiled_kernels():
    meta = torch.device("meta")
    assert select_kernels("auto", meta).name == "torch"
    with pytest.raises(ConfigError, match="device meta"):
        select_kernels("native", meta)


def test_without_libraries_torch_serves_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert select_kernels("auto", CPU).name == "torch"
    (record,) = caplog.records
    assert "not built" in record.message
    assert "install g++" in record.message
    with pytest.raises(ConfigError, match=r"not built.*install g\+\+"):
        select_kernels("native", CPU)


def test_a_damaged_library_is_not_fatal(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native.library("generic").write_bytes(b"not a library")
    with caplog.at_level(logging.WARNING):
        assert select_kernels("auto", CPU).name == "torch"
    assert "kernels_generic.so" in caplog.text


def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch):
    shutil.copy(native.library("generic"), tmp_path)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "INTERFACE_VERSION", native.INTERFACE_VERSION + 1)
    with pytest.raises(ConfigError, match="version"):
        select_kernels("native", CPU)


def test_features_decide(monkeypatch):
    monkeypatch.setattr(native, "cpu_features", lambda: {"avx2", "fma", "avx512f"})
    assert native.usable_variants() == ["avx2", "generic"]
    monkeypatch.setattr(native, "cpu_features", set)
    assert native.usable_variants() == ["generic"]
