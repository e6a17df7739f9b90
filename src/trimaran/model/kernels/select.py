"""Chooses the implementation of ``Kernels`` for a device.

Owns: the choice, and what a user is told about it. The model runner calls it once.
"""

import logging

import torch

from trimaran.errors import ConfigError
from trimaran.model.kernels.base import Kernels
from trimaran.model.kernels.native import NativeKernels, usable_variants
from trimaran.model.kernels.torch_kernels import TorchKernels

logger = logging.getLogger(__name__)
_ADVICE = (
    "install g++ and install trimaran again (in a checkout: python setup.py build_ext --inplace)"
)


def select_kernels(choice: str, device: torch.device) -> Kernels:
    """The kernels to use. choice: "auto", "native" or "torch", as of ``--kernels``.

    "auto" takes the compiled ones where they serve and says so in one warning where they are
    missing. Raises ConfigError: "native" was asked for and cannot be had.
    """
    if choice == "torch" or (choice == "auto" and device.type != "cpu"):
        return TorchKernels()
    reason = f"there are none for device {device}"
    if device.type == "cpu":
        variants, reason = usable_variants(), "they were not built"
        if variants:
            try:
                return NativeKernels(variants[0])
            except OSError as error:
                reason = str(error)
    if choice == "native":
        raise ConfigError(f"--kernels native: {reason}", hint=_ADVICE)
    logger.warning("no compiled CPU kernels: %s; plain torch serves, slower; %s", reason, _ADVICE)
    return TorchKernels()
