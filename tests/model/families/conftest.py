"""Every model test of this folder runs on each implementation of the kernels."""

import pytest
import torch

from trimaran.model.kernels.base import Kernels
from trimaran.model.kernels.native import usable_variants
from trimaran.model.kernels.select import select_kernels


@pytest.fixture(params=["torch", "native"])
def kernels(request) -> Kernels:
    if request.param == "native" and not usable_variants():
        pytest.skip("the compiled kernels are not built here")
    return select_kernels(request.param, torch.device("cpu"))
