"""Batches over HTTP, for tests."""

import json
import time
from typing import Any

import httpx

from tests.scheduler.jobs.helpers import as_lines, task

ENDED = ("completed", "failed", "expired", "cancelled")


def upload(http: httpx.Client, data: bytes, **fields: str) -> httpx.Response:
    files = {"file": ("in.jsonl", data)}
    return http.post("/v1/files", files=files, data={"purpose": "batch"} | fields)


def tasks(count: int, **body: Any) -> bytes:
    return as_lines(
        [task(f"line-{k}", body={"prompt": f"picture {k}"} | body) for k in range(count)]
    )


def submit(http: httpx.Client, data: bytes, **changes: Any) -> dict[str, Any]:
    body = {
        "input_file_id": upload(http, data).json()["id"],
        "endpoint": "/v1/images/generations",
        "completion_window": "24h",
    }
    answer = http.post("/v1/batches", json=body | changes)
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


def until(http: httpx.Client, id: str, *statuses: str, seconds: float = 30) -> dict[str, Any]:
    """The batch once it has one of these statuses (or has ended)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch: dict[str, Any] = http.get(f"/v1/batches/{id}").json()
        if batch.get("status") in (statuses or ENDED):
            return batch
        time.sleep(0.02)
    raise AssertionError(f"not {statuses or ENDED} in time: {batch}")


def records(http: httpx.Client, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The records of a result file by custom_id; each occurs once."""
    if file_id is None:
        return {}
    lines = http.get(f"/v1/files/{file_id}/content").text.splitlines()
    found = {record["custom_id"]: record for record in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found
