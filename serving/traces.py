"""OpenTelemetry traces, where the standard variables ask for them (`OTEL_EXPORTER_OTLP_ENDPOINT`).

A span per request, continuing the caller's `traceparent`; within it one for the drawing, with what
it cost. Without configuration nothing of OpenTelemetry is imported.
"""

import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.events import Event, Finished
from scheduler.request import ImageRequest
from serving.scope import request_id

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
QUIET = ("/health", "/ready", "/metrics")


class Tracer:
    """Spans of one server; `provider` is an `opentelemetry.sdk.trace.TracerProvider`."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("bishop")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, scope: Scope) -> Iterator[Any]:
        from opentelemetry.trace import SpanKind

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        told = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "bishop.request_id": request_id.get(),
        }
        with self._tracer.start_as_current_span(
            f"{scope['method']} request",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=told,
        ) as span:
            yield span

    async def follow(
        self, events: AsyncGenerator[Event, None], request: ImageRequest
    ) -> AsyncGenerator[Event, None]:
        """Pass the events of a drawing on within a span that ends with them."""
        told = {
            "bishop.request_id": request.id,
            "bishop.n": request.n,
            "bishop.seed": request.seed,
            "bishop.policy": request.policy.name,
            "bishop.sparsity": request.policy.sparsity,
            "bishop.priority": request.priority.name.lower(),
        }
        span = self._tracer.start_span("draw", attributes=told)
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Finished):
                        _cost(span, event)
                    yield event
        finally:
            span.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _cost(span: Any, finished: Finished) -> None:
    """What a finished picture adds to the span of its drawing."""
    stats = finished.stats
    span.add_event(
        "picture",
        {
            "bishop.index": finished.index,
            "bishop.seed": finished.seed,
            "bishop.tokens": stats.tokens,
            "bishop.seconds": stats.seconds,
            "bishop.queue_seconds": stats.queue_seconds,
            "bishop.kv_read_bytes": stats.kv_read_bytes,
            "bishop.density": stats.density,
        },
    )


def configured(environment: Mapping[str, str] = os.environ) -> Tracer | None:
    """The tracer that the environment asks for, or None. Raises ValueError if it cannot be had."""
    if not any(environment.get(name) for name in VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"{VARIABLES[0]} asks for traces, and {error.name} is not installed: "
            "pip install 'bishop-serve[otel]', or unset it"
        ) from None
    name = environment.get("OTEL_SERVICE_NAME", "bishop")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider)


class Traced:
    """ASGI middleware: the span of each request that is not polled."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        with self._tracer.request(scope) as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, noted)
