"""Prometheus metrics, under the names vLLM's users know with the prefix `bishop:`."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.events import Event, Finished
from engine.service_api import EngineStats, EventStream, ImageService

LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
QUEUE_BUCKETS = (0.01, 0.05, 0.1, *LATENCY_BUCKETS[1:])


class EngineCollector(Collector):
    """Reads the engine's own counters when it is scraped."""

    def __init__(self, service: ImageService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
        yield from _gauges(stats)
        yield from _counters(stats)
        images = CounterMetricFamily("bishop:images", "Images by outcome.", labels=["outcome"])
        for outcome in ("finished", "failed", "aborted", "parked"):
            images.add_metric([outcome], getattr(stats, f"images_{outcome}"))
        yield images

    def describe(self) -> list[Metric]:
        return []


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    usage = stats.cache_bytes_used / stats.cache_bytes_total if stats.cache_bytes_total else 0.0
    for name, text, value in (
        ("num_images_running", "Images being drawn.", stats.images_running),
        ("num_images_waiting", "Images waiting for room in the cache.", stats.images_waiting),
        ("kv_cache_usage_perc", "KV cache in use; 1 is full.", usage),
        ("kv_resident_bytes", "Bytes of KV cache reserved by running images.",
         stats.cache_bytes_used),
        ("kv_cache_bytes", "Bytes of KV cache there are.", stats.cache_bytes_total),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"bishop:{name}", text, value)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("engine_steps", "Steps of the engine.", stats.steps),
        ("generation_tokens", "Visual tokens drawn.", stats.tokens),
        ("kv_read_bytes", "Visual KV bytes read by attention.", stats.kv_read_bytes),
    ):
        yield CounterMetricFamily(f"bishop:{name}", text, value)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, service: ImageService) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(service))
        self.running = Gauge(
            "bishop:num_requests_running", "Requests being drawn.", registry=registry
        )
        self.waiting = Gauge(
            "bishop:num_requests_waiting", "Requests waiting to start.", registry=registry
        )
        self.latency = Histogram(
            "bishop:e2e_request_latency_seconds",
            "From a request's submission to its last picture.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.queue_time = Histogram(
            "bishop:request_queue_time_seconds",
            "From a request's submission to its first step.",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "bishop:prompt_tokens", "Prompt tokens read.", registry=registry
        )

    async def observe(self, events: EventStream) -> AsyncGenerator[Event, None]:
        """Pass the events of one request on, counting it as waiting, then running, then done."""
        start = time.monotonic()
        state = self.waiting
        state.inc()
        queued: list[float] = []
        try:
            async with aclosing(events):
                async for event in events:
                    state = self._run(state)
                    if isinstance(event, Finished):
                        queued.append(event.stats.queue_seconds)
                        self.prompt_tokens.inc(event.stats.prompt_tokens)
                    yield event
        finally:
            state.dec()
            if queued:
                self.latency.observe(time.monotonic() - start)
                self.queue_time.observe(min(queued))

    def _run(self, state: Gauge) -> Gauge:
        if state is self.waiting:
            self.waiting.dec()
            self.running.inc()
        return self.running
