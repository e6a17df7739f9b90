"""Limits, seeds and fan-out of requests, before anything is submitted."""

import math

import pytest

from trimaran.client.input_processor import InputProcessor
from trimaran.errors import InvalidRequestError
from trimaran.sampling_params import SamplingParams


@pytest.fixture
def inputs(source, tokenizer):
    inputs = InputProcessor(source, tokenizer)
    inputs.max_model_len = 1024
    return inputs


def make(inputs, prompt=(5, 6, 7), **params):
    return inputs.make_requests(list(prompt), SamplingParams(**params), request_id="r")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.0000001}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -5}, "logprobs"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 65}, "stop"),
        ({"stop_token_ids": (99999999,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {99999999: -100.0}}, "logit_bias"),
        ({"logit_bias": {5: 1000.0}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (2048,)}, "allowed_token_ids"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"allowed_token_ids": (1,), "min_tokens": 2}, "allowed_token_ids"),
        ({"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 2}, "allowed_token_ids"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ("\ud800",)}, "stop"),
        ({"bad_words": ("a\udfff",)}, "bad_words"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ],
)
def test_a_parameter_outside_its_range_is_named(inputs, params, field):
    with pytest.raises(InvalidRequestError) as caught:
        make(inputs, **params)
    assert caught.value.param == field
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("prompt", [[], [-1], [2048], [5, 1 << 40], [[5]], [None], ["x"], [True]])
def test_a_wrong_prompt_is_named(inputs, prompt):
    with pytest.raises(InvalidRequestError) as caught:
        make(inputs, prompt)
    assert caught.value.param == "prompt"


def test_the_limit_message_has_the_right_numbers(inputs):
    with pytest.raises(InvalidRequestError, match=r"limit is 1024 .* has 8 .* asks for 1020"):
        make(inputs, [5] * 8, max_tokens=1020)


def test_prompts_around_the_limit(inputs):
    assert make(inputs, [5] * 1023)[0].sampling_params.max_tokens == 1
    assert make(inputs, [5] * 1024, max_tokens=0)[0].sampling_params.max_tokens == 0
    for length in (1024, 1025):
        with pytest.raises(InvalidRequestError, match=f"has {length} tokens"):
            make(inputs, [5] * length)


def test_without_max_tokens_the_rest_of_the_context_is_used(inputs):
    assert make(inputs, [5] * 24)[0].sampling_params.max_tokens == 1000


def test_n_choices_are_n_requests_with_one_seed(inputs):
    requests = make(inputs, n=3, seed=7)
    assert [r.choice_index for r in requests] == [0, 1, 2]
    assert len({r.request_id for r in requests}) == 3
    assert {r.sampling_params.seed for r in requests} == {7}


def test_requests_without_a_seed_get_different_ones(source, tokenizer, inputs):
    seeds = {make(inputs)[0].sampling_params.seed for _ in range(5)}
    assert len(seeds) == 5
    first, second = (InputProcessor(source, tokenizer, seed=3) for _ in range(2))
    a, b = ([make(x)[0].sampling_params.seed for _ in range(3)] for x in (first, second))
    assert a == b
    assert len(set(a)) == 3


def test_bad_words_are_banned_with_and_without_a_space(inputs, tokenizer):
    sequences = make(inputs, bad_words=("New York",))[0].bad_words_token_ids
    assert sequences == [
        tokenizer.encode(text, add_special_tokens=False) for text in ("New York", " New York")
    ]
