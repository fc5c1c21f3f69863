"""The job storage on S3, spoken to a server of moto's; needs `pip install s3fs 'moto[server]'`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.jobs.errors import StoreUnavailable
from scheduler.jobs.storage import Storage
from scheduler.jobs.store import JobsConfig, JobStore
from tests.scheduler.jobs.helpers import end, finish, now, records, start

for package in ("s3fs", "moto.server", "boto3"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # boto's own deprecations

LARGE = b"x" * (12 << 20)
"""More than one part of a multipart upload."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "NO_PROXY": host,
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="jobs")
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://jobs/prefix"
    server.stop()


def test_a_batch_leaves_its_files_and_nothing_else(url: str, tmp_path: Path) -> None:
    store = JobStore(JobsConfig(folder=tmp_path, storage=url))
    batch = start(store, 5)
    for claim in store.lines.claim("tiny", 5):
        assert finish(store, claim)
    assert end(store)
    store.keep()
    batch = now(store, batch)
    assert len(records(store, batch.output_file_id)) == 5
    stored = store._shared.storage._fs.find("jobs")
    kept = {batch.input_file_id, batch.output_file_id}
    assert {key.rsplit("/", 1)[-1] for key in stored} == kept
    store.close()


def test_a_large_content_is_there_whole_or_not_at_all(url: str) -> None:
    storage = Storage(url)
    with storage.writer("files/large") as writer:
        writer.write(LARGE)
    assert storage.get("files/large") is None
    with storage.writer("files/large") as writer:
        writer.write(LARGE)
        writer.commit()
    assert b"".join(storage.chunks("files/large")) == LARGE
    storage.delete("files/large")
    storage.delete("files/large")
    assert storage.get("files/large") is None
    with pytest.raises(StoreUnavailable, match="gone"):
        list(storage.chunks("files/large"))
