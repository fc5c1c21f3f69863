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


class DrawingCost(BaseModel):
    """What a picture cost; an addition, under the one key `bishop`.

    seconds: from its first step to its last. kv_read_bytes: visual KV read by attention;
    kv_resident_bytes: visual KV stored; both of all its sequences. density: keys read / keys
    dense attention reads, prompt included, mean over the picture.
    """

    seed: int
    tokens: int
    seconds: float
    queue_seconds: float
    tokens_per_second: float
    kv_read_bytes: int
    kv_resident_bytes: int
    density: float


class ImagesAnswer(BaseModel):
    """`bishop` is an addition: the cost of each picture, in the order of `data`."""

    created: int
    background: Background = "opaque"
    data: list[Picture]
    output_format: Format
    quality: Quality = "high"
    size: str
    usage: Usage
    safety_identifier: str | None = None
    bishop: list[DrawingCost]


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


class ProgressEvent(BaseModel):
    """An addition, sent only to clients that ask for it: `done` of `total` tokens are drawn."""

    type: Literal["bishop.progress"] = "bishop.progress"
    done: int
    total: int


class CompletedEvent(BaseModel):
    """`bishop` is an addition: the cost of the picture."""

    type: Literal["image_generation.completed"] = "image_generation.completed"
    b64_json: str
    created_at: int
    size: str
    quality: Quality = "high"
    background: Background = "opaque"
    output_format: Format
    usage: StreamUsage
    safety_identifier: str | None = None
    bishop: DrawingCost


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
    """engines: how many draw. status: degraded while some that should draw do not."""

    status: Literal["ok", "degraded"] = "ok"
    engines: int = 1


class ReadyAnswer(BaseModel):
    status: Literal["ready"] = "ready"
