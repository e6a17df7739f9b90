"""From model files to a model that computes.

Owns: the sequence open, choose the class, read, check that nothing was left out. Called by the
worker, in inference mode. What is read when, and how, is said by the models and weights.py.
"""

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from trimaran.formats.checkpoint import ModelSource
from trimaran.formats.model_source import open_checkpoint
from trimaran.model.kernels.base import Kernels
from trimaran.model.models.decoder import CausalLM
from trimaran.model.registry import model_class
from trimaran.model.weights import Weights

logger = logging.getLogger(__name__)


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    on_progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Read the weights of ``source`` as ``dtype`` (bfloat16 or float32).

    on_progress(done, total) counts stored bytes. Raises CheckpointError, naming file and tensor.
    """
    architecture = source.architecture
    family = model_class(architecture.family)
    began = perf_counter()
    checkpoint = open_checkpoint(source)
    try:
        with Weights(
            checkpoint,
            file=str(source.path),
            dtype=dtype,
            kernels=kernels,
            norm_weight_offset=architecture.norm_weight_offset,
            on_progress=on_progress,
        ) as weights:
            model = family(architecture, weights, kernels)
            weights.check_all_used()
    finally:
        checkpoint.close()
    logger.debug("%d bytes of weights in %.2f s", model.weight_bytes, perf_counter() - began)
    return model
