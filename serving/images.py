"""POST /v1/images/generations, and the pictures behind its URLs."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from engine.wanted import nearest, shorten, to_request
from scheduler.request import ImageRequest
from serving.answers import ErrorAnswer, ImagesAnswer
from serving.body import GenerationBody, parse, read
from serving.drawing import Drawing, unless_ended
from serving.errors import ApiError
from serving.policy_files import safe_options
from serving.render import images_answer
from serving.scope import request_id
from serving.sse import PictureStream
from serving.state import ServerState

log = logging.getLogger("bishop.server")

SEED_HEADER = "x-bishop-seed"

router = APIRouter(prefix="/v1/images", tags=["images"])

_BODY = {"application/json": {"schema": GenerationBody.model_json_schema()}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": ImagesAnswer, "content": {"text/event-stream": {}}},
    **{
        status: {"model": ErrorAnswer}
        for status in (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
    },
}


@router.post(
    "/generations",
    response_class=JSONResponse,
    responses=_ANSWERS,
    openapi_extra={"requestBody": {"required": True, "content": _BODY}},
)
async def generations(http: Request) -> Response:
    """Draw n pictures of a prompt, or one as a stream of events."""
    state = ServerState.of(http)
    body = parse(await read(http, state.config.body_limit))
    request = _accept(body, state)
    headers = {SEED_HEADER: str(request.seed)}
    await asyncio.to_thread(state.service.check, request)
    drawing = Drawing(state.service, request, state.metrics, state.queue, state.tracer)
    if body.stream:
        return PictureStream(drawing, body, state, headers)
    async with drawing:
        work, limit = drawing.finished(), state.config.request_seconds
        finished = await unless_ended(work, http.receive, state.stopping, limit)
    answer = await images_answer(body, finished, _publisher(http, body))
    return Response(answer.model_dump_json(exclude_none=True), 200, headers, "application/json")


def _accept(body: GenerationBody, state: ServerState) -> ImageRequest:
    """The engine's request. Raises ApiError or RequestError with the reason there is none."""
    model = state.service.model
    if body.model not in (None, model.name):
        raise unknown_model(body.model or "", model.name)
    state.require_healthy()
    options = safe_options(body.policy_options or {}, state.config.policy_folder)
    wanted = replace(body.wanted, policy_options=options)
    request = replace(to_request(wanted, model, state.config.policy), id=request_id.get())
    _log(request, body.safety)
    return request


def _log(request: ImageRequest, user: str | None) -> None:
    policy = request.policy
    drawn = (request.n, request.seed, policy.name, policy.sparsity)
    log.info("n=%d seed=%d policy=%s sparsity=%g user=%r", *drawn, user)


def unknown_model(name: str, model: str) -> ApiError:
    """The 404 for any model but the one that is served."""
    known = nearest(name, [model])
    message = f"unknown model {shorten(name)!r}{known}"
    return ApiError(404, message, param="model", code="model_not_found")


def _publisher(http: Request, body: GenerationBody) -> Callable[[bytes], str]:
    """Keeps a picture and returns the URL it is served at."""
    files = ServerState.of(http).files

    def publish(data: bytes) -> str:
        id = files.put(data, f"image/{body.format}")
        return str(http.url_for("picture", id=id))

    return publish


@router.get(
    "/files/{id}", response_class=Response, responses={404: {"model": ErrorAnswer}}, name="picture"
)
async def picture(http: Request, id: str) -> Response:
    """A picture that was drawn with `response_format: url`, until it expires."""
    file = ServerState.of(http).files.get(id)
    if file is None:
        raise ApiError(404, "this picture has expired or never existed", code="file_not_found")
    headers = {"cache-control": "private, max-age=3600", "x-content-type-options": "nosniff"}
    return Response(file.data, 200, headers, file.media_type)
