"""From finished images to answers. Pictures are encoded in threads; the event loop never waits."""

import asyncio
import base64
import time
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import UInt8

from engine.events import Finished, Partial, Progress
from engine.pixels import encode
from serving.answers import (
    CompletedEvent,
    DrawingCost,
    ImagesAnswer,
    PartialImageEvent,
    Picture,
    ProgressEvent,
    StreamUsage,
    TokenDetails,
    Usage,
)
from serving.body import GenerationBody

Pixels = UInt8[np.ndarray, "height width 3"]
Publish = Callable[[bytes], str]
"""Keeps an encoded picture and returns its URL."""


async def images_answer(
    body: GenerationBody, finished: Sequence[Finished], publish: Publish
) -> ImagesAnswer:
    """The answer to a request that does not stream: every picture, in the order of its seed."""
    encoded = await asyncio.gather(*(_encode(body, image.pixels) for image in finished))
    return answer_of(body, finished, encoded, publish)


def answer_of(
    body: GenerationBody,
    finished: Sequence[Finished],
    encoded: Sequence[bytes],
    publish: Publish,
) -> ImagesAnswer:
    """`images_answer` for pictures that are encoded already."""
    as_url = body.response_format == "url"
    return ImagesAnswer(
        created=int(time.time()),
        data=[
            Picture(seed=image.seed, url=publish(data))
            if as_url
            else Picture(seed=image.seed, b64_json=base64.b64encode(data).decode())
            for image, data in zip(finished, encoded, strict=True)
        ],
        output_format=body.format,
        size=_size(finished[0].pixels),
        usage=_usage(finished),
        safety_identifier=body.safety,
        bishop=[_cost(image) for image in finished],
    )


def progress_event(progress: Progress) -> ProgressEvent:
    return ProgressEvent(done=progress.done, total=progress.total)


async def partial_event(body: GenerationBody, partial: Partial) -> PartialImageEvent:
    return PartialImageEvent(
        b64_json=await _base64(body, partial.pixels),
        partial_image_index=partial.number,
        created_at=int(time.time()),
        size=_size(partial.pixels),
        output_format=body.format,
    )


async def completed_event(body: GenerationBody, finished: Finished) -> CompletedEvent:
    usage = _usage([finished])
    return CompletedEvent(
        b64_json=await _base64(body, finished.pixels),
        created_at=int(time.time()),
        size=_size(finished.pixels),
        output_format=body.format,
        usage=StreamUsage(**usage.model_dump(exclude={"output_tokens_details"})),
        safety_identifier=body.safety,
        bishop=_cost(finished),
    )


async def _encode(body: GenerationBody, pixels: Pixels) -> bytes:
    return await asyncio.to_thread(encode, pixels, body.format, body.compression)


async def _base64(body: GenerationBody, pixels: Pixels) -> str:
    return base64.b64encode(await _encode(body, pixels)).decode()


def _size(pixels: Pixels) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]}"


def _cost(image: Finished) -> DrawingCost:
    stats = image.stats
    return DrawingCost(
        seed=image.seed,
        tokens=stats.tokens,
        seconds=round(stats.seconds, 4),
        queue_seconds=round(stats.queue_seconds, 4),
        tokens_per_second=round(stats.tokens / stats.seconds, 2) if stats.seconds else 0.0,
        kv_read_bytes=stats.kv_read_bytes,
        kv_resident_bytes=stats.kv_resident_bytes,
        density=round(stats.density, 6),
    )


def _usage(finished: Sequence[Finished]) -> Usage:
    prompt = finished[0].stats.prompt_tokens
    drawn = sum(image.stats.tokens for image in finished)
    return Usage(
        input_tokens=prompt,
        input_tokens_details=TokenDetails(text_tokens=prompt, image_tokens=0),
        output_tokens=drawn,
        output_tokens_details=TokenDetails(text_tokens=0, image_tokens=drawn),
        total_tokens=prompt + drawn,
    )
