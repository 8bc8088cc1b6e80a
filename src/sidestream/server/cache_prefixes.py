"""The endpoints for operators about prefixes in the KV cache: pin, unpin, prefetch, list, drop. Every one needs the
admin key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, Field, create_model
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sidestream.client.front_end import FrontEnd
from sidestream.config import MOST_SALT_CHARS
from sidestream.server.body import BodyReader, JsonResponse, Served, Strict, checked, parse_object
from sidestream.server.conversation import Conversation, checked_messages, lay_out, layout_options
from sidestream.server.errors import bad_request
from sidestream.server.fields import Body, checked_ids
from sidestream.server.operations import check_query, operation
from sidestream.server.responses import Json
from sidestream.server.text_work import TextWork
from sidestream.text import TokenizerLike
from sidestream.types import CachedPrefix

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


def _forms(operation: str, **more: Any) -> dict[str, Body]:
    """The bodies of an operation, by the field that gives the prefix: a text, token ids, or a conversation as the chat
    template lays it out. `more`: the operation's own fields.
    """
    salt = (str | None, Field(default=None, min_length=1, max_length=MOST_SALT_CHARS))
    fields: dict[str, Any] = {"model": (str | None, None), "cache_salt": salt, **more}
    own: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
        "prompt": (Strict, {"prompt": (str, ...)}),
        "tokens": (Strict, {"tokens": (Any, ...)}),
        "messages": (Conversation, {}),
    }
    return {
        name: (
            create_model(f"_{operation}", __base__=base, **fields, **field),
            {other: () for other in own if other != name},
        )
        for name, (base, field) in own.items()
    }


class _Named(Strict):
    name: str


_FORMS: Mapping[str, Mapping[str, Body]] = {
    "pin": _forms("Pin", ttl_s=(float, ...)),
    "prefetch": _forms("Prefetch"),
    "unpin": {**_forms("Unpin"), "name": (_Named, {})},
    "drop": _forms("Drop", tier=(str | None, None)),
}
BODIES: Mapping[str, tuple[Body, ...]] = {f"/v1/cache/{kind}": tuple(forms.values()) for kind, forms in _FORMS.items()}
"""As `fields.BODIES`."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A valid request: token ids of the prefix, unless it has a name, and its other fields."""

    token_ids: Sequence[int]
    cache_salt: str = ""
    ttl_s: float = 0.0
    name: str = ""
    tier: str | None = None


def _parse(kind: str, body: bytes | bytearray, *, tokenizer: TokenizerLike, served: Served) -> _Asked:
    """The request with this body. Raises ApiError or RequestError, naming the field at fault."""
    fields, forms = parse_object(body), _FORMS[kind]
    chosen = [name for name in forms if fields.get(name) is not None]
    if len(chosen) != 1:
        raise bad_request(f"{' and '.join(chosen) or 'nothing'} given: send one of {', '.join(forms)}", "prompt")
    asked: Any = checked(forms[chosen[0]][0], fields, forms[chosen[0]][1])
    if isinstance(asked, _Named):
        return _Asked((), name=asked.name)
    if served.adapter_of(asked.model):
        raise bad_request(f"model is {asked.model!r}: name the KV of the model itself, not of an adapter", "model")
    token_ids: Sequence[int]
    if chosen == ["prompt"]:
        token_ids = tokenizer.encode(asked.prompt, most_tokens=served.max_model_len)
    elif chosen == ["tokens"]:
        token_ids = checked_ids(asked.tokens, tokenizer, served)
    else:
        # A prefix of conversations has no start of an answer, unless the request asks for it.
        asked = asked.model_copy(update={"add_generation_prompt": bool(asked.add_generation_prompt)})
        messages = checked_messages(asked.messages, served)
        token_ids = lay_out(tokenizer, messages, layout_options(asked, tokenizer), served)
    more = {name: getattr(asked, name) for name in ("ttl_s", "tier") if hasattr(asked, name)}
    return _Asked(token_ids, asked.cache_salt or "", **more)


PARSERS: Mapping[str, Callable[..., _Asked]] = {kind: partial(_parse, kind) for kind in _FORMS}
"""The work of `TextWork` for these endpoints, by kind."""


def cache_routes(backend: FrontEnd, bodies: BodyReader, text: TextWork, *, shows_text: bool) -> list[Route]:
    """The routes. `shows_text`: lists have the texts of prefixes."""

    async def pin(asked: _Asked) -> Json:
        pinned = await backend.pin_prefix(asked.token_ids, ttl_s=asked.ttl_s, cache_salt=asked.cache_salt)
        return {"prompt_tokens": len(asked.token_ids), **_json(pinned)}

    async def prefetch(asked: _Asked) -> Json:
        cached = await backend.prefetch_prefix(asked.token_ids, cache_salt=asked.cache_salt)
        return {"prompt_tokens": len(asked.token_ids), "tokens": cached.tokens, "blocks_by_tier": cached.tiers}

    async def unpin(asked: _Asked) -> Json:
        return {
            "unpinned": await backend.unpin_prefix(asked.token_ids, name=asked.name, cache_salt=asked.cache_salt),
        }

    async def drop(asked: _Asked) -> Json:
        dropped = await backend.drop_prefix(asked.token_ids, tier=asked.tier, cache_salt=asked.cache_salt)
        return {"prompt_tokens": len(asked.token_ids), "dropped": dropped}

    def reading(kind: str, run: Callable[[_Asked], Awaitable[Json]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            check_query(request, ())
            async with bodies.read(request) as body:
                asked = await text.run(kind, body)
            return JsonResponse(await run(asked))

        return answer

    async def prefixes(request: Request) -> Response:
        check_query(request, ("limit",))
        limit = request.query_params.get("limit", str(DEFAULT_LIMIT))
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= MAX_LIMIT):
            raise bad_request(f"limit is {limit[:64]!r}: give a whole number in [1, {MAX_LIMIT}]", "limit")
        found = await backend.cached_prefixes(limit=int(limit))
        decode = partial(backend.tokenizer.decode, skip_special_tokens=False)
        return JsonResponse({"prefixes": [_json(one, decode if shows_text else None) for one in found]})

    return [
        operation("/v1/cache/pin", reading("pin", pin)),
        operation("/v1/cache/prefetch", reading("prefetch", prefetch)),
        operation("/v1/cache/unpin", reading("unpin", unpin)),
        operation("/v1/cache/drop", reading("drop", drop)),
        operation("/v1/cache/prefixes", prefixes, "GET"),
    ]


def _json(prefix: CachedPrefix, decode: Callable[[Sequence[int]], str] | None = None) -> Json:
    return {
        "name": prefix.name,
        "tokens": prefix.tokens,
        "blocks_by_tier": prefix.tiers,
        "pinned_for_s": None if prefix.ttl_s is None else round(prefix.ttl_s, 3),
        "pinned_by": None if prefix.ttl_s is None else "request" if prefix.hint else "operator",
        "requests": prefix.hits,
        "seconds_ago": None if prefix.age_s is None else round(prefix.age_s, 3),
        **({} if decode is None else {"text": decode(prefix.token_ids)}),
    }
