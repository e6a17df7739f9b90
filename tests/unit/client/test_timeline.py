"""The timeline of a request: what a clock in our hand says, from the call to the last token."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trimaran.client.output_processor import OutputProcessor, RequestStream
from trimaran.client.outputs import ChoiceTimeline, RequestTimeline
from trimaran.clock import ManualClock
from trimaran.config import EngineConfig, ExecutorConfig
from trimaran.engine.engine_core import EngineCore
from trimaran.errors import EngineDeadError
from trimaran.executor.mock import MockExecutor
from trimaran.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from trimaran.metrics.recorder import MetricsRecorder
from trimaran.sampling_params import SamplingParams

STEP_S = 0.5
EVENTS = (
    "received", "tokenised", "submitted", "queued", "scheduled", "first_token",
    "first_token_received", "last_token", "finished",
)  # fmt: skip


class FrontEnd:
    """An OutputProcessor with its metrics, on a clock that moves when told."""

    def __init__(self, tokenizer):
        self.clock = ManualClock(100.0)
        self.metrics = MetricsRecorder("m")
        self.processor = OutputProcessor(tokenizer, metrics=self.metrics, clock=self.clock)

    def stream(self, *, n=1, prompt=(5, 6, 7), max_tokens=3):
        params = SamplingParams(n=n, max_tokens=max_tokens, seed=1, ignore_eos=True)
        timeline = RequestTimeline(self.clock.wall())
        self.clock.advance(0.25)
        timeline.tokenised = self.clock.wall()
        self.clock.advance(0.25)
        timeline.submitted = self.clock.wall()
        requests = [
            EngineCoreRequest(f"id-{i}", list(prompt), params, choice_index=i) for i in range(n)
        ]
        stream = RequestStream("r", None, requests, params, lambda: None, timeline=timeline)
        self.processor.add(stream)
        return stream

    def receive(self, *outputs):
        return self.processor.process(EngineCoreOutputs(0, 1, list(outputs)))

    def scrape(self):
        families = text_string_to_metric_families(self.metrics.render()[0].decode())
        return {
            (sample.name.removeprefix("vllm:"), sample.labels.get("finished_reason")): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture
def front(tokenizer):
    return FrontEnd(tokenizer)


def test_a_run_on_a_clock_in_our_hand(front):
    clock = front.clock
    config = EngineConfig(
        executor=ExecutorConfig(distributed_executor_backend="mock", mock_step_s=STEP_S)
    )
    core = EngineCore(config, MockExecutor(config, sleep=clock.advance, clock=clock), clock=clock)
    stream = front.stream()
    clock.advance(0.25)
    core.add_request(stream.requests[0])
    assert stream.timeline.last_event == "submitted"
    while core.has_work():
        clock.advance(0.25)  # between two steps
        [outputs] = core.step().values()
        clock.advance(0.125)  # on the way
        front.processor.process(outputs)
    assert {event: getattr(stream.timeline, event) for event in EVENTS} == {
        "received": 100.0,
        "tokenised": 100.25,
        "submitted": 100.5,
        "queued": 100.75,
        "scheduled": 101.0,
        "first_token": 101.5,
        "first_token_received": 101.625,
        "last_token": 103.375,
        "finished": 103.375,
    }
    assert stream.timeline.as_dict() == {
        "received": 100.0,
        "tokenised_ms": 250.0,
        "submitted_ms": 500.0,
        "queued_ms": 750.0,
        "scheduled_ms": 1000.0,
        "first_token_ms": 1500.0,
        "first_token_received_ms": 1625.0,
        "last_token_ms": 3375.0,
        "finished_ms": 3375.0,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "output_tokens": 3,
        "preemptions": 0,
    }
    # The histograms say the same: there is one source for both.
    samples = front.scrape()
    assert samples["time_to_first_token_seconds_sum", None] == 1.625
    assert samples["e2e_request_latency_seconds_sum", None] == 3.375
    assert samples["request_queue_time_seconds_sum", None] == 1.0
    assert samples["inter_token_latency_seconds_sum", None] == 3.375 - 1.625
    assert samples["inter_token_latency_seconds_count", None] == 2


def test_events_that_have_not_happened_are_null(front):
    stream = front.stream()
    assert stream.timeline.last_event == "submitted"
    described = stream.timeline.as_dict()
    assert [name for name, value in described.items() if value is None] == [
        "queued_ms", "scheduled_ms", "first_token_ms", "first_token_received_ms",
        "last_token_ms", "finished_ms", "finish_reason",
    ]  # fmt: skip


def output(choice, first, ids, at=0.0, finish=None, **fields):
    stamps = {"queued_at": at, "scheduled_at": at, "first_token_at": at} if at else {}
    return EngineCoreOutput(f"id-{choice}", first, ids, finish, **stamps, **fields)


def test_each_choice_has_its_own_and_the_request_sums_them_up(front):
    stream = front.stream(n=2)
    front.clock.advance(1.0)  # 101.5
    front.receive(output(1, 0, [9], at=101.25, num_cached_tokens=2))
    front.clock.advance(1.0)
    front.receive(
        output(0, 0, [9, 8], at=102.0, num_preemptions=2),
        output(1, 1, [7], finish=FinishReason.STOP),
    )
    assert stream.timeline.finished == 0.0, "one choice still runs"
    front.clock.advance(1.0)
    front.receive(output(0, 2, [], at=102.0, finish=FinishReason.LENGTH, num_preemptions=3))
    whole = stream.timeline.as_dict()
    first, second = whole.pop("choices")
    assert (first["scheduled_ms"], second["scheduled_ms"], whole["scheduled_ms"]) == (
        2000.0, 1250.0, 1250.0,
    )  # fmt: skip
    assert (first["first_token_received_ms"], second["first_token_received_ms"]) == (2500, 1500)
    assert whole["first_token_received_ms"] == 1500.0
    assert (first["finished_ms"], second["finished_ms"]) == (3500, 2500)
    assert (whole["last_token_ms"], whole["finished_ms"]) == (2500, 3500)
    assert (first["preemptions"], second["preemptions"], whole["preemptions"]) == (3, 0, 3)
    assert (first["output_tokens"], second["output_tokens"], whole["output_tokens"]) == (2, 2, 4)
    assert (first["finish_reason"], second["finish_reason"]) == ("length", "stop")
    assert whole["finish_reason"] == "length, stop"
    assert whole["cached_tokens"] == 2
    assert front.scrape()["time_to_first_token_seconds_count", None] == 1


@pytest.mark.parametrize("ending", ["left", "died", "failed"])
def test_an_early_end_is_an_event_too(front, ending):
    stream = front.stream()
    front.receive(output(0, 0, [9], at=100.5))
    front.clock.advance(2.0)
    if ending == "left":
        front.processor.remove(stream)
    elif ending == "died":
        front.processor.fail_all(EngineDeadError("engine 0 died"))
    else:
        front.receive(output(0, 1, [], finish=FinishReason.ERROR, error="no room"))
    reason = "abort" if ending == "left" else "error"
    assert (stream.timeline.finished, stream.timeline.finish_reason) == (102.5, reason)
    assert front.scrape()["request_success_total", reason] == 1


def test_prompts_that_came_together_are_one_timeline():
    def prompt(tokenised, tokens, *finished):
        choices = [
            ChoiceTimeline(i, finished=at, num_output_tokens=1, finish_reason="stop")
            for i, at in enumerate(finished)
        ]
        return RequestTimeline(1.0, tokenised, tokenised + 1, tokens, 4, choices)

    merged = RequestTimeline.merged([prompt(2.0, 5, 7.0, 8.0), prompt(3.0, 6, 9.0, 6.0)])
    assert (merged.received, merged.tokenised, merged.submitted) == (1.0, 3.0, 4.0)
    assert (merged.num_prompt_tokens, merged.num_cached_tokens) == (11, 8)
    assert [one.index for one in merged.choices] == [0, 1, 2, 3]
    assert [one.finished for one in merged.choices] == [7.0, 8.0, 9.0, 6.0]
    assert (merged.finished, merged.num_output_tokens) == (9.0, 4)
