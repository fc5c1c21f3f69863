"""A Bishop server (or OpenAI's) as the `batch` commands see it; every failure is one clear line."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx

from commands.refusal import Refusal

PAGE = 100


class Remote:
    """Files and batches of a server. Close it, or use it as a context."""

    def __init__(self, url: str, key: str | None) -> None:
        secret = key or os.environ.get("BISHOP_API_KEY") or os.environ.get("OPENAI_API_KEY")
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = url
        try:
            self._http = httpx.Client(base_url=base, headers=headers, timeout=60)
        except (httpx.InvalidURL, ValueError) as error:
            raise Refusal(f"--url: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, name: str, data: Any) -> str:
        """The id of the stored file. data: bytes or an open binary file."""
        form = {"purpose": "batch"}
        answer = self._ask("POST", "/files", data=form, files={"file": (name, data)}, timeout=600)
        return str(answer["id"])

    def create(self, file_id: str, window: str) -> dict[str, Any]:
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/images/generations",
            "completion_window": window,
        }
        return self._ask("POST", "/batches", json=body)

    def batch(self, id: str) -> dict[str, Any]:
        return self._ask("GET", f"/batches/{id}")

    def cancel(self, id: str) -> dict[str, Any]:
        return self._ask("POST", f"/batches/{id}/cancel")

    def batches(self, limit: int) -> Iterator[dict[str, Any]]:
        """The newest first."""
        after: dict[str, str] = {}
        while limit > 0:
            query = {"limit": str(min(limit, PAGE)), **after}
            page = self._ask("GET", "/batches", params=query)
            yield from page["data"]
            limit -= PAGE
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}

    def lines(self, file_id: str) -> Iterator[str]:
        """The lines of a stored file, as they come."""
        with self._told(), self._http.stream("GET", f"/files/{file_id}/content") as answer:
            if answer.is_error:
                answer.read()
                raise _refused(answer)
            yield from answer.iter_lines()

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The JSON answer of any address below /v1."""
        return self._ask(method, path, **({} if body is None else {"json": body}))

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._told():
            answer = self._http.request(method, path, **options)
        if answer.is_error:
            raise _refused(answer)
        try:
            found: dict[str, Any] = answer.json()
        except ValueError:
            raise Refusal(f"--url: {self._url} does not answer in JSON: no such server") from None
        return found

    def _told(self) -> "_Told":
        return _Told(self._url)


class _Told:
    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.HTTPError):
            reason = str(error) or type(error).__name__
            raise Refusal(f"--url: {self._url} does not answer: {reason}") from None


def _refused(answer: httpx.Response) -> Refusal:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.reason_phrase
    return Refusal(f"the server refused ({answer.status_code}): {message}")


def open_file(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror or error}") from None
