"""What this machine says about a front end's and a database's work for one picture."""

import asyncio
import base64
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from sqlalchemy import event

from benchmarks.results_writer import ROOT
from engine.pixels import encode
from scheduler.jobs.batches import NewBatch
from scheduler.jobs.store import JobsConfig, JobStore
from serving.app import create_app
from serving.config import ServerConfig
from tests.fakes import MODEL, FakeService

PICTURE = ROOT / "docs" / "images" / "mini-fixed-prompts.jpg"
ENDPOINT = "/v1/images/generations"


def front_end_ms(requests: int = 64, size: int = 384) -> dict[str, float]:
    """CPU time of an interactive picture: HTTP, events, PNG of size x size, base64.

    The client of the test runs in the same process and is counted in, so this is too much rather
    than too little."""
    pixels = np.asarray(
        Image.open(PICTURE).convert("RGB").crop((0, 0, 192, 192)).resize((size,) * 2)
    )
    start = time.process_time()
    for _ in range(requests):
        base64.b64encode(encode(pixels, "png"))
    encoding = (time.process_time() - start) / requests
    http = asyncio.run(_http(requests)) / requests
    return {"png_ms": encoding * 1000, "http_ms": http * 1000}


async def _http(requests: int) -> float:
    """CPU seconds of requests whose pictures cost nothing."""
    service = FakeService(step_seconds=0.01)
    service.start()
    app = create_app(service, ServerConfig())
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            body = {"prompt": "a cat", "model": MODEL.name}
            await client.post(ENDPOINT, json=body)
            start = time.process_time()
            answers = await asyncio.gather(
                *(client.post(ENDPOINT, json=body) for _ in range(requests))
            )
            seconds = time.process_time() - start
    finally:
        service.stop()
    assert all(answer.status_code == 200 for answer in answers)
    return seconds


def transactions(lines: int = 200) -> dict[str, float]:
    """Transactions and their CPU time, for lines claimed one by one as others end, which is what a
    busy server does; measured with SQLite in this process."""
    with tempfile.TemporaryDirectory() as folder:
        store = JobStore(JobsConfig(folder=Path(folder)))
        store.workers.beat()
        batch = _started(store, lines)
        counted = _Counter(store)
        start = time.process_time()
        for _ in range(lines):
            store.lines.stopped([batch])
            claim = store.lines.claim("mini", 1)[0]
            store.lines.finish(claim, "completed", b"{}")
        seconds = time.process_time() - start
        store.close()
    return {
        "line_transactions": counted.commits / lines,
        "line_statements": counted.statements / lines,
        "transaction_ms": seconds / counted.commits * 1000,
    }


class _Counter:
    """Counts what reaches the database of a store."""

    def __init__(self, store: JobStore) -> None:
        self.statements = self.commits = 0
        engine = store._shared.database._engine
        event.listen(engine, "after_cursor_execute", self._statement)
        event.listen(engine, "commit", self._commit)

    def _statement(self, *args: Any) -> None:
        self.statements += 1

    def _commit(self, connection: Any) -> None:
        self.commits += 1


def _started(store: JobStore, lines: int) -> int:
    """The number of a batch whose lines may run."""
    body = {"prompt": "a red apple left of a cat"}
    file = store.files.begin("", "batch", "in.jsonl", None)
    with store.writer(file.id) as writer:
        for k in range(lines):
            line = {"custom_id": str(k), "method": "POST", "url": ENDPOINT, "body": body}
            writer.write(json.dumps(line).encode() + b"\n")
        writer.commit()
    store.files.ready(file.id, 1, "in.jsonl", None)
    new = NewBatch(
        tenant="",
        model="mini",
        endpoint=ENDPOINT,
        completion_window="24h",
        window_seconds=86_400,
        input_file_id=file.id,
        output_seconds=3600,
        defaults={"policy": "dense", "sparsity": 0.0, "options": []},
    )
    store.batches.create(new)
    claimed = store.batches.claim_validation("mini")
    assert claimed is not None
    assert store.validate(claimed)
    return claimed.seq
