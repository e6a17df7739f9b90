"""Inverse frequencies, magnitudes and rotations against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trimaran.formats.architecture import RopeParameters
from trimaran.model.layers.rotary import RotaryEmbedding, inverse_frequencies, magnitude

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
KINDS = [
    ("linear", 10_000.0, {"factor": 8.0}),
    ("llama3", 500_000.0, LLAMA3),
    ("llama3", 10_000.0, LLAMA3 | {"factor": 3.0, "original_max_position_embeddings": 64}),
    ("yarn", 1_000_000.0, YARN),
    ("yarn", 10_000.0, YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.9}),
    ("yarn", 10_000.0, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    ("yarn", 10_000.0, YARN | {"truncate": False}),
    # every dimension on one side of the range: the ramp becomes a step
    ("yarn", 10_000.0, YARN | {"original_max_position_embeddings": 2}),
]


def config_for(kind: str, theta: float, rest: dict[str, float], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **rest},
    )


@pytest.mark.parametrize("head_dim", [20, 128])
@pytest.mark.parametrize(("kind", "theta", "rest"), KINDS)
def test_inverse_frequencies_are_those_of_transformers(kind, theta, rest, head_dim):
    config = config_for(kind, theta, rest, head_dim)
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    parameters = RopeParameters(kind=kind, theta=theta, **rest)
    assert torch.equal(inverse_frequencies(parameters, head_dim), expected)
    assert magnitude(parameters) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "theta", "rest"), [("default", 10_000.0, {}), ("yarn", 10_000.0, YARN)]
)
def test_rotations_are_those_of_transformers_up_to_the_last_position(kind, theta, rest):
    positions = torch.tensor([0, 1, 4095, 4096, 4097, 99_999, (1 << 17) - 1])
    config = config_for(kind, theta, rest, 128)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    rotary = RotaryEmbedding(RopeParameters(kind=kind, theta=theta, **rest), 128)
    table = rotary.cos_sin(1 << 17)[positions]
    assert torch.equal(table[:, :64], cos[0, :, :64])
    assert torch.equal(table[:, 64:], sin[0, :, :64])


def test_the_table_grows_with_the_context_and_keeps_its_rows():
    rotary = RotaryEmbedding(RopeParameters(), 16)
    first = rotary.cos_sin(1)
    assert first.shape == (4096, 16)
    assert rotary.cos_sin(4096) is first
    grown = rotary.cos_sin(4097)
    assert grown.shape == (8192, 16)
    assert torch.equal(grown[:4096], first)
    assert torch.equal(grown, RotaryEmbedding(RopeParameters(), 16).cos_sin(8192))


def test_frequency_factors_divide():
    plain = inverse_frequencies(RopeParameters(), 4)
    factors = inverse_frequencies(RopeParameters(frequency_factors=(1.0, 8.0)), 4)
    assert torch.equal(factors, plain / torch.tensor([1.0, 8.0]))
