"""ASGI middleware around every request: its id, the API key, error replies, and one log line at its end. Also cancels
the request's task when its client disconnects or the server stops. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestream.config import SamplingParams
from sidestream.errors import EngineStopped
from sidestream.server.body import JsonResponse, to_json
from sidestream.server.errors import ApiError, ClientGone, as_api_error, checked_request_id
from sidestream.server.options import ServerOptions
from sidestream.server.rate_limits import Grant, RateLimits
from sidestream.server.responses import Usage
from sidestream.types import Delta

log = logging.getLogger("sidestream.server")

# Paths without an API key: health checks of load balancers have none, nor have the pages, which ask for it.
# /version needs the key, because strangers could look up known flaws of the version.
HEALTH_PATHS = ("/health", "/healthz", "/livez", "/readyz", "/ping")
DOCS_PATH = "/docs"
PAGE_PATHS = ("/", "/page.js", "/page.css")
QUIET_PATHS = (*HEALTH_PATHS, *PAGE_PATHS, "/metrics", "/load")  # polled every few seconds: logged at DEBUG
_ANTHROPIC_PATH = "/v1/messages"  # errors of this path and below have Anthropic's format
_ADMIN = "sidestream.admin"  # in the scope: whether the request has the admin key; None: the server has none
INTERNAL_GRANT = "sidestream.internal_grant"
"""In the scope of a request that the server sends to itself: its grant. Clients cannot set it."""
_GONE = 499  # nginx logs this status for a client that disconnected; it is never sent


@dataclass(slots=True)
class RequestRecord:
    """Values for the log line of one request. Written by the request's task only.

    explains      one of `LEVELS`: how much the explanation of the cache may tell
    explanations  the field `cache_explanation` of the reply, once it is known; empty: there is none
    error_event   makes the end of a stream that fails; None: as of other streams of OpenAI's and Anthropic's APIs
    grant         of the key's limits; None: the request has no key of the file of keys
    params        of the call, once it is valid
    queue_s       longest time of a sample from its arrival in the engine to its first step, once that is known
    """

    request_id: str
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    usage: Usage = field(default_factory=Usage)
    explains: str = "off"
    explanations: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    outcome: str = "ok"
    error_event: Callable[[ApiError], bytes] | None = None
    grant: Grant | None = None
    params: SamplingParams | None = None
    finish_reasons: list[str] = field(default_factory=list)
    queue_s: float | None = None

    @property
    def owner(self) -> str:
        """Name of the request's key; empty: it has no key of the file of keys."""
        return "" if self.grant is None else self.grant.key.name

    def count(self, delta: Delta, *, is_first: bool) -> None:
        """Count a delta of the reply, and the prompt with the first one of each prompt."""
        if is_first:
            self.usage.add_prompt(delta)
        self.usage.output_tokens += len(delta.token_ids)
        if delta.token_ids and self.first_token is None:
            self.first_token = time.monotonic()


def request_record(scope: Scope) -> RequestRecord:
    """The record that RequestMiddleware put into the request's scope."""
    record: RequestRecord = scope["sidestream.record"]
    return record


class RootPathMiddleware:
    """Sets ASGI's `root_path`, for a proxy that serves the API below a prefix.

    Some proxies strip the prefix from the path and others do not; the application sees the full path in both cases.
    """

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with the full path."""
        if self._prefix and scope["type"] == "http":
            path = scope["path"]
            path = "/" if path == self._prefix else path
            full = path if path.startswith(self._prefix + "/") else self._prefix + path
            scope = {**scope, "path": full, "root_path": self._prefix}
        await self._app(scope, receive, send)


def route_of(scope: Scope) -> str:
    """The path without the proxy's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RequestMiddleware:
    """Gives the request its id and record, checks the API key, and replies to every failure.

    limits   of the keys in a file; None: there is no such file
    on_end   functions that get the record and scope of each request that has ended
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        options: ServerOptions,
        limits: RateLimits | None = None,
        on_end: Sequence[Callable[[RequestRecord, Scope], None]] = (),
    ) -> None:
        self._app = app
        self._options = options
        self._limits = limits
        self._on_end = on_end
        self._api_key, self._admin_key = _credential(options.api_key), _credential(options.admin_key)
        self._open_paths = (*HEALTH_PATHS, DOCS_PATH, *(PAGE_PATHS if options.page else ()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises only CancelledError."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope["sidestream.record"] = RequestRecord(f"req-{uuid.uuid4().hex}")

        async def send_tracked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if record.grant is not None:
                    headers.update(record.grant.headers)
                if self._options.replica:
                    headers["x-sidestream-replica"] = self._options.replica
            await send(message)

        try:
            if "x-request-id" in (headers := Headers(scope=scope)):
                record.request_id = checked_request_id(headers["x-request-id"], "x-request-id")
            record.grant = self._authorise(scope) if INTERNAL_GRANT not in scope else scope[INTERNAL_GRANT]
            await self._app(scope, receive, send_tracked)
        except ClientGone:
            record.outcome, record.status = "client gone", record.status or _GONE
        except Exception as failure:
            await self._fail(failure, record, scope, receive, send_tracked)
        except BaseException:
            record.outcome = "cancelled"
            raise
        finally:
            if record.grant is not None:
                record.grant.end(record.usage.prompt_tokens + record.usage.output_tokens)
            _log_request(record, scope)
            for tell in self._on_end:
                tell(record, scope)

    def _authorise(self, scope: Scope) -> Grant | None:
        """Raise ApiError unless the request has an API key or the admin key, or the path needs none. Records for
        `require_admin` whether it has the admin key. The result is the grant of a key in the file of keys.
        """
        headers = Headers(scope=scope)
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), credential if scheme.lower() == "bearer" else ""]
        admin = None if self._admin_key is None else _is_among(self._admin_key, given)
        scope[_ADMIN] = admin
        if (
            admin
            or (self._api_key is None and self._limits is None)
            or route_of(scope) in self._open_paths
            or (self._api_key is not None and _is_among(self._api_key, given))
        ):
            return None
        if self._limits is not None:
            grant = self._limits.admit(given, route_of(scope), free=scope["method"] in ("GET", "HEAD"))
            if grant is not None:
                return grant
        raise _wrong_key("API key")

    async def _fail(
        self, failure: Exception, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the failure as an HTTP error or, if a stream has begun, as its last event."""
        error = as_api_error(failure, request_id=record.request_id, retry_after_s=self._options.retry_after_s)
        record.outcome = error.code or error.kind
        if error.status == 500:
            log.error("%s failed: %s", record.request_id, failure, exc_info=failure)
        is_anthropic = route_of(scope).startswith(_ANTHROPIC_PATH)
        body = error.anthropic_body() if is_anthropic else error.body()
        if not record.status:
            await JsonResponse(body, error.status, error.headers)(scope, receive, send)
        else:
            event = (b"event: error\n" if is_anthropic else b"") + b"data: " + to_json(body) + b"\n\n"
            event = event if record.error_event is None else record.error_event(error)
            await send({"type": "http.response.body", "body": event, "more_body": False})


