"""Every refusal in OpenAI's shape: {"error": {message, type, param, code}}, all four keys always.

A message names the field and says what is possible; it never repeats the body, and nothing of an
internal failure but the request id leaves the process.
"""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from engine.wanted import nearest, shorten
from scheduler.request import RequestError

log = logging.getLogger("bishop.server")

ROOT = Path(__file__).resolve().parents[1]
"""Where this is installed is nothing to clients: paths below it are told from here."""

INVALID = "invalid_request_error"
SERVER = "server_error"
LIMIT = "rate_limit_error"

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "string_too_long": "string_above_max_length",
    "greater_than_equal": "integer_below_min_value",
    "less_than_equal": "integer_above_max_value",
    "json_invalid": "invalid_json",
}


class ApiError(Exception):
    """An answer other than the one asked for, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        kind = SERVER if self.status >= 500 else LIMIT if self.status == 429 else INVALID
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        headers = None if self.headers is None else dict(self.headers)
        return JSONResponse(self.body, self.status, headers)


def engine_stopped() -> ApiError:
    return ApiError(503, "the engine has stopped; restart the server", code="engine_dead")


def no_replica() -> ApiError:
    headers = {"retry-after": "5"}
    message = "no replica is alive; they are being replaced: ask again"
    return ApiError(503, message, code="no_replica", headers=headers)


def server_stopping() -> ApiError:
    headers = {"retry-after": "5"}
    return ApiError(
        503, "the server is stopping; ask again", code="server_stopping", headers=headers
    )


def too_slow(seconds: float) -> ApiError:
    message = f"the request was given up: it took more than {seconds:g} s"
    return ApiError(504, message, code="request_timeout")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`; an unforeseen one is logged and told as 500."""
    match error:
        case ApiError():
            return error
        case RequestError():
            status = 404 if error.code == "model_not_found" else 400
            message = str(error).replace(f"{ROOT}/", "")
            return ApiError(status, message, param=error.param, code=error.code)
        case HTTPException():
            return _from_http(error)
        case RequestValidationError():
            return from_validation(error.errors(), ())
    log.error("unforeseen failure", exc_info=error)
    return ApiError(
        500, "the server failed on this request; its log has the reason", code="internal_error"
    )


def _from_http(error: HTTPException) -> ApiError:
    code = HTTPStatus(error.status_code).name.lower()
    messages = {
        404: "there is nothing at this address; see / for what there is",
        405: "this address does not take that method",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def invalid_body(error: ValidationError, fields: Sequence[str]) -> ApiError:
    """The 400 for a body that does not fit; `fields` are the names the body may have."""
    details = error.errors(include_input=False, include_url=False, include_context=True)
    return from_validation(details, fields)


def from_validation(details: Sequence[ErrorDetails], fields: Sequence[str]) -> ApiError:
    first = details[0]
    param = _param(first["loc"])
    code = _CODES.get(first["type"], "invalid_value")
    return ApiError(400, _say(first, param, fields), param=param, code=code)


def _param(loc: tuple[int | str, ...]) -> str | None:
    """The field of an error; of `policy_options` also the key (pydantic appends types to it)."""
    names = [str(part) for part in loc[: 2 if loc and loc[0] == "policy_options" else 1]]
    return shorten(".".join(names)) if names else None


def _say(error: ErrorDetails, param: str | None, fields: Sequence[str]) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown field {param!r}{nearest(param or '', fields)}"
    if error["type"] == "missing":
        return f"the field {param!r} is required"
    if param is None:
        return f"the body must be a JSON object: {error['msg']}"
    if param.startswith("policy_options.") and error["type"].endswith("_type"):
        return f"{param} must be a number, a boolean or a string"
    return f"{param}: {error['msg'][:1].lower()}{error['msg'][1:]}"


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return as_api_error(error).response


def install(app: FastAPI) -> None:
    """Let every foreseen exception of `app` end as an error of this shape."""
    for kind in (ApiError, RequestError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer)
