"""Prometheus metrics of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """Metrics of one gateway, in a separate registry."""

    def __init__(self, in_flight: Callable[[], Mapping[str, int]]) -> None:
        self.registry = CollectorRegistry()

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"unspool_gateway_{name}", text, labels, registry=self.registry, **options)

        self.requests = metric(Counter, "requests", "Requests answered", "path", "status")
        self.seconds = metric(
            Histogram, "request_seconds", "Time for a request", "path", buckets=_SECONDS
        )
        self.cancelled = metric(
            Counter, "cancelled_requests", "Requests cancelled by the client", "path"
        )
        self.routed = metric(Counter, "routed", "Requests sent to a replica, by reason", "by")
        self.retries = metric(Counter, "retries", "Requests sent to a second replica")
        self.broken = metric(Counter, "broken_streams", "Streams broken by a lost replica")
        self.registry.register(_InFlight(in_flight))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _InFlight(Collector):
    def __init__(self, in_flight: Callable[[], Mapping[str, int]]) -> None:
        self._in_flight = in_flight

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "unspool_gateway_in_flight", "Requests in flight by replica", labels=("replica",)
        )
        for replica, count in self._in_flight().items():
            family.add_metric((replica,), count)
        yield family
