"""Bodies of HTTP messages. Reads the bodies of requests within bounds, parses them as strict JSON, and
checks the objects in them: each of their fields is used, or accepted because its value has no effect, or rejected with
an error that names it. Writes the bodies of replies, events and errors as compact JSON in UTF-8.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import reprlib
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sidestream.errors import ContextTooLong
from sidestream.server.errors import ApiError, ClientGone, bad_request
from sidestream.server.extras import OTHER_SERVERS
from sidestream.server.options import ServerOptions
from sidestream.server.text_work import SHORT_BODY_BYTES
from sidestream_kv.config import unknown_name


class Strict(BaseModel):
    """Fields of a request, whose values are not converted; an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Checked = TypeVar("_Checked", bound=BaseModel)
_TYPING_ERROR = 0.85  # difflib's ratio, as of temprature and temperature (0.95) or promt and prompt (0.91)

# The default bound of a body: room for fields and a batch of prompts, and for each token of the context. A token takes
# about 5 bytes as text or as an id, and up to 12 where a client escapes all but ASCII.
_BODY_BYTES, _TOKEN_BYTES = 1 << 20, 64
_BUFFERED_BYTES = 64 << 20

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # without it, nginx buffers the events
]
"""The headers of server-sent events."""


@dataclass(frozen=True, slots=True)
class Served:
    """Constants of the server against which requests are checked.

    max_choices    maximum number of prompts times n
    max_model_len  maximum number of tokens of prompt and output together
    tool_format, reasoning_format   formats of the model's answers; None: unknown, or switched off
    always_reasoning   reasoning is split from every chat answer, not only if the request has tools or reasoning options
    block_tokens   tokens of a block of the KV cache
    has_adapters   the engine may have LoRA adapters, which are named as models
    """

    model_name: str
    max_choices: int
    max_model_len: int
    tool_format: str | None = None
    reasoning_format: str | None = None
    always_reasoning: bool = False
    block_tokens: int = 1
    has_adapters: bool = False

    def check_length(self, items: Sequence[Any], param: str, unit: str) -> None:
        """Raise ContextTooLong for more items than the model takes tokens."""
        if len(items) > self.max_model_len:
            raise ContextTooLong(
                f"{param} has {len(items)} {unit}, the model takes {self.max_model_len} tokens: shorten it", param=param
            )

    def adapter_of(self, name: str | None) -> str:
        """The LoRA adapter that a request means by its model's name; empty: the served model itself. Raises ApiError
        with status 404 if this server serves no such model. The engine knows which adapters are loaded.
        """
        if name is None or name == self.model_name:
            return ""
        if not self.has_adapters:
            message = f"the model {name[:100]!r} does not exist: this server serves {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name


