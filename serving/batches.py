"""/v1/batches: many requests at once, drawn where interactive ones leave room."""

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from scheduler.jobs.batches import NewBatch
from scheduler.jobs.errors import CorruptRecord
from scheduler.jobs.tables import Batch
from serving.body import read
from serving.errors import ApiError
from serving.files import ERRORS, after_id, checked, missing, owner
from serving.job_answers import BatchAnswer, BatchBody, BatchList, batch_answer, parse_batch
from serving.scope import tenant
from serving.state import ServerState

log = logging.getLogger("bishop.server")

router = APIRouter(prefix="/v1/batches", tags=["batches"])

_BODY = {"application/json": {"schema": BatchBody.model_json_schema()}}


@router.post(
    "",
    responses=ERRORS,
    openapi_extra={"requestBody": {"required": True, "content": _BODY}},
)
async def create(http: Request) -> BatchAnswer:
    """Start a batch over an uploaded file. Its lines are checked before the first one runs."""
    state = ServerState.of(http)
    body = parse_batch(await read(http, state.config.body_limit))
    desk = state.jobs
    await _within_limit(state)
    checked_input = checked_file(body.input_file_id)
    batch = await desk.ask(desk.store.batches.create, _new(state, body, checked_input))
    state.wake()
    log.info("batch %s of %s", batch.id, batch.input_file_id)
    return batch_answer(batch)


def checked_file(id: str) -> str:
    try:
        return checked(id, "file")
    except ApiError:
        message = "there is no file with this id"
        raise ApiError(400, message, param="input_file_id", code="file_not_found") from None


def _new(state: ServerState, body: BatchBody, file_id: str) -> NewBatch:
    return NewBatch(
        tenant=owner(),
        model=state.service.model.name,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        window_seconds=body.window_seconds,
        input_file_id=file_id,
        output_seconds=body.output_seconds,
        defaults=_defaults(state),
        labels=body.metadata,
    )


def _defaults(state: ServerState) -> dict[str, Any]:
    """The server's policy of now: after a restart with another one, lines draw the same."""
    policy = state.config.policy
    return {
        "policy": policy.name,
        "sparsity": policy.sparsity,
        "options": [list(pair) for pair in policy.options],
    }


async def _within_limit(state: ServerState) -> None:
    key = tenant.get()
    if key is None or key.batches is None:
        return
    if await state.jobs.ask(state.jobs.store.batches.unfinished, key.name) >= key.batches:
        message = f"this key may have {key.batches} batches that have not ended"
        headers = {"retry-after": "60"}
        raise ApiError(429, message, code="batch_limit_exceeded", headers=headers)


@router.get("", responses=ERRORS)
async def batches(
    http: Request,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    desk = ServerState.of(http).jobs
    found = await desk.ask(desk.store.batches.list, owner(), after_id(after), limit)
    data = [answer for batch in found.items if (answer := _readable(batch)) is not None]
    first, last = (found.items[0].id, found.items[-1].id) if found.items else (None, None)
    return BatchList(data=data, first_id=first, last_id=last, has_more=found.more)


def _readable(batch: Batch) -> BatchAnswer | None:
    """A damaged record does not hide the others: asked for by its id, it says what is wrong."""
    try:
        return batch_answer(batch)
    except CorruptRecord as error:
        log.error("left out of a list: %s", error)
        return None


@router.get("/{id}", responses=ERRORS)
async def batch(http: Request, id: str) -> BatchAnswer:
    desk = ServerState.of(http).jobs
    return await _answer(http, await desk.ask(desk.store.batches.get, owner(), _checked(id)))


@router.post("/{id}/cancel", responses=ERRORS)
async def cancel(http: Request, id: str) -> BatchAnswer:
    """Stop what has not run; results so far are kept."""
    state = ServerState.of(http)
    desk = state.jobs
    found = await desk.ask(desk.store.batches.cancel, owner(), _checked(id))
    state.wake()
    return await _answer(http, found)


def _checked(id: str) -> str:
    return checked(id, "batch")


async def _answer(http: Request, found: Batch | None) -> BatchAnswer:
    if found is None:
        raise missing("batch")
    return await ServerState.of(http).jobs.ask(batch_answer, found)
