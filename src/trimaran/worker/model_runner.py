"""Rotary position embedding: inverse frequencies of each kind, and the table of their rotations.

Owns: the formulas (those of Hugging Face checkpoints, in the same fp32 steps, so that long
positions agree) and the table, which grows with the longest context seen rather than to the
model's limit: 128k positions of 128 dimensions are 64 MiB that few processes need. Knows nothing
of heads or caches; attention layers of one type share one object.
"""

import math

import torch

from trimaran.formats.architecture import RopeParameters

_FIRST_LENGTH = 4096


class RotaryEmbedding:
    """Rotations for one layer type."""

    def __init__(self, parameters: RopeParameters, head_dim: int) -> None:
        self._inverse_frequencies = inverse_frequencies(parameters, head_dim)
        self._magnitude = magnitude(parameters)
        self._table = torch.empty(0, head_dim)

    def cos_sin(self, length: int) -> torch.Tensor:
        """fp32 [at least ``length`` positions, head_dim]: cosines, then sines, of D/2 frequencies.

        Rows once made never change, so it does not matter which request made the table grow.
        """
        have = self._table.shape[0]
        if have < length:
            # Doubling keeps the number of pauses small.
            size = max(_FIRST_LENGTH, 1 << (length - 1).bit_length())
            positions = torch.arange(have, size, dtype=torch.float32)
            angles = torch.outer(positions, self._inverse_frequencies)
            rows = torch.cat((angles.cos(), angles.sin()), dim=-1) * self._magnitude
            self._table = torch.cat((self._table, rows))
        return self._table


def inverse_frequencies(parameters: RopeParameters, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / parameters.theta**exponents
    match parameters.kind:
        case "default":
            scaled = plain
        case "linear":
            scaled = plain / parameters.factor
        case "llama3":
            scaled = _llama3(parameters, plain)
        case "yarn":
            scaled = _yarn(parameters, exponents)
    if parameters.frequency_factors is not None:
        scaled = scaled / torch.tensor(parameters.frequency_factors, dtype=torch.float32)
    return scaled


def magnitude(parameters: RopeParameters) -> float:
    """What cosines and sines are multiplied by: yarn's attention factor, else 1."""
    if parameters.kind != "yarn":
        return 1.0
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    factor = parameters.factor
    if parameters.mscale and parameters.mscale_all_dim:
        return _mscale(factor, parameters.mscale) / _mscale(factor, parameters.mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(parameters: RopeParameters, plain: torch.Tensor) -> torch.Tensor:
    """Wavelengths short against the original context stay, long ones are stretched by ``factor``,
    those between are blended (Llama 3.1)."""
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    wavelengths = 2 * math.pi / plain
    turns = parameters.original_max_position_embeddings / wavelengths
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / parameters.factor + keep * plain


def _yarn(parameters: RopeParameters, exponents: torch.Tensor) -> torch.Tensor:
    """The blend of YaRN (arXiv 2309.00071, section 3.2) over dimensions rather than wavelengths."""
    head_dim = 2 * exponents.shape[0]
    low = _dimension_of(parameters, parameters.beta_fast, head_dim)
    high = _dimension_of(parameters, parameters.beta_slow, head_dim)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    periods = parameters.theta**exponents
    return 1.0 / (parameters.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _dimension_of(parameters: RopeParameters, rotations: float, head_dim: int) -> float:
    """The dimension (as a real number) that turns ``rotations`` times in the original context."""
    context = parameters.original_max_position_embeddings
    return (
        head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(parameters.theta))
    )
