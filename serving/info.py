"""What the server says about itself: models, health, metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import exposition

from engine.service_api import ModelInfo
from serving.answers import (
    ErrorAnswer,
    HealthAnswer,
    ModelAnswer,
    ModelList,
    ReadyAnswer,
    SamplingDefaults,
)
from serving.images import unknown_model
from serving.state import ServerState

router = APIRouter()

_UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": ErrorAnswer}}


@router.get("/v1/models", tags=["models"])
async def models(http: Request) -> ModelList:
    state = ServerState.of(http)
    return ModelList(data=[_card(state.service.model, state.started)])


@router.get("/v1/models/{id:path}", tags=["models"], responses={404: {"model": ErrorAnswer}})
async def model(http: Request, id: str) -> ModelAnswer:
    state = ServerState.of(http)
    if id != state.service.model.name:
        raise unknown_model(id, state.service.model.name)
    return _card(state.service.model, state.started)


def _card(model: ModelInfo, started: int) -> ModelAnswer:
    defaults = model.sampling
    return ModelAnswer(
        id=model.name,
        created=started,
        sizes=[f"{width}x{height}" for width, height in model.sizes],
        prompt_limit=model.prompt_limit,
        visual_tokens=model.visual_tokens,
        policies=list(model.policies),
        sampling=SamplingDefaults(
            guidance_scale=defaults.guidance_scale,
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
        ),
        backend=model.backend,
        device=model.device,
        dtype=model.dtype,
    )


@router.get("/health", tags=["service"], responses=_UNAVAILABLE)
async def health(http: Request) -> HealthAnswer:
    """503 when the engine's thread is dead or its current step takes too long; of several engines,
    when none draws."""
    state = ServerState.of(http)
    state.require_healthy()
    found = state.service.health()
    return HealthAnswer(status="degraded" if found.replacing else "ok", engines=found.engines)


@router.get("/ready", tags=["service"], responses=_UNAVAILABLE)
async def ready(http: Request) -> ReadyAnswer:
    """503 while requests would not be drawn: the engine is not well, or the server is leaving."""
    ServerState.of(http).require_ready()
    return ReadyAnswer()


@router.get("/metrics", tags=["service"], response_class=Response)
async def metrics(http: Request) -> Response:
    encode, media_type = exposition.choose_encoder(http.headers.get("accept", ""))
    body = encode(ServerState.of(http).metrics.registry)
    return Response(body, headers={"content-type": media_type})
