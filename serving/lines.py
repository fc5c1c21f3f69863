"""One line of a batch: from its stored body to the record that ends it."""

import asyncio
import json
import uuid
from dataclasses import replace
from typing import Any

from engine.wanted import to_request
from scheduler.jobs.batches import decoded
from scheduler.jobs.errors import CorruptRecord
from scheduler.jobs.lines import Claim, Outcome
from scheduler.request import ImageRequest, PolicyChoice, Priority, RequestError
from serving.body import GenerationBody, parse
from serving.drawing import Drawing
from serving.errors import ApiError, as_api_error
from serving.images import unknown_model
from serving.policy_files import safe_options
from serving.render import images_answer
from serving.state import ServerState


class TryAgain(Exception):  # noqa: N818
    """The line is not to blame: the engine cannot draw now."""


class LineRunner:
    """Draws lines as `POST /v1/images/generations` would, behind interactive requests."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def run(self, claim: Claim) -> tuple[Outcome, bytes]:
        """How the line ends, and its record. Raises TryAgain."""
        id = uuid.uuid4().hex
        try:
            body = parse(claim.body.encode())
            check_line(body, self._state.service.model.name)
            status, answer = 200, await self._draw(body, self._request(claim, body, id))
        except (ApiError, RequestError) as error:
            refusal = as_api_error(error)
            if refusal.status == 503:
                raise TryAgain(str(refusal)) from error
            status, answer = refusal.status, refusal.body
        except Exception as error:
            refusal = as_api_error(error)
            status, answer = refusal.status, refusal.body
        return ("completed" if status == 200 else "failed"), _record(claim, id, status, answer)

    def _request(self, claim: Claim, body: GenerationBody, id: str) -> ImageRequest:
        state = self._state
        state.require_healthy()
        options = safe_options(body.policy_options or {}, state.config.policy_folder)
        seed = claim.seed if body.seed is None else body.seed
        wanted = replace(body.wanted, policy_options=options, seed=seed)
        request = to_request(wanted, state.service.model, _policy(claim))
        return replace(request, priority=Priority.BATCH, id=id)

    async def _draw(self, body: GenerationBody, request: ImageRequest) -> dict[str, Any]:
        state = self._state
        metrics, tracer = state.metrics.batch, state.tracer
        await asyncio.to_thread(state.service.check, request)
        async with Drawing(state.service, request, metrics, tracer=tracer) as drawing:
            finished = await drawing.finished()
        answer = await images_answer(body, finished, no_urls)
        return answer.model_dump(mode="json", exclude_none=True)


def check_line(body: GenerationBody, model: str) -> None:
    """Raises ApiError (400, 404) for what a line cannot ask for, whoever draws it."""
    if body.model not in (None, model):
        raise unknown_model(body.model or "", model)
    if body.stream:
        message = "a line of a batch does not stream"
        raise ApiError(400, message, param="stream", code="invalid_value")
    if body.response_format == "url":
        message = "results of a batch carry the pictures themselves: use b64_json"
        raise ApiError(400, message, param="response_format", code="invalid_value")


def _policy(claim: Claim) -> PolicyChoice:
    """The default policy that was fixed when the batch was created."""
    try:
        defaults = decoded(claim.batch, "defaults")
        options = tuple((key, value) for key, value in defaults["options"])
        return PolicyChoice(defaults["policy"], defaults["sparsity"], options)
    except (CorruptRecord, KeyError, TypeError, ValueError) as error:
        message = "the stored defaults of this batch are damaged"
        raise ApiError(500, message, code="corrupt_record") from error


def no_urls(data: bytes) -> str:
    raise AssertionError("a line with response_format url was refused before")


def _record(claim: Claim, id: str, status: int, body: dict[str, Any]) -> bytes:
    record = {
        "id": f"batch_req_{id}",
        "custom_id": claim.custom_id,
        "response": {"status_code": status, "request_id": id, "body": body},
        "error": None,
    }
    return json.dumps(record).encode()
