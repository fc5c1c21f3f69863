"""A server with batch jobs over the fake engine."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from scheduler.jobs.store import JobsConfig
from serving.config import ServerConfig
from tests.fakes import FakeService
from tests.live import serving


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(jobs=JobsConfig(folder=tmp_path, lease_seconds=2), poll_seconds=0.05)


@pytest.fixture
def http(service: FakeService, config: ServerConfig) -> Iterator[httpx.Client]:
    with serving(service, config) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    url = f"{http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
