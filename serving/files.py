"""/v1/files: what batches are made of, and what they end in."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from scheduler.jobs.files import MAX_FILE_BYTES
from scheduler.jobs.tables import File
from serving.answers import ErrorAnswer
from serving.desk import Desk
from serving.errors import ApiError, invalid_body
from serving.job_answers import (
    MAX_EXPIRY,
    ExpiresAfter,
    FileAnswer,
    FileDeleted,
    FileList,
    Purpose,
    file_answer,
)
from serving.scope import tenant
from serving.state import ServerState
from serving.upload import PIECE, Form, Receiving, too_large

router = APIRouter(prefix="/v1/files", tags=["files"])

ENVELOPE = 1 << 20
"""Bytes that a multipart body may have around its file."""

ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer}
    for status in (400, 401, 404, 405, 408, 409, 413, 415, 429, 500, 503)
}


def owner() -> str:
    """Whose files and batches this request is about."""
    key = tenant.get()
    return "" if key is None else key.name


def checked(id: str, what: str) -> str:
    """Raises ApiError (404) for what is no id of ours: it reaches neither database nor disk."""
    if not ID.fullmatch(id):
        raise missing(what)
    return id


def missing(what: str) -> ApiError:
    return ApiError(404, f"there is no {what} with this id", param="id", code=f"{what}_not_found")


def after_id(after: str | None) -> str | None:
    if after is not None and not ID.fullmatch(after):
        raise ApiError(400, "this is no id to list after", param="after", code="invalid_value")
    return after


@router.post(
    "",
    responses=ERRORS,
    openapi_extra={
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    },
)
async def upload(http: Request) -> FileAnswer:
    """Store a file for a batch: JSON lines, 200 MB at most, as multipart/form-data."""
    desk = ServerState.of(http).jobs
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_FILE_BYTES + ENVELOPE:
        raise too_large(MAX_FILE_BYTES)
    form = Form(http.headers)
    file = await desk.ask(desk.store.files.begin, owner(), "batch", "file", MAX_EXPIRY)
    writer = await desk.ask(desk.store.writer, file.id)
    async with Receiving(desk, file, writer, MAX_FILE_BYTES) as receiving:
        await _receive(http, form, receiving)
        seconds = _life(form.fields)
        return file_answer(await receiving.publish(form.filename or "file", seconds))


async def _receive(http: Request, form: Form, receiving: Receiving) -> None:
    async for chunk in http.stream():
        form.feed(chunk)
        if form.pending >= PIECE:
            await receiving.write(form.take())
    await receiving.write(form.take())
    form.finish()


def _life(fields: Mapping[str, str]) -> int:
    """Seconds that the file lives. Raises ApiError (400) for fields that do not fit."""
    for name in fields:
        if name not in FIELDS:
            known = ", ".join(FIELDS)
            raise _bad(name[:64], f"unknown field; known: file, {known}", "unknown_parameter")
    if "purpose" not in fields:
        raise _bad("purpose", "the field 'purpose' is required", "missing_required_parameter")
    if fields["purpose"] != "batch":
        raise _bad("purpose", "the only purpose here is 'batch'", "invalid_value")
    given = {name[14:-1]: value for name, value in fields.items() if name != "purpose"}
    return MAX_EXPIRY if not given else _expiry(given).seconds


def _expiry(given: Mapping[str, str]) -> ExpiresAfter:
    seconds = given.get("seconds", "")
    number = {"seconds": int(seconds)} if re.fullmatch(r"[0-9]{1,9}", seconds) else {}
    try:
        return ExpiresAfter.model_validate_json(json.dumps({**given, **number}))
    except ValidationError as error:
        refused = invalid_body(error, tuple(ExpiresAfter.model_fields))
        raise _bad(f"expires_after[{refused.param}]", str(refused), "invalid_value") from None


def _bad(param: str, message: str, code: str) -> ApiError:
    return ApiError(400, message, param=param, code=code)


@router.get("", responses=ERRORS)
async def files(
    http: Request,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Purpose | None = None,
) -> FileList:
    desk = ServerState.of(http).jobs
    found = await desk.ask(desk.store.files.list, owner(), purpose, after_id(after), limit, order)
    data = [file_answer(file) for file in found.items]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return FileList(data=data, first_id=first, last_id=last, has_more=found.more)


@router.get("/{id}", responses=ERRORS)
async def file(http: Request, id: str) -> FileAnswer:
    return file_answer(await _find(ServerState.of(http).jobs, id))


@router.get("/{id}/content", response_class=Response, responses=ERRORS)
async def content(http: Request, id: str) -> Response:
    """The file as it was stored, piece by piece."""
    desk = ServerState.of(http).jobs
    found = await _find(desk, id)
    chunks = await desk.chunks(desk.store.content(found.id))
    headers = {"content-length": str(found.bytes), "x-content-type-options": "nosniff"}
    return StreamingResponse(chunks, 200, headers, "application/octet-stream")


@router.delete("/{id}", responses=ERRORS)
async def delete(http: Request, id: str) -> FileDeleted:
    desk = ServerState.of(http).jobs
    if not await desk.ask(desk.store.files.delete, owner(), checked(id, "file")):
        raise missing("file")
    return FileDeleted(id=id)


async def _find(desk: Desk, id: str) -> File:
    found = await desk.ask(desk.store.files.get, owner(), checked(id, "file"))
    if found is None:
        raise missing("file")
    return found
