"""An input file line by line: what a batch may hold, and why a file is refused.

The file is never held in memory: one piece of it, one line, and 16 bytes per custom_id.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from scheduler.jobs.batches import LineError
from scheduler.jobs.lines import NewLine

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 1 << 20
MAX_CUSTOM_ID: Final = 256
MAX_ERRORS: Final = 100
"""Errors told of one file; reading stops after them."""

RANDOM_SEEDS: Final = 2**31
FIELDS: Final = ("custom_id", "method", "url", "body")


class TooLong(Exception):  # noqa: N818
    """A line exceeds the limit; nothing after it can be read."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def split_lines(chunks: Iterable[bytes], limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Lines without their breaks. Raises TooLong for one of more than `limit` bytes."""
    rest = bytearray()
    number = 0
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        for part in whole:
            number += 1
            rest += part
            if len(rest) > limit:
                raise TooLong(number)
            yield bytes(rest)
            rest.clear()
        rest += last
        if len(rest) > limit:
            raise TooLong(number + 1)
    if rest:
        yield bytes(rest)


@dataclass
class Validation:
    """Reads the lines of one file; `errors` and `count` are known when they are exhausted."""

    endpoint: str
    max_lines: int = MAX_LINES
    errors: list[LineError] = field(default_factory=list)
    count: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def read(self, chunks: Iterable[bytes]) -> Iterator[NewLine]:
        """The good lines; the bad ones are in `errors`."""
        try:
            for number, text in enumerate(split_lines(chunks), start=1):
                if not text.strip():
                    continue
                line = self._line(number, text)
                if len(self.errors) >= MAX_ERRORS:
                    return
                if line is not None:
                    yield line
        except TooLong as error:
            message = f"the line has more than {MAX_LINE_BYTES} bytes"
            self._fail("invalid_json_line", message, error.number)
        if not self.count and not self.errors:
            self._fail("empty_file", "the input file has no lines", None)

    def _line(self, number: int, text: bytes) -> NewLine | None:
        self.count += 1
        if self.count > self.max_lines:
            if self.count == self.max_lines + 1:
                message = f"a batch has {self.max_lines} lines at most"
                self._fail("too_many_tasks", message, number)
            return None
        task = self._object(number, text)
        if task is None or not self._fits(number, task):
            return None
        body = task["body"]
        seed = body.get("seed")
        drawn = secrets.randbelow(RANDOM_SEEDS) if not isinstance(seed, int) else 0
        return NewLine(number, task["custom_id"], json.dumps(body), drawn)

    def _object(self, number: int, text: bytes) -> dict[str, Any] | None:
        try:
            task = json.loads(text)
        except (ValueError, RecursionError):
            task = None
        if isinstance(task, dict):
            return task
        self._fail("invalid_json_line", "the line is not a JSON object in UTF-8", number)
        return None

    def _fits(self, number: int, task: dict[str, Any]) -> bool:
        known = len(self.errors)
        for name in FIELDS:
            if name not in task:
                message = f"the field {name!r} is required"
                self._fail("missing_required_parameter", message, number, name)
        if len(self.errors) == known:
            self._check_fields(number, task)
        return len(self.errors) == known

    def _check_fields(self, number: int, task: dict[str, Any]) -> None:
        if extra := [name for name in task if name not in FIELDS]:
            message = f"unknown field {extra[0][:64]!r}; a line has {', '.join(FIELDS)}"
            self._fail("unknown_parameter", message, number)
        if task["method"] != "POST":
            self._fail("invalid_method", "the method must be 'POST'", number, "method")
        if task["url"] != self.endpoint:
            message = f"the url must be the batch's endpoint, {self.endpoint!r}"
            self._fail("invalid_url", message, number, "url")
        if not isinstance(task["body"], dict):
            self._fail("invalid_request", "the body must be an object", number, "body")
        self._check_id(number, task["custom_id"])

    def _check_id(self, number: int, id: object) -> None:
        if not (isinstance(id, str) and 0 < len(id) <= MAX_CUSTOM_ID and id.isprintable()):
            message = f"custom_id must be a printable text of 1 to {MAX_CUSTOM_ID} characters"
            self._fail("invalid_custom_id", message, number, "custom_id")
            return
        key = hashlib.blake2b(id.encode(), digest_size=16).digest()
        if key in self._seen:
            message = "an earlier line has the same custom_id"
            self._fail("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(key)

    def _fail(self, code: str, message: str, number: int | None, param: str | None = None) -> None:
        self.errors.append(LineError(code, message, number, param))
