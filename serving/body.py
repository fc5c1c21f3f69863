"""The body of POST /v1/images/generations: OpenAI's fields, ours, and nothing else.

Every field is honoured or refused by name; a value that makes no sense here is refused with what
is possible instead.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from engine.pixels import Format
from engine.wanted import Option, Wanted
from scheduler.request import MAX_IMAGES, MAX_PROMPT_CHARACTERS
from serving.errors import ApiError, invalid_body

Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
Name = Annotated[str, Field(max_length=256)]

_REFUSED = {
    "style": "describe the style in the prompt instead",
    "complexity": "this server has one level; leave it out",
    "frame_count": "this server draws still pictures only",
    "frame_duration_ms": "this server draws still pictures only",
    "svg": "this server draws raster pictures only",
}


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported_value", "{message}", {"message": message})


class GenerationBody(BaseModel):
    """What a client may send. null means "not said", as in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    size: Annotated[str, Field(max_length=32, description="auto or WIDTHxHEIGHT")] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Format | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    quality: Name | None = None
    moderation: Literal["auto", "low"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None

    style: None = None
    complexity: None = None
    frame_count: None = None
    frame_duration_ms: None = None
    svg: None = None

    seed: Annotated[int, Field(ge=0, lt=2**63 - MAX_IMAGES)] | None = None
    negative_prompt: Text | None = None
    guidance_scale: Annotated[float, Field(ge=1, le=100)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    policy: Name | None = None
    sparsity: Annotated[float, Field(ge=0, lt=1)] | None = None
    policy_options: Annotated[dict[Name, Option], Field(max_length=32)] | None = None
    progress: bool | None = None

    @field_validator(*_REFUSED, mode="before")
    @classmethod
    def _not_here(cls, value: object, info: ValidationInfo) -> None:
        if value is not None:
            raise _refuse(f"not supported: {_REFUSED[info.field_name or '']}")

    @field_validator("background")
    @classmethod
    def _opaque(cls, value: str | None) -> str | None:
        if value == "transparent":
            raise _refuse("pictures here are opaque: use 'opaque' or 'auto'")
        return value

    @field_validator("quality")
    @classmethod
    def _one_quality(cls, value: str | None) -> str | None:
        if value not in (None, "auto", "high"):
            raise _refuse("pictures here have one quality: use 'auto' or 'high'")
        return value

    @property
    def format(self) -> Format:
        return self.output_format or "png"

    @property
    def compression(self) -> int:
        return 100 if self.output_compression is None else self.output_compression

    @property
    def safety(self) -> str | None:
        """The identifier of the end user, as OpenAI's API answers it."""
        return self.safety_identifier or self.user or None

    @property
    def wanted(self) -> Wanted:
        names = Wanted.__dataclass_fields__.keys() - {"policy_options"}
        said = {name: getattr(self, name) for name in names}
        return Wanted(**said, policy_options=self.policy_options or {})


def parse(body: bytes) -> GenerationBody:
    """Raises ApiError (400) naming the first field that does not fit."""
    try:
        parsed = GenerationBody.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, tuple(GenerationBody.model_fields)) from None
    for param, reason in _conflicts(parsed):
        raise ApiError(400, reason, param=param, code="invalid_value")
    return parsed


def _conflicts(body: GenerationBody) -> Iterator[tuple[str, str]]:
    """Fields that are right by themselves and make no sense together, with the reason."""
    if body.format == "png" and body.output_compression not in (None, 100):
        yield "output_compression", "png is lossless: use jpeg or webp, or leave it out"
    if body.partial_images and not body.stream:
        yield "partial_images", "partial pictures need stream: true"
    if body.progress and not body.stream:
        yield "progress", "progress needs stream: true"
    if body.stream and body.n not in (None, 1):
        yield "n", "a stream carries one picture: send one request for each"
    if body.stream and body.response_format == "url":
        yield "response_format", "a stream carries the pictures themselves: use b64_json"


async def read(request: Request, limit: int) -> bytes:
    """The JSON body of `request`. Raises ApiError 415 for another media type, 413 above `limit`."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(
            415, "send the header 'Content-Type: application/json'", code="unsupported_media_type"
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body may have {limit} bytes at most", code="body_too_large")
