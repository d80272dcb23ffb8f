"""Errors of a request, in the shape of the API that was asked."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pykernels.errors import PykernelsError

from .frames import json_bytes
from .location import path_of

LOG = logging.getLogger("pykernels.server")

ANTHROPIC = "/v1/messages"
"""Paths of Anthropic's API begin so; all others get errors in OpenAI's shape."""

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class ApiError(HTTPException):
    """A request that is refused, or that failed.

    Args:
        status: of HTTP.
        message: one sentence or two for whoever wrote the request.
        param: the field that is at fault.
        code: OpenAI's word for it, which its clients look at.
        retry_after: seconds after which it may succeed.
        details: Anthropic's, which its clients look at.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.param, self.code, self.details = param, code, details


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param, code)


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an answer, and of an event in a stream."""
    status, message = error.status_code, str(error.detail)
    if path.startswith(ANTHROPIC):
        plain = "invalid_request_error" if status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(status, plain)
        told: dict[str, Any] = {"type": kind, "message": message}
        if error.details is not None:
            told["details"] = dict(error.details)
        return {"type": "error", "error": told}
    plain = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": message,
            "type": _OPENAI_TYPES.get(status, plain),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(path: str, error: ApiError) -> Response:
    """The whole answer."""
    return Response(
        json_bytes(error_body(path, error)),
        error.status_code,
        dict(error.headers or {}),
        "application/json",
    )


def as_api_error(error: BaseException) -> ApiError:
    """Whatever ended a request while it ran. One that is no refusal is logged."""
    if isinstance(error, ApiError):
        return error
    known = isinstance(error, PykernelsError)
    LOG.error("a request failed: %s: %s", type(error).__name__, error, exc_info=not known)
    if isinstance(error, PykernelsError):
        return of_ours(error, 500)
    return ApiError(500, "The server failed on this request. Its log says more.")


def add_handlers(app: FastAPI) -> None:
    """Makes every refusal of an app one of ours."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(request.url.path, error)

    @app.exception_handler(HTTPException)
    async def of_starlette(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{HTTPStatus(error.status_code).phrase}: {request.method} on this path"
        told = ApiError(error.status_code, message)
        told.headers = error.headers
        return error_response(request.url.path, told)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(request.url.path, of_validation(error.errors(), error.body))

    @app.exception_handler(PykernelsError)
    async def ours(request: Request, error: PykernelsError) -> Response:
        return error_response(request.url.path, of_ours(error))


def of_validation(errors: Sequence[Any], body: object = None) -> ApiError:
    """Pydantic's findings in one line; the one that says most counts.

    Args:
        body: what was validated.
    """
    # Where a value may be one of several types, the type that it has is meant.
    first = max(errors, key=lambda error: (not _of_another_type(error), len(error["loc"])))
    kind, context = first["type"], first.get("ctx") or {}
    param = path_of(first["loc"], body, named=kind in ("extra_forbidden", "missing"))
    if kind in ("json_invalid", "json_type"):
        return bad_request(f"The body is no JSON: {context.get('error', first['msg'])}.")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown field: {param}.", param, "unknown_parameter")
    if kind == "missing":
        name = param or "a JSON body"
        return bad_request(f"Missing field: {name}.", param, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if kind == "union_tag_invalid":
        tags = context["expected_tags"].replace(", 'served'", "")
        message = f"{str(context['tag'])[:60]} is none of {tags}"
    elif kind == "union_tag_not_found":
        message = "a type or a role is missing"
    elif kind == "too_long":
        message = f"{context['actual_length']} are given, {context['max_length']} may be"
    text = f"{param}: {message}." if param else f"{message}."
    return ApiError(400, text, param, "invalid_value", details=context.get("details"))


def _of_another_type(error: Any) -> bool:
    kind: str = error["type"]
    is_word = not isinstance(error.get("input"), (dict, list))
    return kind.endswith("_type") or (kind == "literal_error" and not is_word)


def of_ours(error: PykernelsError, status: int = 400) -> ApiError:
    """What the engine or the tokenizer refuses, as an answer to the client."""
    named = _FIELD.search(error.cause)
    return ApiError(status, str(error), named[0] if named and status < 500 else None)


_FIELD = re.compile(
    r"\b(temperature|top_[kp]|min_p|repetition_penalty|(presence|frequency)_penalty|logit_bias"
    r"|logprobs|max_tokens|min_tokens|stop_token_ids|stop(?= strings)|seed|response_format"
    r"|tool_choice|tools(?= has)|prompt|pykernels)\b"
)
"""Fields of requests that the engine's errors name."""
