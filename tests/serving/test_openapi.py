"""The OpenAPI description: generated requests never make the server fail, and answers fit it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from scheduler.jobs.store import JobsConfig
from serving.config import ServerConfig
from tests.fakes import FakeService
from tests.live import serving

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("jobs")
    config = ServerConfig(jobs=JobsConfig(folder=folder), poll_seconds=0.2)
    with serving(FakeService(0.0), config) as url:
        yield url


SETTINGS = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_request_makes_the_server_fail(address: str) -> None:
    description = schemathesis.openapi.from_url(f"{address}/openapi.json")
    operations = [found.ok() for found in description.get_all_operations()]
    assert len(operations) > 12
    for operation in operations:

        @SETTINGS
        @given(case=operation.as_strategy())
        def try_out(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS)

        try_out()


def test_every_address_is_described(address: str) -> None:
    paths = httpx.get(f"{address}/openapi.json").json()["paths"]
    assert {
        "/v1/images/generations", "/v1/images/files/{id}", "/v1/models", "/v1/models/{id}",
        "/v1/files", "/v1/files/{id}", "/v1/files/{id}/content", "/v1/batches", "/v1/batches/{id}",
        "/v1/batches/{id}/cancel", "/health", "/ready", "/metrics",
    } <= set(paths)  # fmt: skip