def _credential(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


def _is_among(key: bytes, given: Iterable[str]) -> bool:
    """Whether a client gave the key. Compares in constant time, so that the duration reveals nothing about the key."""
    return any(hmac.compare_digest(one.strip().encode(), key) for one in given)


def _wrong_key(name: str) -> ApiError:
    message = f"missing or wrong {name}: send the header Authorization: Bearer <key> or X-Api-Key: <key>"
    return ApiError(
        401, message, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )


def has_admin_key(scope: Scope) -> bool:
    """Whether the request has the admin key."""
    return bool(scope.get(_ADMIN))


def require_admin(scope: Scope) -> None:
    """Raise ApiError unless the request has the admin key."""
    has_key: bool | None = scope[_ADMIN]
    if has_key is None:
        message = "operations are off: start the server with --admin-key (in Python admin_key)"
        raise ApiError(403, message, kind="permission_error", code="operations_off")
    if not has_key:
        raise _wrong_key("admin key")


def _log_request(record: RequestRecord, scope: Scope) -> None:
    now = time.monotonic()
    usage, ttft_s = record.usage, None if record.first_token is None else record.first_token - record.started
    fields = {
        "request_id": record.request_id,
        "method": scope["method"],
        # percent-encoded: a path cannot forge a log line
        "path": scope.get("raw_path", b"")[:200].decode("latin-1"),
        "status": record.status,
        "outcome": record.outcome.replace(" ", "_"),
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "ttft_s": ttft_s,
        "duration_s": now - record.started,
    }
    log.log(
        logging.DEBUG if route_of(scope) in QUIET_PATHS else logging.INFO,
        "%s %s %s status=%d outcome=%s prompt_tokens=%d output_tokens=%d cached_tokens=%d ttft=%s duration=%.3fs",
        *list(fields.values())[:8],
        "-" if ttft_s is None else f"{ttft_s:.3f}s",
        now - record.started,
        extra={"fields": fields},
    )


_DISCONNECT = "sidestream.disconnect"


class CallbackEvent:
    """An event that calls its callbacks when it is set. It can be set only once."""

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: dict[Callable[[], None], None] = {}

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Call the callbacks. Idempotent."""
        self._is_set = True
        callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def add(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the event is set; at once if it is set already."""
        if self._is_set:
            callback()
        else:
            self._callbacks[callback] = None

    def discard(self, callback: Callable[[], None]) -> None:
        """Do not call `callback` any more."""
        self._callbacks.pop(callback, None)


def set_disconnect_event(scope: Scope, disconnected: CallbackEvent) -> None:
    """Put the event `disconnected` into a request's scope. The connection sets the event when it ends."""
    scope[_DISCONNECT] = disconnected


class CancelOnDisconnect:
    """An asynchronous context manager that cancels the code inside it when the client disconnects or the server stops.
    It then raises ClientGone or EngineStopped.

    Enter it only after the HTTP request was read completely.
    """

    def __init__(self, scope: Scope, stopping: CallbackEvent) -> None:
        # Under another ASGI server, the scope has no such event, and disconnects are not noticed.
        self._disconnected: CallbackEvent = scope.get(_DISCONNECT) or CallbackEvent()
        self._stopping = stopping
        self._reason: Exception | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._disconnected.add(self._on_disconnect)
        self._stopping.add(self._on_stop)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._disconnected.discard(self._on_disconnect)
        self._stopping.discard(self._on_stop)
        if self._reason is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None

    def _on_disconnect(self) -> None:
        self._cancel(ClientGone())

    def _on_stop(self) -> None:
        self._cancel(EngineStopped("the server is shutting down: try again later"))

    def _cancel(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()
