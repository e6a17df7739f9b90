"""Every compiled library this machine can run, and memory that shows what was not written."""

from collections.abc import Iterator

import pytest
import torch

from trimaran.model.kernels.native import VARIANTS, NativeKernels, cpu_features, library


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        features = cpu_features()
        runnable = [name for name, needed in VARIANTS.items() if needed <= features]
        metafunc.parametrize("variant", runnable)


@pytest.fixture
def native(variant: str) -> NativeKernels:
    assert library(variant).is_file(), "build them: python setup.py build_ext --inplace"
    return NativeKernels(variant)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty holds NaN, so an element that no kernel writes fails a comparison."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
