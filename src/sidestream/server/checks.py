"""Checks of the objects in requests. Each of their fields is used, or accepted because its value has no effect, or
rejected with an error that names it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sidestream.server.errors import ApiError, bad_request
from sidestream.server.extras import OTHER_SERVERS
from sidestream_kv.config import unknown_name

_Checked = TypeVar("_Checked", bound=BaseModel)
_TYPING_ERROR = 0.85  # difflib's ratio, as of temprature and temperature (0.95) or promt and prompt (0.91)


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
