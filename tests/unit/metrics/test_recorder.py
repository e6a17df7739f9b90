"""The numbers a scrape shows, parsed back by the Prometheus library's own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trimaran.messages import SchedulerStats
from trimaran.metrics.recorder import MetricsRecorder


def scrape(recorder: MetricsRecorder) -> dict[tuple, float]:
    body, content_type = recorder.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def labels(rank: int = 0, **more: str) -> tuple:
    return tuple(sorted({"model_name": "demo", "engine": str(rank), **more}.items()))


def test_a_new_recorder_shows_zeros():
    samples = scrape(MetricsRecorder("demo"))
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count",
    ):
        assert samples[(name, *labels())] == 0, name
    for reason in ("stop", "length", "abort", "error"):
        assert samples[("vllm:request_success_total", *labels(finished_reason=reason))] == 0


def test_engine_stats_are_shown_per_rank():
    recorder = MetricsRecorder("demo")
    recorder.on_scheduler_stats(0, SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.5))
    recorder.on_scheduler_stats(1, SchedulerStats(num_running=7, num_preemptions=4, sleep_level=2))
    samples = scrape(recorder)
    assert samples[("vllm:num_requests_running", *labels(0))] == 3
    assert samples[("vllm:num_requests_running", *labels(1))] == 7
    assert samples[("vllm:num_requests_waiting", *labels(0))] == 2
    assert samples[("vllm:kv_cache_usage_perc", *labels(0))] == 0.5
    assert samples[("vllm:num_preemptions_total", *labels(1))] == 4
    assert samples[("trimaran:engine_sleep_level", *labels(0))] == -1
    assert samples[("trimaran:engine_sleep_level", *labels(1))] == 2
    recorder.on_scheduler_stats(1, SchedulerStats())
    assert scrape(recorder)[("vllm:num_requests_running", *labels(1))] == 0


def test_token_histograms_count_tokens_not_steps():
    """10 streams of 7 tokens, the last 6 in two messages: 10 first tokens, 60 gaps (T-P7)."""
    recorder = MetricsRecorder("demo")
    for _ in range(10):
        recorder.on_first_token(0.02)
        recorder.on_tokens(2, 0.01)
        recorder.on_tokens(4, 0.12)
    samples = scrape(recorder)
    assert samples[("vllm:generation_tokens_total", *labels())] == 70
    assert samples[("vllm:time_to_first_token_seconds_count", *labels())] == 10
    assert samples[("vllm:time_to_first_token_seconds_sum", *labels())] == pytest.approx(0.2)
    # le is inclusive: 0.02 falls in the bucket of that name
    assert samples[("vllm:time_to_first_token_seconds_bucket", *labels(le="0.02"))] == 10
    assert samples[("vllm:time_to_first_token_seconds_bucket", *labels(le="0.01"))] == 0
    gaps = "vllm:inter_token_latency_seconds"
    assert samples[(f"{gaps}_count", *labels())] == 60
    assert samples[(f"{gaps}_sum", *labels())] == pytest.approx(10 * (0.01 + 0.12))
    assert samples[(f"{gaps}_bucket", *labels(le="0.005"))] == 20
    assert samples[(f"{gaps}_bucket", *labels(le="0.05"))] == 60
    assert samples[(f"{gaps}_bucket", *labels(le="+Inf"))] == 60


def test_ended_requests_and_refusals():
    recorder = MetricsRecorder("demo")
    recorder.on_finished("stop", 100, 20, 1.5, 0.1)
    recorder.on_finished("length", 50, 30, 2.5, 0.2)
    recorder.on_finished("abort", 10, 1, 0.5, 0.1)
    recorder.on_refused()
    samples = scrape(recorder)
    for reason, count in (("stop", 1), ("length", 1), ("abort", 1), ("error", 0)):
        assert samples[("vllm:request_success_total", *labels(finished_reason=reason))] == count
    assert samples[("vllm:prompt_tokens_total", *labels())] == 160
    assert samples[("vllm:e2e_request_latency_seconds_count", *labels())] == 2
    assert samples[("vllm:e2e_request_latency_seconds_sum", *labels())] == 4.0
    assert samples[("vllm:request_prompt_tokens_sum", *labels())] == 150
    assert samples[("trimaran:requests_refused_total", ("model_name", "demo"))] == 1


def test_a_clock_that_went_back_is_not_shown_as_a_negative_time():
    recorder = MetricsRecorder("demo")
    recorder.on_first_token(-0.5)
    assert scrape(recorder)[("vllm:time_to_first_token_seconds_sum", *labels())] == 0
