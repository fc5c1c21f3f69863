"""The shapes of files and batches, field for field OpenAI's."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scheduler.jobs.batches import decoded
from scheduler.jobs.tables import Batch, File
from serving.errors import invalid_body

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
STATUSES: tuple[str, ...] = get_args(Status)

HOUR = 3600
MAX_EXPIRY = 30 * 24 * HOUR


class FileAnswer(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Requests that never ran because the batch was cancelled or expired count as failed."""

    total: int
    completed: int
    failed: int


class BatchAnswer(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR, le=MAX_EXPIRY)]


Label = Annotated[str, Field(max_length=64)]
LabelValue = Annotated[str, Field(max_length=512)]


class BatchBody(BaseModel):
    """What a client may send to create a batch. A window is 1h to 720h; OpenAI's own is 24h."""

    model_config = ConfigDict(strict=True, extra="forbid")
    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Literal["/v1/images/generations"]
    completion_window: Annotated[str, Field(pattern=r"^([1-9]\d?|[1-6]\d\d|7[01]\d|720)h$")]
    metadata: Annotated[dict[Label, LabelValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_seconds(self) -> int:
        return HOUR * int(self.completion_window[:-1])

    @property
    def output_seconds(self) -> int:
        after = self.output_expires_after
        return MAX_EXPIRY if after is None else after.seconds


def parse_batch(body: bytes) -> BatchBody:
    """Raises ApiError (400) naming the first field that does not fit."""
    try:
        return BatchBody.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, tuple(BatchBody.model_fields)) from None


def file_answer(file: File) -> FileAnswer:
    return FileAnswer(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose="batch" if file.purpose == "batch" else "batch_output",
    )


def batch_answer(batch: Batch) -> BatchAnswer:
    """Raises CorruptRecord."""
    copied = {name: getattr(batch, name) for name in BatchAnswer.model_fields.keys() & COLUMNS}
    return BatchAnswer(
        **copied,
        errors=_errors(decoded(batch, "errors")),
        metadata=decoded(batch, "labels"),
        request_counts=RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
    )


COLUMNS = frozenset(Batch.__table__.columns.keys()) - {"errors"}


def _errors(found: Sequence[dict[str, Any]] | None) -> BatchErrors | None:
    if not found:
        return None
    return BatchErrors(data=[BatchError(**each) for each in found])
