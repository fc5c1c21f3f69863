"""The shapes of what the service answers, field for field OpenAI's; additions are marked."""

from typing import Literal

from pydantic import BaseModel

from engine.pixels import Format

Quality = Literal["high"]
Background = Literal["opaque"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class TokenDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class Usage(BaseModel):
    """Tokens of the prompt, read once however many pictures, and of all pictures."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int


class Picture(BaseModel):
    """`seed` is an addition: a request for one picture with it draws this picture again."""

    b64_json: str | None = None
    url: str | None = None
    seed: int


class ImagesAnswer(BaseModel):
    created: int
    background: Background = "opaque"
    data: list[Picture]
    output_format: Format
    quality: Quality = "high"
    size: str
    usage: Usage
    safety_identifier: str | None = None


class StreamUsage(BaseModel):
    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    total_tokens: int


class PartialImageEvent(BaseModel):
    type: Literal["image_generation.partial_image"] = "image_generation.partial_image"
    b64_json: str
    partial_image_index: int
    created_at: int
    size: str
    quality: Quality = "high"
    background: Background = "opaque"
    output_format: Format


class CompletedEvent(BaseModel):
    type: Literal["image_generation.completed"] = "image_generation.completed"
    b64_json: str
    created_at: int
    size: str
    quality: Quality = "high"
    background: Background = "opaque"
    output_format: Format
    usage: StreamUsage
    safety_identifier: str | None = None


class SamplingDefaults(BaseModel):
    guidance_scale: float
    temperature: float
    top_k: int
    top_p: float


class ModelAnswer(BaseModel):
    """OpenAI's four fields, then what this server's extensions may be set to."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bishop"
    sizes: list[str]
    prompt_limit: str
    visual_tokens: int
    policies: list[str]
    sampling: SamplingDefaults
    backend: str
    device: str
    dtype: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class HealthAnswer(BaseModel):
    status: Literal["ok"] = "ok"


class ReadyAnswer(BaseModel):
    status: Literal["ready"] = "ready"
