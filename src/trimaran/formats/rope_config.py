"""Rotary embeddings as config.json spells them, old and new, to RopeParameters by layer type.

Owns: the forms. Old: rope_theta, rope_scaling ("type" or "rope_type"), and for Gemma 3
rope_local_base_freq. New: rope_parameters, flat or by layer type. A kind that is not known is an
error, never ignored. Called by config_json.
"""

from collections.abc import Iterable

from trimaran.formats.architecture import RopeParameters
from trimaran.formats.fields import Fields, show
from trimaran.formats.model_facts import MAX_POSITIONS, MAX_THETA

_HF_LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention"}
_MAX_FACTOR = 1e6


def read_rope(
    config: Fields, layer_types: Iterable[str], *, local_theta: float | None, theta: float
) -> dict[str, RopeParameters]:
    """Parameters for each of ``layer_types`` ("full", "sliding").

    ``theta`` is the family's default base. A family with a ``local_theta`` (Gemma 3) gives its
    sliding layers that base, and scaling only to its full ones, unless the file says otherwise.
    """
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling")
    nested = any(name in parameters.values for name in _HF_LAYER_TYPES.values())
    theta = config.number("rope_theta", 1.0, MAX_THETA, theta)
    if local_theta is not None:
        local_theta = config.number("rope_local_base_freq", 1.0, MAX_THETA, local_theta)
    rope = {}
    for layer_type in dict.fromkeys(layer_types):
        local = layer_type == "sliding" and local_theta is not None
        if nested:
            section = parameters.section(_HF_LAYER_TYPES[layer_type])
        elif local:
            section = Fields({}, file=config.file)
        else:
            section = scaling if scaling.values else parameters
        base = local_theta if local and local_theta is not None else theta
        rope[layer_type] = _parameters(section, config, base)
    return rope


def _parameters(section: Fields, config: Fields, theta: float) -> RopeParameters:
    kind = section.text("rope_type", section.text("type", "default"))
    theta = section.number("rope_theta", 1.0, MAX_THETA, theta)
    for where in (section, config):
        if where.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise where.error("partial_rotary_factor", "is below 1, which is not supported")
    if kind == "default":
        return RopeParameters(theta=theta)
    if kind == "linear":
        return RopeParameters("linear", theta, section.number("factor", 1e-3, _MAX_FACTOR))
    if kind not in ("llama3", "yarn"):
        raise section.error(
            "rope_type",
            f"is {show(kind)}, which is not supported",
            hint="supported: default, linear, llama3, yarn",
        )
    longest = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    original = config.integer(
        "original_max_position_embeddings",
        1,
        MAX_POSITIONS,
        section.integer("original_max_position_embeddings", 1, MAX_POSITIONS, longest),
    )
    if kind == "llama3":
        low = section.number("low_freq_factor", 1e-3, _MAX_FACTOR)
        high = section.number("high_freq_factor", 1e-3, _MAX_FACTOR)
        if not low < high:
            raise section.error("low_freq_factor", f"is {low:g}, not below high_freq_factor")
        return RopeParameters(
            "llama3",
            theta,
            section.number("factor", 1e-3, _MAX_FACTOR),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    return RopeParameters(
        "yarn",
        theta,
        section.number("factor", 1e-3, _MAX_FACTOR, longest / original),
        original_max_position_embeddings=original,
        beta_fast=section.number("beta_fast", 0.0, _MAX_FACTOR, 32.0) or 32.0,
        beta_slow=section.number("beta_slow", 0.0, _MAX_FACTOR, 1.0) or 1.0,
        attention_factor=section.optional_number("attention_factor", 1e-6, _MAX_FACTOR),
        mscale=section.optional_number("mscale", 0.0, _MAX_FACTOR),
        mscale_all_dim=section.optional_number("mscale_all_dim", 0.0, _MAX_FACTOR),
        truncate=section.boolean("truncate", True),
    )
