"""What the server says about itself: models, health, metrics, and the page at /."""

import html
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
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
    """503 when the engine's thread is dead or its current step takes too long."""
    ServerState.of(http).require_healthy()
    return HealthAnswer()


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


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Bishop</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 44rem; margin: auto; padding: 2rem 1rem }}
pre {{ overflow-x: auto; padding: 1rem; background: #8882; border-radius: .5rem }}
:root {{ color-scheme: light dark }}
</style>
<h1>Bishop is serving {model}</h1>
<p>The API is OpenAI's Images API at <code>{url}v1</code>. Draw a picture:</p>
<pre>curl -s {url}v1/images/generations -H 'Content-Type: application/json' \\
  -d '{{"prompt": "a red apple", "seed": 1, "response_format": "url"}}'</pre>
<p><a href="v1/models">Models</a> · <a href="health">health</a> · <a href="metrics">metrics</a> ·
<a href="openapi.json">API description</a></p>
</html>
"""


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def index(http: Request) -> HTMLResponse:
    name, url = ServerState.of(http).service.model.name, str(http.base_url)
    page = _PAGE.format(model=html.escape(name), url=html.escape(url))
    headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return HTMLResponse(page, headers=headers)
