"""Counters, gauges and histograms of one API server, rendered in the Prometheus text format.

Owns: names (vLLM's where the meaning is the same), buckets and the numbers themselves. Does not
know where the numbers come from: client/ calls the ``on_…`` methods on the event loop, server/
calls ``render``. Plain attributes are added to on the hot path; the library's objects are made only
when somebody scrapes, so that a token costs well below a microsecond.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from trimaran.messages import FinishReason, SchedulerStats

T = TypeVar("T")
LABELS = ("model_name", "engine")

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_S = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
)  # fmt: skip
TOKENS = tuple(base * 10**power for power in range(7) for base in (1, 2, 5))


class Histogram:
    """Counts per bucket (not cumulative), the last one being +Inf."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """``value`` was seen ``times`` times. Clocks may disagree: never below 0."""
        value = max(value, 0.0)
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as the text format has them."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return rows

    @property
    def sum(self) -> float:
        return self._sum


@dataclass(slots=True)
class _Series:
    """Everything of one engine."""

    stats: SchedulerStats = field(default_factory=SchedulerStats)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: {str(reason): 0 for reason in FinishReason}
    )
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    generation_lengths: Histogram = field(default_factory=lambda: Histogram(TOKENS))


_Rows = tuple[tuple[str, str, Callable[[_Series], T]], ...]  # name, help, value

_GAUGES: _Rows[float] = (
    ("vllm:num_requests_running", "Requests in the engine's batch.", lambda s: s.stats.num_running),
    ("vllm:num_requests_waiting", "Requests waiting for a place.", lambda s: s.stats.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks in use; 1 means all.",
        lambda s: s.stats.kv_cache_usage,
    ),
    (
        "trimaran:engine_sleep_level",
        "0, 1 or 2 while the engine sleeps, -1 while it is awake.",
        lambda s: s.stats.sleep_level,
    ),
)
_COUNTERS: _Rows[float] = (
    ("vllm:prompt_tokens", "Prompt tokens of ended requests.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.stats.prefix_cache_queries,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.stats.prefix_cache_hits,
    ),
    ("vllm:num_preemptions", "Requests preempted.", lambda s: s.stats.num_preemptions),
)
_HISTOGRAMS: _Rows[Histogram] = (
    (
        "vllm:time_to_first_token_seconds",
        "From arrival to the first token.",
        lambda s: s.first_token_s,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Between tokens of one request.",
        lambda s: s.between_tokens_s,
    ),
    ("vllm:e2e_request_latency_seconds", "From arrival to the end.", lambda s: s.e2e_s),
    ("vllm:request_queue_time_seconds", "From arrival to the first step.", lambda s: s.queue_s),
    ("vllm:request_prompt_tokens", "Prompt tokens per request.", lambda s: s.prompt_lengths),
    (
        "vllm:request_generation_tokens",
        "Generated tokens per request.",
        lambda s: s.generation_lengths,
    ),
)


class MetricsRecorder(Collector):
    """One per API server. Not thread-safe: everything happens on its event loop."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._series: dict[int, _Series] = {0: _Series()}
        self._refused = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def on_scheduler_stats(self, rank: int, stats: SchedulerStats) -> None:
        self._of(rank).stats = stats

    def on_first_token(self, seconds: float, *, rank: int = 0) -> None:
        """A request's first token came ``seconds`` after its arrival."""
        series = self._of(rank)
        series.generation_tokens += 1
        series.first_token_s.observe(seconds)

    def on_tokens(self, count: int, interval_s: float, *, rank: int = 0) -> None:
        """``count`` > 0 further tokens of one request came ``interval_s`` after the last one."""
        series = self._of(rank)
        series.generation_tokens += count
        series.between_tokens_s.observe(interval_s / count, count)

    def on_finished(
        self,
        reason: str,
        prompt_tokens: int,
        generation_tokens: int,
        e2e_s: float,
        queue_s: float,
        *,
        rank: int = 0,
    ) -> None:
        """A request ended: ``reason`` is a FinishReason as text. Aborted ones are counted apart."""
        series = self._of(rank)
        series.finished[reason] = series.finished.get(reason, 0) + 1
        series.prompt_tokens += prompt_tokens
        if reason in ("abort", "error"):
            return
        series.prompt_lengths.observe(prompt_tokens)
        series.generation_lengths.observe(generation_tokens)
        series.e2e_s.observe(e2e_s)
        series.queue_s.observe(queue_s)

    def on_refused(self) -> None:
        """A request was turned away because too many are in flight."""
        self._refused += 1

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> Iterable[Metric]:
        """Called by the registry in place of ``collect`` when this collector is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry when somebody scrapes."""
        every = [([self._model_name, str(rank)], one) for rank, one in sorted(self._series.items())]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for labels, series in every:
                gauge.add_metric(labels, value(series))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, series in every:
                counter.add_metric(labels, value(series))
            yield counter
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for labels, series in every:
                family.add_metric(labels, histogram(series).buckets(), histogram(series).sum)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests ended, by reason.",
            labels=(*LABELS, "finished_reason"),
        )
        for labels, series in every:
            for reason, count in series.finished.items():
                success.add_metric([*labels, reason], count)
        yield success
        refused = CounterMetricFamily(
            "trimaran:requests_refused", "Requests answered with 429.", labels=LABELS[:1]
        )
        refused.add_metric([self._model_name], self._refused)
        yield refused

    def _of(self, rank: int) -> _Series:
        series = self._series.get(rank)
        if series is None:
            series = self._series[rank] = _Series()
        return series
