"""Every model test of this folder runs on each implementation of the kernels."""

import pytest

from trimaran.model.kernels.base import Kernels
from trimaran.model.kernels.torch_kernels import TorchKernels


@pytest.fixture(params=["torch"])
def kernels(request) -> Kernels:
    return TorchKernels()
