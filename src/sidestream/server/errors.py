"""Failures as OpenAI error bodies, `{"error": {"message", "type", "param", "code"}}`, and as Anthropic's."""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from sidestream.errors import CallTimeout, ContextTooLong, EngineStopped, ModelNotFound, QueueFull, RequestError

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_MAX_MESSAGE_CHARS = 1500  # messages quote the client's values, which may be megabytes


class ApiError(Exception):
    """An error reply: HTTP status, OpenAI error fields, extra headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: text processes send their errors to the API process."""
        make = functools.partial(ApiError, kind=self.kind, param=self.param, code=self.code, headers=self.headers)
        return make, (self.status, str(self))

    def body(self) -> dict[str, Any]:
        """The JSON body. The message is cut to a bounded length."""
        return {"error": {"message": self._message(), "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The JSON body of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        details = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {"type": kind, "message": self._message(), **details}}

    def _message(self) -> str:
        message = str(self)
        return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "…"


class ClientGone(Exception):
    """The client disconnected before its reply was complete; no error is sent."""


def bad_request(message: str, param: str | None) -> ApiError:
    """An ApiError with status 400 that names the field at fault."""
    return ApiError(400, message, param=param)


def checked_request_id(text: str, field: str) -> str:
    """`text`, which is a valid request id: it becomes a header, and a word in the log. Raises ApiError."""
    if not _REQUEST_ID.fullmatch(text):
        message = f"{field} is {reprlib.repr(text)}: give 1 to 128 printable ASCII characters without spaces"
        raise bad_request(message, field)
    return text


def as_api_error(failure: Exception, *, request_id: str, retry_after_s: int) -> ApiError:
    """The reply to a failure. An unexpected failure becomes status 500, with the request's id in the log."""
    match failure:
        case ApiError():
            return failure
        case QueueFull():
            wait = {"Retry-After": str(retry_after_s)}
            return ApiError(429, str(failure), kind="rate_limit_error", code="rate_limit_exceeded", headers=wait)
        case ModelNotFound():
            return ApiError(404, str(failure), param=failure.param, code="model_not_found")
        case ContextTooLong():
            return ApiError(400, str(failure), param=failure.param, code="context_length_exceeded")
        case RequestError():
            return bad_request(str(failure), failure.param)
        case EngineStopped():
            return ApiError(
                503,
                str(failure) or "the engine is stopping: try again later",
                kind="server_error",
                code="engine_stopped",
            )
        case CallTimeout():
            return ApiError(504, str(failure), kind="server_error", code="timeout")
        case HTTPException():
            allowed = (failure.headers or {}).get("Allow")
            remedy = f": this path takes {allowed}" if allowed else ""
            return ApiError(failure.status_code, f"{failure.detail}{remedy}", headers=failure.headers)
        case _:
            return ApiError(
                500,
                f"internal error; the server's log has it under {request_id}",
                kind="server_error",
                code="internal_error",
            )
