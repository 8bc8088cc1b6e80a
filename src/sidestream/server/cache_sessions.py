"""The endpoint that closes a session, as SGLang spells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sidestream.client.front_end import FrontEnd
from sidestream.config import MOST_SALT_CHARS
from sidestream.server.body import BodyReader, JsonResponse, Strict, checked, parse_object
from sidestream.server.errors import ApiError
from sidestream.server.fields import Body
from sidestream.server.middleware import request_record

_Name = Annotated[str, Field(min_length=1, max_length=MOST_SALT_CHARS)]


class _Close(Strict):
    session_id: _Name
    cache_salt: _Name | None = None


BODIES: Mapping[str, tuple[Body, ...]] = {"/close_session": ((_Close, {}),)}
"""As `fields.BODIES`."""


def session_routes(backend: FrontEnd, bodies: BodyReader) -> list[Route]:
    """The route. Every key may close sessions of its own salt."""

    async def close(request: Request) -> Response:
        async with bodies.read(request) as body:
            asked: Any = checked(_Close, parse_object(body), {})
        salt, grant = asked.cache_salt or "", request_record(request.scope).grant
        closed = await backend.close_session(
            asked.session_id, cache_salt=salt if grant is None else grant.key.salted(salt)
        )
        if closed is None:
            message = f"no session {asked.session_id[:64]!r} holds KV: its last request is long ago, or had no block"
            raise ApiError(404, message, param="session_id", code="session_not_found")
        return JsonResponse({"session_id": asked.session_id, "tokens": closed.tokens, "blocks_by_tier": closed.tiers})

    return [Route("/close_session", close, methods=["POST"])]
