"""Outputs that no engine of ours sends cost at most the request that they name."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimaran.client.output_processor import OutputProcessor, RequestStream
from trimaran.errors import ProtocolError, TrimaranError
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
)
from trimaran.metrics.recorder import MetricsRecorder
from trimaran.sampling_params import RequestOutputKind, SamplingParams

COUNT = st.integers(-(1 << 63), (1 << 64) - 1)
SMALL = st.integers(-2, 6)
NUMBER = st.floats() | st.sampled_from([math.nan, math.inf, -1.0, 0.0])
COLUMNS = st.builds(
    TokenLogprobs,
    st.lists(st.lists(SMALL | COUNT, max_size=2), max_size=3),
    st.lists(st.lists(NUMBER, max_size=2), max_size=3),
    st.lists(COUNT, max_size=3),
)
OUTPUT = st.builds(
    EngineCoreOutput,
    st.sampled_from(["id-0", "id-1", "nobody"]),
    SMALL | COUNT,
    st.lists(SMALL | COUNT, max_size=3),
    st.none() | st.sampled_from(FinishReason),
    st.none() | COUNT,
    st.none() | COLUMNS,
    st.none() | COLUMNS,
    COUNT,
    st.none() | st.text(max_size=3),
    NUMBER,
    NUMBER,
)
STATS = st.builds(SchedulerStats, COUNT, COUNT, COUNT, NUMBER, COUNT, COUNT, COUNT, COUNT, COUNT)
MESSAGE = st.builds(EngineCoreOutputs, COUNT, COUNT, st.lists(OUTPUT, max_size=4), STATS)


def stream_of(processor, name, **params):
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, logprobs=1, **params)
    request = EngineCoreRequest(name, [5, 6], params)
    stream = RequestStream(name, None, [request], params, lambda: None)
    processor.add(stream)
    return stream


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGE, min_size=1, max_size=4))
def test_nothing_is_raised_but_at_the_consumer_of_the_request(tokenizer, messages):
    metrics = MetricsRecorder("m")
    processor = OutputProcessor(tokenizer, metrics=metrics)
    streams = [stream_of(processor, "id-0"), stream_of(processor, "id-1", stop=("ab",))]
    fine = stream_of(processor, "fine")
    for message in messages:
        processor.process(message)
    metrics.render()
    for stream in streams:
        try:
            while stream.take() is not None:
                pass
        except TrimaranError:
            pass
    token = EngineCoreOutput("fine", 0, [9], FinishReason.LENGTH)
    processor.process(EngineCoreOutputs(0, 1, [token]))
    assert fine.take().outputs[0].token_ids == [9]


def columns(ids, values, ranks):
    return {"logprobs": TokenLogprobs(ids, values, ranks)}


@pytest.mark.parametrize(
    ("first", "fields"),
    [
        (-1, {}),
        (0, columns([], [], [])),
        (0, columns([[9], [9]], [[-1.0], [-1.0]], [1, 1])),
        (0, columns([[9]], [[-1.0]], [])),
        (0, columns([[9, 8]], [[-1.0]], [1])),
        (0, columns([[]], [[]], [1])),
        (0, columns([[9]], [[math.nan]], [1])),
        (0, {"prompt_logprobs": TokenLogprobs([[9]], [], [1])}),
    ],
    ids=str,
)
def test_what_does_not_fit_together_fails_the_request(tokenizer, first, fields):
    processor = OutputProcessor(tokenizer)
    stream = stream_of(processor, "a")
    output = EngineCoreOutput("a", first, [9], **fields)
    assert processor.process(EngineCoreOutputs(0, 1, [output])) == ["a"]
    with pytest.raises(ProtocolError):
        stream.take()
    assert processor.num_unfinished == 0
