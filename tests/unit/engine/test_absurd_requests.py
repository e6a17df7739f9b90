"""Requests that decode and cannot be meant: refused before they meet a step, or computed."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.test_engine_core import make_core
from tests.unit.ipc.frames import MESSAGES, PARAMS, WILD, frames_of, with_a_wild_field
from tests.unit.scheduling.simulation import make_request

from trimaran.errors import InvalidRequestError, ProtocolError
from trimaran.executor.mock import VOCAB_SIZE
from trimaran.ipc.codec import Buffer, Decoder
from trimaran.messages import EngineCoreRequest, Tensor
from trimaran.sampling_params import SamplingParams

WHOLE, BIG = (frames_of(message) for message in MESSAGES[:2])
HUGE = (1 << 64) - 1


def steps(core, most=300):
    for _ in range(most):
        if not core.has_work():
            return
        core.step()
    core.abort_requests(["a", "b"])


@settings(max_examples=400)
@given(st.data(), st.sampled_from([WHOLE, BIG]))
def test_an_engine_survives_whatever_decodes(data, frames):
    core = make_core()
    try:
        payload = data.draw(with_a_wild_field(frames[0]))
        request = Decoder(EngineCoreRequest).decode(payload, frames[1:])
        core.add_request(request)
    except (ProtocolError, InvalidRequestError):
        pass
    steps(core)
    core.add_request(make_request("fine", 5, 2))
    assert core.step()[0].outputs[0].request_id == "fine"


def params(**fields):
    return make_request("a", 5, **fields)


def embeds(*shape, nbytes=None, dtype="float32"):
    size = shape[0] * shape[1] * 4 if nbytes is None else nbytes
    return Tensor(dtype, shape, Buffer(bytes(size)))


REFUSED = [
    (params(temperature=math.nan), "temperature"),
    (params(temperature=-1.0), "temperature"),
    (params(top_p=math.inf), "top_p"),
    (params(top_k=-5), "top_k"),
    (params(top_k=HUGE), "top_k"),
    (params(min_p=-0.1), "min_p"),
    (params(repetition_penalty=0.0), "repetition_penalty"),
    (params(repetition_penalty=1e-300), "repetition_penalty"),
    (params(presence_penalty=math.nan), "presence_penalty"),
    (params(frequency_penalty=1e9), "frequency_penalty"),
    (params(seed=None), "seed"),
    (params(seed=HUGE), "seed"),
    (params(max_tokens=-1), "max_tokens"),
    (params(max_tokens=HUGE), "max_tokens"),
    (params(min_tokens=-1), "min_tokens"),
    (params(min_tokens=9), "min_tokens"),
    (params(n=0), "n"),
    (params(stop_token_ids=(HUGE,)), "stop_token_ids"),
    (params(stop_token_ids=(-1,)), "stop_token_ids"),
    (params(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
    (params(logit_bias={5: math.nan}), "logit_bias"),
    (params(logit_bias={-1: 1.0}), "logit_bias"),
    (params(allowed_token_ids=()), "allowed_token_ids"),
    (params(allowed_token_ids=(HUGE,)), "allowed_token_ids"),
    (params(logprobs=HUGE), "logprobs"),
    (params(prompt_logprobs=-1), "prompt_logprobs"),
    (params(stop=("x" * 5000,)), "stop"),
    (params(bad_words=("",)), "bad_words"),
    (params(eos_token_ids=[HUGE]), "eos_token_ids"),
    (params(eos_token_ids=[-1]), "eos_token_ids"),
    (params(choice_index=-1), "choice_index"),
    (params(choice_index=HUGE), "choice_index"),
    (params(priority=HUGE), "priority"),
    (params(cache_salt="\ud800"), "cache_salt"),
    (params(prompt_embeds=embeds(4, 8)), "prompt_embeds"),
    (params(prompt_embeds=embeds(5, 8, nbytes=159)), "prompt_embeds"),
    (params(prompt_embeds=embeds(5, 8, dtype="bfloat16")), "prompt_embeds"),
    (params(prompt_embeds=embeds(5, 0)), "prompt_embeds"),
    (params(prompt_embeds=embeds(-5, -8, nbytes=160)), "prompt_embeds"),
    (params(prompt_embeds=embeds(5, HUGE, nbytes=0)), "prompt_embeds"),
    (params(prompt_embeds=embeds(5, 8), prompt_logprobs=1), "prompt_logprobs"),
]


@pytest.mark.parametrize(
    ("request_", "field"), REFUSED, ids=[f"{f} {i}" for i, (_, f) in enumerate(REFUSED)]
)
def test_what_is_outside_its_range_is_refused_by_name(request_, field):
    core = make_core()
    with pytest.raises(InvalidRequestError) as caught:
        core.add_request(request_)
    assert caught.value.param == field
    assert len(str(caught.value)) < 300
    assert not core.has_work()


@given(st.sampled_from(SamplingParams.__struct_fields__), WILD)
def test_every_sampling_field_is_of_its_type_and_in_its_range(field, value):
    """Whatever stands in one field: it does not decode, is refused, or runs."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(PARAMS))
    index = SamplingParams.__struct_fields__.index(field)
    if index < len(fields):
        fields[index] = value
    try:
        made = Decoder(SamplingParams).decode(msgspec.msgpack.encode(fields))
        made.verify()
        made.verify_for_model(VOCAB_SIZE)
    except (ProtocolError, InvalidRequestError):
        return
    for name in SamplingParams.__struct_fields__:
        held = getattr(made, name)
        assert not isinstance(held, float) or math.isfinite(held)
        assert not isinstance(held, int) or -(1 << 63) <= held < 1 << 63


def test_embeddings_reach_the_executor_and_every_byte_matters():
    tokens = {}
    for name, last in (("a", 0), ("b", 1)):
        core = make_core(max_num_batched_tokens=2)  # in chunks
        rows = bytes(5 * 8 * 4 - 1) + bytes([last])
        tensor = Tensor("float32", (5, 8), Buffer(rows))
        core.add_request(make_request(name, [0] * 5, 4, prompt_embeds=tensor))
        tokens[name] = []
        while core.has_work():
            for message in core.step().values():
                for output in message.outputs:
                    tokens[name] += output.new_token_ids
    assert len(set(tokens["a"])) == len(set(tokens["b"])) == 4
    assert not set(tokens["a"]) & set(tokens["b"])


def test_embeddings_neither_read_nor_fill_the_prefix_cache():
    core = make_core()
    tensor = Tensor("float32", (64, 2), Buffer(bytes(512)))
    for request in (
        make_request("tokens", [0] * 64, 2),
        make_request("first", [0] * 64, 2, prompt_embeds=tensor),
        make_request("second", [0] * 64, 2, prompt_embeds=tensor),
        make_request("salted", [0] * 64, 2, prompt_embeds=tensor, cache_salt="s"),
        make_request("others", [0] * 64, 2, cache_salt="s"),
    ):
        core.add_request(request)
        outputs = core.step()[0].outputs
        assert [output.num_cached_tokens for output in outputs] == [0]
        steps(core)
    core.add_request(make_request("again", [0] * 64, 2))
    assert core.step()[0].outputs[0].num_cached_tokens == 48