class BodyReader:
    """Reads bodies, within a bound for each of them and one for all of them together. Used on one event loop.

    A body counts until its request is parsed. Bodies over `SHORT_BODY_BYTES` may fill three quarters of the bound, so
    that short ones are read beside any number of long ones.

    max_body_bytes   bound of one body
    """

    def __init__(self, options: ServerOptions, max_model_len: int) -> None:
        self.max_body_bytes = options.max_body_bytes or _BODY_BYTES + _TOKEN_BYTES * max_model_len
        self._max_buffered = options.max_buffered_bytes or max(_BUFFERED_BYTES, 4 * self.max_body_bytes)
        self._timeout_s = options.body_timeout_s
        self._buffered = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body, which counts as buffered inside the context. Raises ApiError for a wrong content type and for
        compression (415), for a body that is too long (413) or arrives too slowly (408), and if too many bytes are
        buffered (503).

        The bounds are enforced while the body is read, also for a chunked body. Raises ClientGone if the client
        disconnects.
        """
        kind = request.headers.get("content-type", "")
        # Without this check, any web page could post to a server on this machine: browsers send a CORS preflight before
        # a JSON body, but not before other types.
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, f"content-type is {kind[:100]!r}: send application/json")
        if (coding := request.headers.get("content-encoding", "identity")).strip().lower() != "identity":
            raise ApiError(415, f"content-encoding is {coding[:100]!r}: send the body uncompressed")
        if int(request.headers.get("content-length", 0)) > self.max_body_bytes:
            raise self._too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in request.stream():
                    self._buffered += len(piece)
                    body += piece
                    self._check(len(body))
            yield body
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._timeout_s} s: send it faster") from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._buffered -= len(body)
            # Now, because tracebacks of errors keep the object; a text process may still be reading the buffer.
            with contextlib.suppress(BufferError):
                body.clear()

    @contextlib.contextmanager
    def holding(self, body: bytearray) -> Iterator[None]:
        """Count another body inside the context. Raises ApiError as `read` does."""
        self._buffered += len(body)
        try:
            self._check(len(body))
            yield
        finally:
            self._buffered -= len(body)

    def _check(self, size: int) -> None:
        if size > self.max_body_bytes:
            raise self._too_long()
        bound = self._max_buffered if size <= SHORT_BODY_BYTES else self._max_buffered * 3 // 4
        if self._buffered > bound:
            raise ApiError(
                503,
                f"this server holds {self._buffered} bytes of request bodies, the bound is {bound}: "
                "try again later, or raise max_buffered_bytes",
                kind="server_error",
                code="too_many_bodies",
                headers={"Retry-After": "1"},
            )

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body exceeds {self.max_body_bytes} bytes: shorten it, or raise max_body_bytes",
            code="body_too_large",
        )


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError with status 400 for encodings other than UTF-8, NaN, infinities,
    duplicate names and lone surrogates.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise bad_request(f"the body is not UTF-8: invalid byte at position {failure.start}", None) from None
    value = parse_json(text, None)
    if not isinstance(value, dict):
        raise bad_request(f"the body is a JSON {_kind(value)}: send an object", None)
    return value


def parse_json(text: str, param: str | None) -> Any:
    """The value of a JSON text. Raises ApiError with status 400 if the text is not strict JSON.

    param   the field that contains the text, for the error; None: the text is the body
    """
    where = param or "the body"
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
        if "\\u" in text:  # an escape may spell a lone surrogate, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(
            f"{where} holds half of a surrogate pair (\\ud800 to \\udfff): no text can contain it", param
        ) from None
    except RecursionError:
        raise bad_request(f"{where} is nested too deeply: no field needs more than a few levels", param) from None
    except ValueError as failure:
        raise bad_request(f"{where} is not valid JSON: {failure}", param) from None
    return value


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{digits[:40]} is beyond the range of a double")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:100]!r} is given twice in one object")
    return value


def _kind(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


_ENCODER = msgspec.json.Encoder()

# Characters that JSON allows, and that end a line for `str.splitlines` and for clients that read streams by it (httpx).
_LINE_ENDS = [(end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029"]


def checked(
    kind: type[_Checked], fields: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...] | None], where: str = ""
) -> _Checked:
    """`fields` as a valid object of `kind`. Raises ApiError with status 400, naming the field at fault.

    idle    fields without effect, with their accepted values besides null; None: all values
    where   the place of the object in the request, such as `messages[0]`
    """
    return model_of(kind, without_idle(fields, idle, known=kind.model_fields, where=where and f"{where}."), where)


def model_of(kind: type[_Checked], fields: Mapping[str, Any], where: str = "") -> _Checked:
    """`fields`, none of which is null or without effect, as `checked` returns and refuses them."""
    try:
        return kind.model_validate(fields)
    except ValidationError as failure:
        raise _first_fault(failure, where) from None


def without_idle(
    body: Mapping[str, Any], idle: Mapping[str, tuple[Any, ...] | None], *, known: Collection[str], where: str
) -> dict[str, Any]:
    """`body` without nulls and without fields whose value has no effect. Raises ApiError with status 400 for unknown or
    unsupported fields.
    """
    fields = {}
    for name, value in body.items():
        path = f"{where}{name[:64]}"
        if name in known:
            if value is not None:
                fields[name] = value
        elif name not in idle:
            raise bad_request(_unknown_field(name, path, [f"{where}{other}" for other in known]), path)
        elif not _asks_nothing(value, idle[name]):
            raise bad_request(f"{path} is {short(value)}, which this server does not support: leave it out", path)
    return fields


def short(value: Any) -> str:
    """A short text for a client's value, however long or deep the value is; null is written as in JSON."""
    return "null" if value is None else reprlib.repr(value)


def _unknown_field(name: str, path: str, known: Sequence[str]) -> str:
    """The message for an unknown field. It suggests a name only for a typing error: less similar names have other
    meanings.
    """
    if name in OTHER_SERVERS:
        return f"no field {path}: {OTHER_SERVERS[name]}"
    if difflib.get_close_matches(path, known, n=1, cutoff=_TYPING_ERROR):
        return unknown_name("field", path, known)
    return f"no field {path}: leave it out"


def _asks_nothing(value: Any, idle: tuple[Any, ...] | None) -> bool:
    if value is None or idle is None:
        return True
    return any(type(value) is type(nothing) and value == nothing for nothing in idle)  # type, too: True == 1


def _first_fault(failure: ValidationError, param: str = "") -> ApiError:
    fault = failure.errors(include_url=False, include_context=False)[0]
    for step in fault["loc"]:
        param += f"[{step}]" if isinstance(step, int) else f".{step[:64]}" if param else step
    if fault["type"] == "missing":
        return bad_request(f"{param} is missing: it is required", param)
    if fault["type"] == "extra_forbidden":
        return bad_request(f"no field {param}", param)
    reason = fault["msg"][:1].lower() + fault["msg"][1:]
    return bad_request(f"{param} is {short(fault['input'])}: {reason}", param)


def to_json(value: Any) -> bytes:
    """The JSON text of `value`, one line by every reader's rules. `value` must not contain NaN or an infinity, because
    the encoder would write null.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    text = _ENCODER.encode(value)
    for end, escape in _LINE_ENDS:
        text = text.replace(end, escape)
    return text


def event_lines(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Server-sent events that are named by their types."""
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + to_json(event) + b"\n\n" for event in events)


class JsonResponse(Response):
    """A response whose content is encoded with `to_json`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The encoded body."""
        return to_json(content)
