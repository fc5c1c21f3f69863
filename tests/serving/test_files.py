"""/v1/files: what goes in comes out, page by page, and what is no upload is refused."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

import serving.files
from tests.fakes import FakeService
from tests.serving.jobs import upload
from tests.test_server import assert_error


def stored(folder: Path) -> list[Path]:
    return [path for path in (folder / "storage").rglob("*") if path.is_file()]


class TestOpenAIClient:
    def test_round_trip(self, client: openai.OpenAI, tmp_path: Path) -> None:
        data = b'{"a": 1}\n' * 1000
        file = client.files.create(file=("my tasks.jsonl", data), purpose="batch")
        assert (file.object, file.bytes, file.purpose) == ("file", len(data), "batch")
        assert (file.filename, file.status) == ("my tasks.jsonl", "processed")
        assert file.expires_at == file.created_at + 30 * 24 * 3600
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).read() == data
        assert [each.id for each in client.files.list()] == [file.id]
        assert client.files.delete(file.id).deleted
        assert stored(tmp_path) == []
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError):
            client.files.delete(file.id)

    def test_expiry(self, client: openai.OpenAI) -> None:
        after = {"anchor": "created_at", "seconds": 7200}
        file = client.files.create(
            file=b"x",
            purpose="batch",
            expires_after=after,  # type: ignore[arg-type]
        )
        assert file.expires_at == file.created_at + 7200

    def test_pages(self, client: openai.OpenAI) -> None:
        ids = [client.files.create(file=b"x", purpose="batch").id for _ in range(5)]
        assert [each.id for each in client.files.list(limit=2)] == ids[::-1]
        assert [each.id for each in client.files.list(limit=2, order="asc")] == ids
        page = client.files.list(limit=2, after=ids[3])
        assert [each.id for each in page.data] == [ids[2], ids[1]]
        assert page.has_more
        assert client.files.list(purpose="batch_output").data == []


class TestUploads:
    def test_pieces_of_any_size(self, http: httpx.Client) -> None:
        data = bytes(range(256)) * 9000  # more than one piece, and no text
        id = upload(http, data).json()["id"]
        assert http.get(f"/v1/files/{id}/content").content == data

    def test_the_file_may_come_before_its_purpose(self, http: httpx.Client) -> None:
        parts = [
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nxyz\r\n',
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        ]
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = http.post("/v1/files", content=b"".join(parts), headers=kind)
        assert answer.json()["bytes"] == 3

    @pytest.mark.parametrize(
        "name", ["../../etc/passwd", "..\\..\\x", "/abs", "a\x00b", "", "\u202e", "ü" * 999]
    )
    def test_a_name_is_only_shown(self, http: httpx.Client, tmp_path: Path, name: str) -> None:
        files = {"file": (name, b"x"), "purpose": (None, b"batch")}
        answer = http.post("/v1/files", files=files)
        if answer.status_code == 200:
            shown = answer.json()["filename"]
            assert "/" not in shown and "\\" not in shown and shown.isprintable()
            assert [path.name for path in stored(tmp_path)] == [answer.json()["id"]]
        else:
            assert_error(answer, 400, "file")

    def test_too_large(
        self, http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving.files, "MAX_FILE_BYTES", 3 << 20)
        assert_error(upload(http, b"x" * (5 << 20)), 413, "file")

        def chunks() -> Iterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            yield from (b"x" * 100_000 for _ in range(45))

        kind = {"content-type": "multipart/form-data; boundary=b"}
        assert_error(http.post("/v1/files", content=chunks(), headers=kind), 413, "file")
        assert stored(tmp_path) == []
        assert upload(http, b"x" * (3 << 20)).status_code == 200

    def test_refusals(self, http: httpx.Client, tmp_path: Path) -> None:
        error = assert_error(upload(http, b"x", purpose="fine-tune"), 400, "purpose")
        assert "batch" in error["message"]
        assert_error(upload(http, b"x", model="mini"), 400, "model")
        bad = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
        assert_error(upload(http, b"x", **bad), 400, "expires_after[seconds]")
        assert_error(upload(http, b"x", **{"expires_after[seconds]": "7200"}), 400,
                     "expires_after[anchor]")  # fmt: skip
        assert_error(http.post("/v1/files", files={"purpose": (None, b"batch")}), 400, "file")
        assert_error(http.post("/v1/files", files={"file": b"x"}), 400, "purpose")
        assert_error(http.post("/v1/files", json={"purpose": "batch"}), 415)
        kind = {"content-type": "multipart/form-data; boundary=b"}
        for body in (b"", b"--b", b"nonsense", b"--b\r\n\r\n\r\n--b--"):
            assert http.post("/v1/files", content=body, headers=kind).status_code == 400
        assert stored(tmp_path) == []
        assert http.get("/v1/files").json()["data"] == []

    def test_a_client_that_leaves_leaves_nothing(self, http: httpx.Client, tmp_path: Path) -> None:
        def chunks() -> Iterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            yield b"x" * (3 << 20)
            raise ConnectionResetError

        kind = {"content-type": "multipart/form-data; boundary=b"}
        with pytest.raises(ConnectionResetError):
            http.post("/v1/files", content=chunks(), headers=kind)
        from tests.fakes import wait_until

        assert wait_until(lambda: stored(tmp_path) == [])


class TestIds:
    @pytest.mark.parametrize(
        "id", ["x", "file-1", "..%2F..%2Fetc%2Fpasswd", "%00", "file-" + "0" * 32, "a" * 5000]
    )
    def test_unknown_ids_are_404(self, http: httpx.Client, id: str) -> None:
        for path in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}"):
            assert http.get(path).status_code == 404
        assert http.delete(f"/v1/files/{id}").status_code == 404
        assert http.post(f"/v1/batches/{id}/cancel").status_code == 404

    def test_lists_take_no_nonsense(self, http: httpx.Client) -> None:
        for query in ("limit=0", "limit=x", "limit=99999", "order=up", "purpose=x", "after=x"):
            assert http.get(f"/v1/files?{query}").status_code == 400
        for query in ("limit=0", "limit=101", "after=x", "after=batch_" + "0" * 32):
            assert http.get(f"/v1/batches?{query}").status_code == 400


def test_without_jobs_there_are_no_such_addresses() -> None:
    from tests.live import serving as live

    with live(FakeService()) as url:
        assert_error(httpx.get(f"{url}/v1/files"), 404)
        assert_error(httpx.post(f"{url}/v1/batches"), 404)
