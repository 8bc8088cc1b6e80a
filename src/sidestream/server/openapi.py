"""`/openapi.json`, made from the routes and from the models that check requests, and `/docs`, a page that shows it.

Used on the event loop only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from sidestream.config import SAMPLING_OPTIONS
from sidestream.server import anthropic_messages, cache_prefixes, cache_sessions, fields, openai_responses, operations
from sidestream.server.body import JsonResponse
from sidestream.server.fields import Body
from sidestream.server.middleware import DOCS_PATH, HEALTH_PATHS, PAGE_PATHS
from sidestream.server.responses import Json
from sidestream.version import VERSION

_TEXT = {"type": "string"}
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_CONTENT: Json = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}


def _messages(*roles: str) -> Json:
    message = {"role": {"enum": list(roles)}, "content": _CONTENT}
    return {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "properties": message, "required": ["role", "content"]},
    }


# Fields that functions check instead of pydantic, by name; and fields that pydantic checks only in part, by the title
# of the model and name.
_CHECKED_BY_HAND: dict[str, Json] = {
    "messages": _messages("user", "assistant", "system", "developer", "tool"),
    "_Request.messages": _messages("user", "assistant"),
    "tools": {"type": "array", "items": {"type": "object"}, "maxItems": 1024},
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]},
    "input": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
    "prompt": {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1},
            _TOKENS,
            {"type": "array", "items": _TOKENS, "minItems": 1},
        ]
    },
    "_Chat.stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "_Text.stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "system": _CONTENT,
    "tokens": _TOKENS,
}
_MODULES = (fields, anthropic_messages, openai_responses, cache_prefixes, cache_sessions, operations)
_BODIES = {path: body for module in _MODULES for path, body in module.BODIES.items()}
_QUERY: dict[str, Json] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": cache_prefixes.MAX_LIMIT},
    "tier": _TEXT,
    "timeout_s": {"type": "number", "minimum": 0, "maximum": operations.MAX_TIMEOUT_S},
}
_QUERY_OF = {
    "/v1/cache/prefixes": ("limit",),
    "/reset_prefix_cache": ("tier", "timeout_s"),
    **dict.fromkeys(("/flush", "/update_weights_from_disk", "/v1/load_lora_adapter"), ("timeout_s",)),
}
_CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


def document_routes(model: str, known_paths: Callable[[Starlette], list[tuple[str, str]]]) -> list[Route]:
    """The routes of the document and of its page.

    model        the served model's name
    known_paths  path and method of all endpoints of an application
    """

    async def document(request: Request) -> Response:
        body = openapi(model, known_paths(request.app))
        return JsonResponse(body | {"servers": [{"url": request.scope.get("root_path") or "/"}]})

    async def page(request: Request) -> Response:
        return HTMLResponse(_page(), headers={"content-security-policy": _CSP})

    return [Route("/openapi.json", document), Route(DOCS_PATH, page)]


def openapi(model: str, known_paths: list[tuple[str, str]]) -> Json:
    """The OpenAPI document of these endpoints."""
    paths: dict[str, Json] = {}
    for path, method in known_paths:
        paths.setdefault(path, {})[method.lower()] = _endpoint(path, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sidestream", "version": VERSION},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _endpoint(path: str, model: str) -> Json:
    found: Json = {"responses": {"200": {"description": "success"}, "default": {"description": "an error, as JSON"}}}
    if path not in (*HEALTH_PATHS, DOCS_PATH, *PAGE_PATHS):
        found["security"] = [{"key": []}]
    parameters: list[Json] = [{"name": name, "in": "query", "schema": _QUERY[name]} for name in _QUERY_OF.get(path, ())]
    parameters += [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"{(\w+)}", path)
    ]
    if parameters:
        found["parameters"] = parameters
    if bodies := _BODIES.get(path):
        schemas = [_schema(body, model) for body in bodies]
        if path == "/v1/messages":
            schemas[0]["required"].append("max_tokens")
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


def _schema(body: Body, model: str) -> Json:
    """The JSON schema of a request body. Fields may be null, which means the default."""
    kind, idle = body
    schema: Json = kind.model_json_schema(ref_template="#/{model}")
    kinds, title = schema.pop("$defs", {}), schema.pop("title")
    schema.pop("description", None)
    required = schema.setdefault("required", [])
    for name, found in schema["properties"].items():
        by_hand = _CHECKED_BY_HAND.get(f"{title}.{name}")
        if not found.keys() - {"title", "default"}:
            by_hand = _CHECKED_BY_HAND[name]
        if name == "model":
            by_hand = {"const": model}
        elif (option := SAMPLING_OPTIONS.get(name)) is not None:
            low = -1 if name == "top_k" else option.low  # -1 is vLLM's value for off
            bound = "exclusiveMinimum" if option.low_excluded else "minimum"
            by_hand = {"type": "integer" if option.kind is int else "number", bound: low, "maximum": option.high}
        inner = _inlined(found if by_hand is None else by_hand, kinds)
        optional = name not in required and {"type": "null"} not in inner.get("anyOf", ())
        schema["properties"][name] = {"anyOf": [inner, {"type": "null"}]} if optional else inner
    for name, values in idle.items():
        schema["properties"][name] = {} if values is None else {"enum": [*values, None]}
    return schema


def _inlined(schema: Any, kinds: dict[str, Json]) -> Any:
    """The schema without pydantic's titles, defaults and references."""
    if isinstance(schema, list):
        return [_inlined(item, kinds) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(kinds[schema["$ref"].removeprefix("#/")], kinds)
    return {
        name: {key: _inlined(one, kinds) for key, one in value.items()}
        if name == "properties"
        else _inlined(value, kinds)
        for name, value in schema.items()
        if name not in ("title", "default")
    }


@functools.cache
def _page() -> str:
    return files("sidestream.server").joinpath("docs.html").read_text("utf-8")
