"""Reads a request's body up to a bound, and parses it as strict JSON. `fields.py` checks the fields."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from sidestream.server.errors import ApiError, ClientGone, bad_request
from sidestream.server.options import ServerOptions


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """The whole body. Raises ApiError for a wrong content type (415), and for a body that is too long (413) or arrives
    too slowly (408).

    The size limit is enforced while the body is read, also for a chunked body. Raises ClientGone if the client
    disconnects.
    """
    kind = request.headers.get("content-type", "")
    # Without this check, any web page could post to a server on this machine: browsers send a CORS preflight before a
    # JSON body, but not before other types.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"content-type is {kind[:100]!r}: send application/json")
    if int(request.headers.get("content-length", 0)) > options.max_body_bytes:
        raise _too_long(options)
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > options.max_body_bytes:
                    raise _too_long(options)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {options.body_timeout_s} s: send it faster") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _too_long(options: ServerOptions) -> ApiError:
    return ApiError(
        413,
        f"the body exceeds {options.max_body_bytes} bytes: shorten it, or raise max_body_bytes",
        code="body_too_large",
    )


def parse_object(body: bytes) -> dict[str, Any]:
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
