"""/v1/bishop/replicas: what the engines behind this server do, and how operators change them."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.service_api import Fleet, FleetError, ReplicaStatus
from serving.answers import ErrorAnswer
from serving.body import read
from serving.errors import ApiError, invalid_body
from serving.state import ServerState

PREFIX = "/v1/bishop/replicas"

router = APIRouter(prefix=PREFIX, tags=["replicas"])

Name = Annotated[str, Path(max_length=64, description="Name of a replica.")]


class ReplicaList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ReplicaStatus]


class ScaleBody(BaseModel):
    """`replicas`: how many there are to be."""

    model_config = ConfigDict(strict=True, extra="forbid")

    replicas: Annotated[int, Field(ge=1, lt=2**31)]


_BODY = {"application/json": {"schema": ScaleBody.model_json_schema()}}
_REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 403, 404)
}
_REFUSED_BODY = _REFUSED | {status: {"model": ErrorAnswer} for status in (408, 413, 415)}


@router.get("", responses=_REFUSED)
async def replicas(http: Request) -> ReplicaList:
    """Every replica and what it does. 404 on a server of one engine."""
    return _list(_fleet(http))


@router.post(
    "/scale",
    responses=_REFUSED_BODY,
    status_code=202,
    openapi_extra={"requestBody": {"required": True, "content": _BODY}},
)
async def scale(http: Request) -> ReplicaList:
    """Start more, or let the youngest leave when their pictures have ended."""
    fleet = _fleet(http)
    body = _parse(await read(http, ServerState.of(http).config.body_limit))
    return _changed(fleet, lambda: fleet.scale(body.replicas), "replicas")


@router.post("/restart", responses=_REFUSED, status_code=202)
async def restart_all(http: Request) -> ReplicaList:
    """Replace all, one after the other, each when its pictures have ended."""
    fleet = _fleet(http)
    return _changed(fleet, fleet.restart)


@router.post("/{name}/restart", responses=_REFUSED, status_code=202)
async def restart(http: Request, name: Name) -> ReplicaList:
    """Replace one when its pictures have ended."""
    fleet = _fleet(http)
    return _changed(fleet, lambda: fleet.restart(name), "name")


@router.post("/{name}/drain", responses=_REFUSED, status_code=202)
async def drain(http: Request, name: Name) -> ReplicaList:
    """Take one away when its pictures have ended."""
    fleet = _fleet(http)
    return _changed(fleet, lambda: fleet.drain(name), "name")


def _fleet(http: Request) -> Fleet:
    service = ServerState.of(http).service
    if not isinstance(service, Fleet):
        message = "this server runs one engine: start it with --replicas to have several"
        raise ApiError(404, message, code="no_replicas")
    return service


def _changed(fleet: Fleet, change: Callable[[], None], param: str | None = None) -> ReplicaList:
    try:
        change()
    except FleetError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None
    return _list(fleet)


def _list(fleet: Fleet) -> ReplicaList:
    return ReplicaList(data=list(fleet.replicas()))


def _parse(body: bytes) -> ScaleBody:
    try:
        return ScaleBody.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, tuple(ScaleBody.model_fields)) from None
