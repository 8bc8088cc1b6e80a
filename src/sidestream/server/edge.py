"""The outermost layer of a request: its id, the token check, every failure turned into a reply, one log line at its
end.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestream.server.encode import JsonReply, to_json
from sidestream.server.errors import ApiError, ClientGone, as_api_error
from sidestream.server.options import ServerOptions
from sidestream.server.replies import Usage

log = logging.getLogger("sidestream.server")

# What load balancers ask before they have a key. Not /version: it would tell strangers which flaws to try.
_OPEN_PATHS = ("/health", "/ping")
_QUIET_PATHS = ("/health", "/ping", "/metrics")  # polled every few seconds: their lines would bury the others
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


class RootPath:
    """ASGI middleware for a proxy that serves the API below a prefix: requests are the same with and without the
    prefix.

    Proxies differ: some strip it, others do not. Either way the application sees ASGI's form, the whole path and
    `root_path`.
    """

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if self._prefix and scope["type"] == "http":
            path = scope["path"]
            whole = path if path == self._prefix or path.startswith(self._prefix + "/") else self._prefix + path
            scope = {**scope, "path": whole, "root_path": self._prefix}
        await self._app(scope, receive, send)


def _route(scope: Scope) -> str:
    """The path as the routes know it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


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
        if self._credential is None or _route(scope) in _OPEN_PATHS:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # compare_digest takes as long for a nearly right token as for a wrong one
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._credential):
            message = "missing or wrong API key: send the header Authorization: Bearer <key>"
            raise ApiError(
                401,
                message,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _fail(self, failure: Exception, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply with the failure: as an HTTP error, or, once a stream has begun, as its last event."""
        error = as_api_error(failure, request_id=record.request_id, retry_after_s=self._options.retry_after_s)
        record.outcome = error.code or error.kind
        if error.status == 500:
            log.error("%s failed: %s", record.request_id, failure, exc_info=failure)
        if not record.status:
            await JsonReply(error.body(), error.status, error.headers)(scope, receive, send)
        else:
            event = b"data: " + to_json(error.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": False})


def _log_end(record: Record, scope: Scope) -> None:
    now = time.monotonic()
    ttft = "-" if record.first_token is None else f"{record.first_token - record.started:.3f}s"
    log.log(
        logging.DEBUG if _route(scope) in _QUIET_PATHS else logging.INFO,
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
