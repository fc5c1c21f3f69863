"""/v1/bishop: what the playground shows beside the pictures: policies, their reads, the queue."""

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.policy_info import PolicyInfo, Source
from engine.service_api import ReadQuery
from engine.wanted import Option, Wanted, choose_policy, parse_size
from scheduler.request import PolicyChoice
from serving.answers import ErrorAnswer
from serving.body import Name, read
from serving.errors import invalid_body
from serving.policy_files import offered, safe_options
from serving.state import ServerState

router = APIRouter(prefix="/v1/bishop", tags=["bishop"])

Run = tuple[int, int]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class OptionAnswer(BaseModel):
    """`choices`: the values there are, or None where any of `types` may do."""

    name: str
    types: list[str]
    default: Option | None
    required: bool
    text: str
    choices: list[str] | None


class PolicyAnswer(BaseModel):
    """`unavailable`: why this server cannot run it, or None."""

    name: str
    text: str
    takes_sparsity: bool
    options: list[OptionAnswer]
    unavailable: str | None


class GridAnswer(BaseModel):
    height: int
    width: int
    row_tokens: int


class ChoiceAnswer(BaseModel):
    policy: str
    sparsity: float
    policy_options: dict[str, Option]


class PolicyList(BaseModel):
    """`default`: what a request gets that names no policy. `grids`: by picture size."""

    object: Literal["list"] = "list"
    layers: int
    kv_heads: int
    grids: dict[str, GridAnswer]
    default: ChoiceAnswer
    data: list[PolicyAnswer]


@router.get("/policies")
async def policies(http: Request) -> PolicyList:
    """The attention policies with their options and defaults."""
    state = ServerState.of(http)
    catalog = await asyncio.to_thread(state.service.policies)
    files = list(offered(state.config.policy_folder))
    return PolicyList(
        layers=catalog.layers,
        kv_heads=catalog.kv_heads,
        grids={
            f"{width}x{height}": GridAnswer(
                height=grid.height, width=grid.width, row_tokens=grid.row_tokens
            )
            for (width, height), grid in catalog.grids.items()
        },
        default=_default(state.config.policy),
        data=[_policy(info, files) for info in catalog.policies],
    )


def _default(choice: PolicyChoice) -> ChoiceAnswer:
    """Of a file only its name is told."""
    options = {k: Path(str(v)).name if k == "file" else v for k, v in choice.options}
    return ChoiceAnswer(policy=choice.name, sparsity=choice.sparsity, policy_options=options)


def _policy(info: PolicyInfo, files: list[str]) -> PolicyAnswer:
    options = [
        OptionAnswer(
            name=option.name,
            types=list(option.types),
            default=option.default,
            required=option.required,
            text=option.text,
            choices=files if option.name == "file" else None,
        )
        for option in info.options
    ]
    return PolicyAnswer(
        name=info.name,
        text=info.text,
        takes_sparsity=info.takes_sparsity,
        options=options,
        unavailable=info.unavailable,
    )


class ReadSetBody(BaseModel):
    """The policy is named as in a request for pictures. `position`: the visual token whose query
    reads. `picture`: the x-request-id of a picture, for what its policy learnt while drawing it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    policy: Name | None = None
    sparsity: Annotated[float, Field(ge=0, lt=1)] | None = None
    policy_options: Annotated[dict[Name, Option], Field(max_length=32)] | None = None
    size: Annotated[str, Field(max_length=32)] | None = None
    layer: Count = 0
    head: Count = 0
    position: Count = 0
    picture: Annotated[str, Field(max_length=64)] | None = None


class ReadSetAnswer(BaseModel):
    """Runs [first, last] of visual positions; the prompt is read besides. `reads` is null where
    it cannot be told beforehand, `resident` where it depends on a picture that is not at hand.

    source: fixed, learned (by that picture), fresh (before anything is learnt) or picked (anew
    for each query).
    """

    object: Literal["bishop.read_set"] = "bishop.read_set"
    grid: GridAnswer
    policy: str
    sparsity: float
    layer: int
    head: int
    position: int
    source: Source
    reads: list[Run] | None
    resident: list[Run] | None


_BODY = {"application/json": {"schema": ReadSetBody.model_json_schema()}}
_REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 413, 415)
}


@router.post(
    "/read_set",
    responses=_REFUSED,
    openapi_extra={"requestBody": {"required": True, "content": _BODY}},
)
async def read_set(http: Request) -> ReadSetAnswer:
    """What one head reads and keeps while a token is drawn."""
    state = ServerState.of(http)
    body = _parse(await read(http, state.config.body_limit))
    query = _query(body, state)
    found = await asyncio.to_thread(state.service.read_set, query)
    grid = found.grid
    return ReadSetAnswer(
        grid=GridAnswer(height=grid.height, width=grid.width, row_tokens=grid.row_tokens),
        policy=query.policy.name,
        sparsity=query.policy.sparsity,
        layer=found.layer,
        head=found.head,
        position=found.position,
        source=found.source,
        reads=None if found.reads is None else list(found.reads),
        resident=None if found.resident is None else list(found.resident),
    )


def _parse(body: bytes) -> ReadSetBody:
    try:
        return ReadSetBody.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, tuple(ReadSetBody.model_fields)) from None


def _query(body: ReadSetBody, state: ServerState) -> ReadQuery:
    """Raises ApiError or RequestError naming the field that does not fit."""
    model = state.service.model
    options = safe_options(body.policy_options or {}, state.config.policy_folder)
    wanted = Wanted(prompt="", policy=body.policy, sparsity=body.sparsity, policy_options=options)
    choice = choose_policy(wanted, model.policies, state.config.policy)
    size = parse_size(body.size, model)
    return ReadQuery(choice, body.layer, body.head, body.position, size, body.picture)


class QueueAnswer(BaseModel):
    """Images now being drawn and waiting for room, and how full the KV cache is."""

    images_running: int
    images_waiting: int
    images_finished: int
    cache_bytes_used: int
    cache_bytes_total: int
    tokens: int


@router.get("/queue")
async def queue(http: Request) -> QueueAnswer:
    """What the engine is busy with. `tokens`: visual tokens drawn since the start."""
    stats = ServerState.of(http).service.stats()
    return QueueAnswer(**{name: getattr(stats, name) for name in QueueAnswer.model_fields})
