"""Traces: nothing without configuration, and with it who asked, what was drawn, what it cost."""

import sys
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serving.config import ServerConfig
from serving.traces import Tracer, configured
from tests.fakes import FakeService, wait_until
from tests.live import serving
from tests.serving.jobs import submit, tasks, until
from tests.test_server import draw


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


def test_a_request_and_its_drawing(config: ServerConfig, spans: InMemorySpanExporter) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with serving(FakeService(), config, Tracer(provider)) as url:
        with httpx.Client(base_url=url, headers={"traceparent": parent}) as http:
            id = draw(http, n=2, seed=5, policy="diagonal", sparsity=0.5).headers["x-request-id"]
            http.get("/health")
            batch = submit(http, tasks(1))["id"]
            until(http, batch)
        found = spans.get_finished_spans
        assert wait_until(lambda: sum(span.name == "draw" for span in found()) == 2)
    drawn, line = (span for span in found() if span.name == "draw")
    request = next(s for s in found() if _told(s).get("bishop.request_id") == id and s != drawn)
    assert request.context is not None and drawn.parent is not None
    assert request.context.trace_id == int("a" * 32, 16)
    assert drawn.parent.span_id == request.context.span_id
    assert _told(request)["http.response.status_code"] == 200
    assert _told(drawn)["bishop.policy"] == "diagonal"
    assert [dict(event.attributes or {})["bishop.seed"] for event in drawn.events] == [5, 6]
    assert _told(line)["bishop.priority"] == "batch"
    assert not any(_told(span).get("url.path") == "/health" for span in found())


def _told(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_without_configuration_there_is_no_tracer() -> None:
    assert configured({}) is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ValueError, match=r"bishop-serve\[otel\]"):
        configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})


def test_configured_by_the_standard_variables() -> None:
    tracer = configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    assert tracer is not None
    tracer.close()
