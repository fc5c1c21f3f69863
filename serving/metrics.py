"""Prometheus metrics, under the names vLLM's users know with the prefix `bishop:`."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.events import Event, Finished, ImageStats
from engine.service_api import (
    EngineStats,
    EventStream,
    Fleet,
    ImageService,
    ReplicaState,
    ReplicaStatus,
)

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
        if isinstance(self._service, Fleet):
            yield from _replicas(self._service.replicas())

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
        ("offload_read_bytes", "Weights and KV read from disk.", stats.offload_read_bytes),
        ("offload_written_bytes", "KV written to disk.", stats.offload_written_bytes),
    ):
        yield CounterMetricFamily(f"bishop:{name}", text, value)


def _replicas(found: Sequence[ReplicaStatus]) -> Iterator[Metric]:
    """Of each engine of several."""
    for name, text, value in (
        ("up", "1 while the replica draws.", lambda r: r.state is ReplicaState.READY),
        ("num_images", "Images the replica was given.", lambda r: r.pictures),
        ("kv_cache_free_bytes", "Bytes of its KV cache that are free.", lambda r: r.free_bytes),
    ):
        gauge = GaugeMetricFamily(f"bishop:replica_{name}", text, labels=["replica"])
        for each in found:
            gauge.add_metric([each.name], float(value(each)))
        yield gauge
    restarts = CounterMetricFamily(
        "bishop:replica_restarts", "Times the replica was replaced.", labels=["replica"]
    )
    for each in found:
        restarts.add_metric([each.name], each.restarts)
    yield restarts


class PolicyMetrics:
    """What pictures cost under each attention policy."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"bishop:policy_{name}", text, ["policy"], registry=registry)

        self.images = counter("images", "Pictures drawn under a policy.")
        self.tokens = counter("tokens", "Visual tokens drawn under a policy.")
        self.read = counter("kv_read_bytes", "Visual KV bytes read under a policy.")
        self.resident = counter(
            "kv_resident_bytes", "Visual KV bytes reserved, summed over pictures of a policy."
        )

    def count(self, policy: str, stats: ImageStats) -> None:
        self.images.labels(policy).inc()
        self.tokens.labels(policy).inc(stats.tokens)
        self.read.labels(policy).inc(stats.kv_read_bytes)
        self.resident.labels(policy).inc(stats.kv_resident_bytes)


class BatchMetrics:
    """Lines of batches; they are no part of the latencies of interactive requests."""

    def __init__(self, registry: CollectorRegistry, policies: PolicyMetrics) -> None:
        self._policies = policies
        self.running = Gauge(
            "bishop:batch_lines_running", "Batch lines in the engine.", registry=registry
        )
        self.lines = Counter(
            "bishop:batch_lines", "Batch lines by outcome.", ["outcome"], registry=registry
        )
        self.seconds = Histogram(
            "bishop:batch_line_seconds",
            "From a line's submission to its last picture.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.batches = Gauge(
            "bishop:batches", "Batches in the job store by status.", ["status"], registry=registry
        )
        self.store_up = Gauge(
            "bishop:job_store_up", "1 while the job store answers.", registry=registry
        )

    async def observe(self, events: EventStream, policy: str) -> AsyncGenerator[Event, None]:
        """Pass the events of one line on and count what was drawn."""
        start = time.monotonic()
        finished = False
        with self.running.track_inprogress():
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Finished):
                        finished = True
                        self._policies.count(policy, event.stats)
                    yield event
        if finished:
            self.seconds.observe(time.monotonic() - start)


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

        self.rejected = Counter(
            "bishop:requests_rejected", "Requests refused at the door.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.http = Counter(
            "bishop:http_requests", "Answers by address and status.", ["method", "route", "status"],
            registry=registry,
        )  # fmt: skip
        self.policies = PolicyMetrics(registry)
        self.batch = BatchMetrics(registry, self.policies)

    async def observe(self, events: EventStream, policy: str) -> AsyncGenerator[Event, None]:
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
                        self.policies.count(policy, event.stats)
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
