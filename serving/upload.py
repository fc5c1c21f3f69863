"""Multipart bodies as they arrive: the file goes to storage piece by piece, never into memory."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from scheduler.jobs.storage import Writer
from scheduler.jobs.tables import File
from serving.desk import Desk
from serving.errors import ApiError

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
PIECE = 1 << 20
"""Bytes collected before they are handed to a thread that writes them."""


class Form:
    """Feed it the body; `fields` are the small values, `take` gives what came of the file."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        kind, options = parse_options_header(headers.get("content-type", ""))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            message = "send the file as multipart/form-data, with the fields 'file' and 'purpose'"
            raise ApiError(415, message, code="unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._new = bytearray()
        self._name = ""
        self._value: bytearray | None = None
        self._header = [bytearray(), bytearray()]
        self._headers: dict[bytes, bytes] = {}
        self._ended = False
        self._parser = MultipartParser(options[b"boundary"], self._callbacks())

    def feed(self, chunk: bytes) -> None:
        """Raises ApiError (400) for what is no form, or not this one."""
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _bad("the multipart body is malformed") from None

    def take(self) -> bytes:
        """What has come of the file since the last time."""
        data = bytes(self._new)
        self._new.clear()
        return data

    @property
    def pending(self) -> int:
        return len(self._new)

    def finish(self) -> None:
        if not self._ended:
            raise _bad("the multipart body ends early")
        if self.filename is None:
            raise _bad("the field 'file' is required", "file", "missing_required_parameter")

    def _callbacks(self) -> Any:
        names = ("part_begin", "part_data", "part_end", "headers_finished", "end")
        header = ("header_field", "header_value", "header_end")
        return {f"on_{name}": getattr(self, f"_{name}") for name in (*names, *header)}

    def _part_begin(self) -> None:
        self._headers = {}

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _header_end(self) -> None:
        self._headers[bytes(self._header[0]).lower()] = bytes(self._header[1])
        self._header = [bytearray(), bytearray()]

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise _bad("send one file", "file")
            self.filename = _printable(options.get(b"filename", b""))
            self._value = None
            return
        if len(self.fields) >= MAX_FIELDS:
            raise _bad(f"a form has {MAX_FIELDS} fields at most")
        self._value = bytearray()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        target = self._new if self._value is None else self._value
        target += data[start:end]
        if self._value is not None and len(self._value) > MAX_FIELD_BYTES:
            raise _bad(f"a field has {MAX_FIELD_BYTES} bytes at most", _printable(self._name))

    def _part_end(self) -> None:
        if self._value is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


class Receiving:
    """The file of one upload on its way into storage; leaving early removes what came."""

    def __init__(self, desk: Desk, file: File, writer: Writer, limit: int) -> None:
        self._desk, self._file, self._writer, self._limit = desk, file, writer, limit
        self._size = 0
        self._kept = False

    async def write(self, data: bytes) -> None:
        """Raises ApiError (413) above the limit."""
        self._size += len(data)
        if self._size > self._limit:
            raise too_large(self._limit)
        await self._desk.ask(self._writer.write, data)

    async def publish(self, name: str, seconds: int) -> File:
        """The file as everybody sees it from now on, for `seconds`."""
        files, id = self._desk.store.files, self._file.id
        await self._desk.ask(self._writer.commit)
        file = await self._desk.ask(files.ready, id, self._size, name, seconds)
        self._kept = True
        return file

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._kept:
            await self._desk.ask(self._writer.discard)
            await self._desk.ask(self._desk.store.files.discard, self._file.id)


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"a file has {limit} bytes at most", param="file", code="file_too_large")


def _bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _printable(name: bytes | str, limit: int = 255) -> str:
    """A name to show: never a path, never a control character."""
    text = name if isinstance(name, str) else name.decode("utf-8", "replace")
    last = text.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c for c in last if c.isprintable())[:limit] or "file"
