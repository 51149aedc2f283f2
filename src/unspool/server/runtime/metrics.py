"""Prometheus metrics of a server: `GET /metrics`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from unspool.server.runtime.registry import ServedModel

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """Metrics of one server. Its own registry, so that two servers in a process do not mix."""

    def __init__(
        self,
        running: Callable[[], int],
        queued: Callable[[], int],
        models: Callable[[], Iterable[ServedModel]],
    ) -> None:
        self.registry = CollectorRegistry()

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"unspool_{name}", text, labels, registry=self.registry, **options)

        self.requests = metric(Counter, "requests", "Requests answered", "path", "status")
        self.seconds = metric(
            Histogram, "request_seconds", "Time for a request", "path", buckets=_SECONDS
        )
        self.first_token = metric(
            Histogram,
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            "model",
            buckets=_SECONDS,
        )
        self.per_token = _TokenTimes()
        self.registry.register(self.per_token)
        self.prompt_tokens = metric(Counter, "prompt_tokens", "Prompt tokens", "model")
        self.cached_tokens = metric(
            Counter, "cached_prompt_tokens", "Prompt tokens found in the prefix cache", "model"
        )
        self.completion_tokens = metric(Counter, "completion_tokens", "Generated tokens", "model")
        self.drafts = metric(
            Counter, "draft_tokens", "Draft tokens of speculative decoding", "model", "outcome"
        )
        self.cancelled = metric(
            Counter, "cancelled_requests", "Requests cancelled by the client", "path"
        )
        metric(Gauge, "sequences_running", "Sequences being generated").set_function(running)
        metric(Gauge, "requests_queued", "Requests waiting in the queue").set_function(queued)
        self.registry.register(_Engines(models))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class TokenHistogram:
    """Seconds between tokens of one model. Much cheaper than a `Histogram`, as it is updated for
    every token. Not thread-safe: used on the event loop only."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_TOKEN_SECONDS) + 1)  # the last: above all bounds
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_TOKEN_SECONDS, seconds)] += 1
        self.seconds += seconds


class _TokenTimes(Collector):
    """Seconds between tokens, by model."""

    def __init__(self) -> None:
        self._models: dict[str, TokenHistogram] = {}

    def for_model(self, model: str) -> TokenHistogram:
        return self._models.setdefault(model, TokenHistogram())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "unspool_time_per_token_seconds", "From one token to the next", labels=("model",)
        )
        bounds = [*map(floatToGoString, _TOKEN_SECONDS), "+Inf"]
        for model, times in self._models.items():
            buckets = list(zip(bounds, accumulate(times.counts), strict=True))
            family.add_metric((model,), buckets, times.seconds)
        yield family


class _Engines(Collector):
    """Pages and steps, read from the engines when metrics are collected."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        pages = GaugeMetricFamily(
            "unspool_pages",
            "KV cache pages: total, used, and shared by several sequences",
            labels=("model", "state"),
        )
        states = GaugeMetricFamily(
            "unspool_states",
            "Recurrent state slots: total, used, and evicted so far",
            labels=("model", "state"),
        )
        batches = CounterMetricFamily("unspool_batches", "Steps of the model", labels=("model",))
        preemptions = CounterMetricFamily(
            "unspool_preemptions", "Sequences preempted to free KV cache", labels=("model",)
        )
        for served in self._models():
            engine = served.lm.engine
            pool = engine.tree.pool
            for state, count in (
                ("total", pool.count),
                ("used", pool.used),
                ("shared", engine.tree.index.shared_pages),
            ):
                pages.add_metric((served.name, state), count)
            slots = engine.tree.states
            if slots is not None:
                states.add_metric((served.name, "total"), slots.count)
                states.add_metric((served.name, "used"), slots.used)
                states.add_metric((served.name, "evicted"), slots.num_evicted)
            batches.add_metric((served.name,), engine.steps)
            preemptions.add_metric((served.name,), engine.scheduler.preemptions)
        yield pages
        yield states
        yield batches
        yield preemptions
