"""The outermost layer of a request: its id, the token check, every failure turned into a reply, one log line at its end."""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestream.server.errors import ApiError, ClientGone, as_api_error
from sidestream.server.options import ServerOptions
from sidestream.server.replies import Usage

log = logging.getLogger("sidestream.server")

_OPEN_PATHS = ("/health",)
_QUIET_PATHS = ("/health", "/metrics")  # polled every few seconds: their lines would bury the others
_GONE = 499  # what proxies log for a client that left; never sent


@dataclass(slots=True)
class Record:
    """What is known of one request, for its log line. Written by the request's task only."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    usage: Usage = field(default_factory=Usage)
    status: int = 0
    outcome: str = "ok"

    def token_came(self) -> None:
        """Note the time of the first one."""
        if self.first_token is None:
            self.first_token = time.monotonic()


def record_of(scope: Scope) -> Record:
    """The record that the edge put into the request's scope."""
    record: Record = scope["sidestream.record"]
    return record


class Edge:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, *, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._credential = None if options.api_key is None else options.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing but a cancellation comes out of here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["sidestream.record"] = Record(f"req-{uuid.uuid4().hex}")

        async def tracked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            self._authorise(scope)
            await self._app(scope, receive, tracked)
        except ClientGone:
            record.outcome, record.status = "client gone", record.status or _GONE
        except Exception as failure:
            await self._fail(failure, record, scope, receive, tracked)
        except BaseException:
            record.outcome = "cancelled"
            raise
        finally:
            _log_end(record, scope)

    def _authorise(self, scope: Scope) -> None:
        if self._credential is None or scope["path"] in _OPEN_PATHS:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # compare_digest takes as long for a nearly right token as for a wrong one
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._credential):
            message = "missing or wrong API key: send the header Authorization: Bearer <key>"
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _fail(self, failure: Exception, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply with the failure: as an HTTP error, or, once a stream has begun, as its last event."""
        error = as_api_error(failure, request_id=record.request_id, retry_after_s=self._options.retry_after_s)
        record.outcome = error.code or error.kind
        if error.status == 500:
            log.error("%s failed: %s", record.request_id, failure, exc_info=failure)
        if not record.status:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
        else:
            event = b"data: " + json.dumps(error.body(), ensure_ascii=False).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": False})


def _log_end(record: Record, scope: Scope) -> None:
    now = time.monotonic()
    ttft = "-" if record.first_token is None else f"{record.first_token - record.started:.3f}s"
    log.log(
        logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO,
        "%s %s %s status=%d outcome=%s prompt_tokens=%d output_tokens=%d cached_tokens=%d ttft=%s duration=%.3fs",
        record.request_id,
        scope["method"],
        scope.get("raw_path", b"")[:200].decode("latin-1"),  # still percent-encoded: a path cannot forge a line
        record.status,
        record.outcome.replace(" ", "_"),
        record.usage.prompt_tokens,
        record.usage.output_tokens,
        record.usage.cached_tokens,
        ttft,
        now - record.started,
    )
