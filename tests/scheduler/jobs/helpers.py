"""Batches for tests, from the lines of a file to what became of them."""

import json
from typing import Any

from scheduler.jobs.batches import NewBatch
from scheduler.jobs.lines import Claim
from scheduler.jobs.store import JobStore
from scheduler.jobs.tables import Batch, File

ENDPOINT = "/v1/images/generations"


def task(id: str, **changes: Any) -> dict[str, Any]:
    body = {"prompt": f"picture {id}"}
    return {"custom_id": id, "method": "POST", "url": ENDPOINT, "body": body} | changes


def as_lines(tasks: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in tasks)


def upload(store: JobStore, data: bytes, tenant: str = "") -> File:
    file = store.files.begin(tenant, "batch", "in.jsonl", None)
    with store.writer(file.id) as writer:
        writer.write(data)
        writer.commit()
    return store.files.ready(file.id, len(data), "in.jsonl", None)


def create(store: JobStore, data: bytes, tenant: str = "", window: int = 86_400) -> Batch:
    new = NewBatch(
        tenant=tenant,
        model="tiny",
        endpoint=ENDPOINT,
        completion_window="24h",
        window_seconds=window,
        input_file_id=upload(store, data, tenant).id,
        output_seconds=3600,
        defaults={"policy": "dense"},
    )
    return store.batches.create(new)


def start(store: JobStore, count: int, prefix: str = "line") -> Batch:
    """A batch of `count` lines that may run."""
    batch = create(store, as_lines([task(f"{prefix}-{k}") for k in range(count)]))
    claimed = store.batches.claim_validation("tiny")
    assert claimed is not None
    assert store.validate(claimed)
    return now(store, batch)


def now(store: JobStore, batch: Batch) -> Batch:
    found = store.batches.get(batch.tenant, batch.id)
    assert found is not None
    return found


def finish(store: JobStore, claim: Claim, outcome: str = "completed") -> bool:
    record = {"custom_id": claim.custom_id, "seed": claim.seed}
    return store.lines.finish(claim, outcome, json.dumps(record).encode())  # type: ignore[arg-type]


def end(store: JobStore) -> bool:
    batch = store.batches.claim_ending("tiny")
    return batch is not None and store.results.assemble(batch)


def records(store: JobStore, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in b"".join(store.content(file_id)).splitlines()]
