"""The endpoints for operators: reset and flush the KV cache, pause the admission of requests, cancel a request, replace
the weights, load and unload LoRA adapters.

Every one needs the admin key; see `ServerOptions.admin_key`. Used on the event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sidestream.client.front_end import FrontEnd
from sidestream.server.body import BodyReader, JsonResponse, Strict, checked, parse_object
from sidestream.server.errors import ApiError, bad_request
from sidestream.server.fields import Body
from sidestream.server.middleware import require_admin

DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 60.0, 600.0


class _Weights(Strict):
    """SGLang's spelling."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]


class _LoadedAdapter(Strict):
    """vLLM's spelling."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class _UnloadedAdapter(Strict):
    """vLLM's spelling."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


BODIES: Mapping[str, tuple[Body, ...]] = {
    "/update_weights_from_disk": ((_Weights, {}),),
    "/v1/load_lora_adapter": ((_LoadedAdapter, {}),),
    "/v1/unload_lora_adapter": ((_UnloadedAdapter, {}),),
}
"""As `fields.BODIES`."""


def operation_routes(backend: FrontEnd, bodies: BodyReader, model_name: str) -> list[Route]:
    """The routes of all operations. `model_name`: as served, which no adapter may have."""

    async def reset_prefix_cache(request: Request) -> Response:
        check_query(request, ("tier", "timeout_s"))
        tier = request.query_params.get("tier")
        return JsonResponse(
            {"done": True, "dropped": await backend.reset_prefix_cache(tier, timeout_s=_timeout_s(request))}
        )

    async def flush(request: Request) -> Response:
        check_query(request, ("timeout_s",))
        flushed = await backend.flush(timeout_s=_timeout_s(request))
        return JsonResponse({"done": bool(flushed), "left": dict(flushed.left)}, 200 if flushed else 504)

    async def pause(request: Request) -> Response:
        check_query(request, ())
        await backend.pause()
        return JsonResponse({"paused": True})

    async def resume(request: Request) -> Response:
        check_query(request, ())
        await backend.resume()
        return JsonResponse({"paused": False})

    async def cancel(request: Request) -> Response:
        check_query(request, ())
        name = request.path_params["id"]
        if not (ended := await backend.cancel(name)):
            raise ApiError(404, f"no request {name[:128]!r} runs or waits in the engine", code="request_not_found")
        return JsonResponse({"id": name, "cancelled": ended})

    async def update_weights(request: Request) -> Response:
        check_query(request, ("timeout_s",))
        async with bodies.read(request) as body:
            asked: Any = checked(_Weights, parse_object(body), {})
        await backend.update_weights(asked.model_path, timeout_s=_timeout_s(request))
        return JsonResponse({"success": True, "message": f"serving the weights of {asked.model_path}"})

    async def load_adapter(request: Request) -> Response:
        check_query(request, ("timeout_s",))
        async with bodies.read(request) as body:
            asked: Any = checked(_LoadedAdapter, parse_object(body), {})
        if asked.lora_name == model_name:
            raise bad_request(f"lora_name is {model_name!r}, as the model's own: give another name", "lora_name")
        await backend.adapters.load(asked.lora_name, asked.lora_path, timeout_s=_timeout_s(request))
        return JsonResponse({"lora_name": asked.lora_name, "loaded": True})

    async def unload_adapter(request: Request) -> Response:
        check_query(request, ())
        async with bodies.read(request) as body:
            asked: Any = checked(_UnloadedAdapter, parse_object(body), {})
        await backend.adapters.unload(asked.lora_name)
        return JsonResponse({"lora_name": asked.lora_name, "loaded": False})

    return [
        operation("/v1/load_lora_adapter", load_adapter),
        operation("/v1/unload_lora_adapter", unload_adapter),
        operation("/update_weights_from_disk", update_weights),
        operation("/reset_prefix_cache", reset_prefix_cache),
        operation("/flush", flush),
        operation("/pause", pause),
        operation("/resume", resume),
        operation("/v1/requests/{id:path}", cancel, "DELETE"),
    ]


def operation(path: str, run: Callable[[Request], Awaitable[Response]], method: str = "POST") -> Route:
    """The route of an operation, which needs the admin key."""

    async def operate(request: Request) -> Response:
        require_admin(request.scope)
        return await run(request)

    return Route(path, operate, methods=[method])


def check_query(request: Request, known: Collection[str]) -> None:
    """Raise ApiError for a query parameter that is not known, or that is given twice."""
    seen = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            raise bad_request(f"no query parameter {name[:64]}: known are {', '.join(known) or 'none'}", name[:64])
        if name in seen:
            raise bad_request(f"the query has {name} twice: give it once", name)
        seen.add(name)


def _timeout_s(request: Request) -> float:
    text = request.query_params.get("timeout_s", str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        raise bad_request(f"timeout_s is {text[:64]!r}: give seconds in [0, {MAX_TIMEOUT_S:g}]", "timeout_s")
    return seconds
