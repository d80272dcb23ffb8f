"""Errors of a request, in the shape of the API that was asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pykernels.errors import PykernelsError

from .frames import json_bytes

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
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param, code)


def of_ours(error: PykernelsError, status: int = 400) -> ApiError:
    """What the engine or the tokenizer refuses, as an answer to the client."""
    return ApiError(status, str(error))


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an answer, and of an event in a stream."""
    status, message = error.status_code, str(error.detail)
    if path.startswith(ANTHROPIC):
        plain = "invalid_request_error" if status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(status, plain)
        return {"type": "error", "error": {"type": kind, "message": message}}
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
    LOG.error("a request failed: %s: %s", type(error).__name__, error)
    if isinstance(error, PykernelsError):
        return of_ours(error, 500)
    return ApiError(500, "The server failed on this request. Its log says more.")


def add_handlers(app: FastAPI) -> None:
    """Makes every error of an app one of ours."""

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
        return error_response(request.url.path, of_validation(error.errors()))

    @app.exception_handler(PykernelsError)
    async def ours(request: Request, error: PykernelsError) -> Response:
        return error_response(request.url.path, of_ours(error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, as_api_error(error))


def of_validation(errors: Sequence[Any]) -> ApiError:
    """Pydantic's findings in one line; the first is the one that counts."""
    first = max(errors, key=lambda error: len(error["loc"]))
    param = _path(first["loc"])
    kind, context = first["type"], first.get("ctx") or {}
    if kind in ("json_invalid", "json_type"):
        return bad_request(f"The body is no JSON: {context.get('error', first['msg'])}.")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown field: {param}.", param, "unknown_parameter")
    if kind == "missing":
        name = param or "a JSON body"
        return bad_request(f"Missing field: {name}.", param, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if kind == "union_tag_invalid":
        message = f"{str(context['tag'])[:60]} is none of {context['expected_tags']}"
    elif kind == "union_tag_not_found":
        message = "a type or a role is missing"
    return bad_request(f"{param}: {message}." if param else f"{message}.", param, "invalid_value")


_NO_FIELDS = ("body", "query", "path")
_TAGS = ("function-", "list[", "str", "constrained-", "tagged-union", "literal[", "dict[")


def _path(location: Sequence[str | int]) -> str | None:
    """`messages[0].content` of a location, without pydantic's names of alternatives."""
    path, tagged = "", False
    for i, part in enumerate(location):
        if isinstance(part, int):
            path, tagged = f"{path}[{part}]", False
        elif (i == 0 and part in _NO_FIELDS) or part.startswith(_TAGS):
            continue
        elif path.endswith("]") and not tagged and part in _UNION_TAGS:
            tagged = True
        else:
            path += f".{part}" if path else part
    return path or None


_UNION_TAGS = {
    *("system", "developer", "user", "assistant", "tool", "function", "served"),
    *("text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    *("message", "reasoning", "function_call", "custom_tool_call", "custom", "namespace"),
    *("function_call_output", "custom_tool_call_output", "tool_reference"),
    *("input_text", "output_text", "input_image", "input_file", "refusal", "summary_text"),
    "reasoning_text",
}
"""Roles and types stand in locations behind an index, because they choose the model there."""
