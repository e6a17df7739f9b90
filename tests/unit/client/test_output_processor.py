"""Streams: merging, stop strings, resends, failures; engine messages made by hand."""

import pytest

from trimaran.client.output_processor import OutputProcessor, RequestStream
from trimaran.clock import ManualClock
from trimaran.errors import EngineDeadError, RequestFailedError
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from trimaran.sampling_params import RequestOutputKind, SamplingParams

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Setup:
    """An OutputProcessor with one stream."""

    def __init__(self, tokenizer, **params):
        params = {"output_kind": DELTA, **params}
        self.tokenizer = tokenizer
        self.news = 0
        self.processor = OutputProcessor(tokenizer, clock=ManualClock(100.0))
        self.params = SamplingParams(**params)
        requests = [
            EngineCoreRequest(f"id-{i}", [5, 6], self.params, choice_index=i)
            for i in range(self.params.n)
        ]
        self.stream = RequestStream("r", None, requests, self.params, self._on_news)
        self.processor.add(self.stream)

    def _on_news(self):
        self.news += 1

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def send(self, ids, *, first=None, choice=0, finish=None, **fields):
        if first is None:
            first = len(self.stream.choices[choice].token_ids)
        output = EngineCoreOutput(f"id-{choice}", first, list(ids), finish, **fields)
        return self.processor.process(EngineCoreOutputs(0, 1, [output]))

    def drain(self):
        """Joined text and ids of choice 0, and the last item."""
        text, ids, last = "", [], None
        while (item := self.stream.take()) is not None:
            for output in item.outputs:
                text, ids = text + output.text, ids + output.token_ids
            last = item
        return text, ids, last


@pytest.fixture
def setup(tokenizer):
    return lambda **params: Setup(tokenizer, **params)


def test_what_is_not_taken_is_merged(setup):
    s = setup()
    ids = s.ids("alpha beta gamma delta")
    for token in ids[:-1]:
        s.send([token])
    s.send(ids[-1:], finish=FinishReason.LENGTH)
    item = s.stream.take()
    assert item.outputs[0].token_ids == ids
    assert item.outputs[0].text == "alpha beta gamma delta"
    assert item.outputs[0].finish_reason == "length"
    assert item.finished
    assert s.stream.take() is None


def test_a_resend_doubles_nothing(setup):
    s = setup()
    ids = s.ids("one two three four five six")
    s.send(ids[:4], first=0)
    s.send(ids[2:6], first=2)
    s.send(ids[:3], first=0)
    s.send(ids[6:], first=6, finish=FinishReason.LENGTH)
    text, received, _ = s.drain()
    assert received == ids
    assert text == "one two three four five six"


def test_a_gap_fails_the_request_and_no_other(setup):
    s = setup()
    s.send([5], first=0)
    assert s.send([6], first=3) == ["id-0"]
    with pytest.raises(RequestFailedError, match="tokens 1 to 2"):
        s.drain()
    assert s.processor.num_unfinished == 0


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_stop_string_across_tokens(setup, include, chunk):
    s = setup(stop=("ta gam",), include_stop_str_in_output=include)
    ids = s.ids("alpha beta gamma delta")
    aborted, emitted = [], ""
    for part in [ids[i : i + chunk] for i in range(0, len(ids), chunk)]:
        aborted += s.send(part)
        if aborted:
            break
        emitted += s.drain()[0]
        assert "ta" not in emitted
    text, _, last = s.drain()
    assert emitted + text == ("alpha beta gam" if include else "alpha be")
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].stop_reason == "ta gam"
    assert aborted == ["id-0"]
    # Nothing after the token that completed the stop string is counted.
    assert last.num_generated_tokens == len(s.stream.choices[0].token_ids)
    assert s.tokenizer.decode(s.stream.choices[0].token_ids[:-1]).find("ta gam") == -1


def test_held_back_text_comes_at_the_end(setup):
    s = setup(stop=("delta force",))
    ids = s.ids("alpha delta")
    s.send(ids)
    before, _, _ = s.drain()
    s.send([], finish=FinishReason.LENGTH)
    after, _, last = s.drain()
    assert before + after == "alpha delta"
    assert last.outputs[0].finish_reason == "length"


def test_the_stop_token_is_counted_but_not_shown(setup):
    s = setup()
    ids = s.ids("alpha beta")
    s.send([*ids, 700], finish=FinishReason.STOP, stop_reason=700)
    text, received, last = s.drain()
    assert (text, received) == ("alpha beta", [*ids, 700])
    assert last.outputs[0].stop_reason == 700


def test_choices_do_not_mix(setup):
    s = setup(n=2)
    first, second = s.ids("alpha beta"), s.ids("gamma delta")
    s.send(first[:1], choice=0)
    s.send(second, choice=1, finish=FinishReason.LENGTH)
    item = s.stream.take()
    assert [(o.index, o.text) for o in item.outputs][1] == (1, "gamma delta")
    assert not item.finished
    s.send(first[1:], choice=0, finish=FinishReason.LENGTH)
    item = s.stream.take()
    assert [o.index for o in item.outputs] == [0]
    assert item.finished
    assert item.num_generated_tokens == len(first) + len(second)


def test_final_only_yields_once_in_index_order(setup):
    s = setup(n=2, output_kind=FINAL)
    s.send(s.ids("beta"), choice=1, finish=FinishReason.LENGTH)
    assert s.stream.take() is None
    assert s.news == 0
    s.send(s.ids("alpha"), choice=0, finish=FinishReason.LENGTH)
    assert s.news == 1
    assert [o.text for o in s.stream.take().outputs] == ["alpha", "beta"]


def test_logprobs_are_cut_with_the_tokens(setup):
    s = setup(logprobs=1)
    a, b = s.ids(" alpha")[0], s.ids(" beta")[0]
    columns = TokenLogprobs([[a, b], [b, b]], [[-2.0, -0.5], [-0.25, -0.25]], [3, 1])
    s.send([a, b], logprobs=columns, finish=FinishReason.LENGTH)
    positions = s.stream.take().outputs[0].logprobs
    assert [(p.chosen.token_id, p.chosen.logprob, p.chosen.rank) for p in positions] == [
        (a, -2.0, 3),
        (b, -0.25, 1),
    ]
    assert [(t.token_id, t.rank) for t in positions[0].top] == [(b, 1)]
    assert positions[1].chosen.bytes == s.tokenizer.token_bytes(b)


def test_an_error_finish_reaches_only_its_request(setup):
    s = setup()
    assert s.send([], finish=FinishReason.ERROR, error="no room") == ["id-0"]
    with pytest.raises(RequestFailedError, match="no room"):
        s.stream.take()


def test_death_fails_streams_after_what_came_before(setup):
    s = setup()
    s.send(s.ids("alpha"))
    s.processor.fail_all(EngineDeadError("engine 0 died", cause="RuntimeError: boom"))
    assert s.stream.take().outputs[0].text == "alpha"
    with pytest.raises(EngineDeadError, match="boom"):
        s.stream.take()
    assert s.processor.num_unfinished == 0


def test_a_left_consumer_is_forgotten(setup):
    s = setup(n=2)
    assert s.processor.remove(s.stream) == ["id-0", "id-1"]
    assert s.send(s.ids("late")) == []
    assert s.processor.remove(s.stream) == []
