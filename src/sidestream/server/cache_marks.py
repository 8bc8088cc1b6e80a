"""Anthropic's `cache_control`: up to which block of a request its prompt is to stay cached, and for how long; and the
pins that a server makes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from starlette.datastructures import Headers

from sidestream.client.front_end import FrontEnd
from sidestream.config import SamplingParams
from sidestream.errors import SidestreamError
from sidestream.server.body import Strict, checked
from sidestream.server.cache_fields import with_session
from sidestream.server.errors import ApiError, bad_request
from sidestream.server.fields import Mark

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_TTL_S = {"5m": 300.0, "1h": 3600.0}
_MOST_MARKS = 4
_MOST_PINNING = 64  # pins that are under way at the same time; further ones are left out


class CacheControl(Strict):
    """The mark of a block, a tool or a whole request."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Cut(NamedTuple):
    """A request up to a marked block."""

    tools: list[Json]
    system: Any
    messages: list[Json]


def marks_of(
    request: Cut, whole: CacheControl | None, prompt: Sequence[int], lay_out: Callable[[Cut], Sequence[int]], size: int
) -> tuple[Mark, ...]:
    """The marks of a valid request: for each time to live, the last one.

    whole    the mark of the whole request
    lay_out  the prompt of a part of the request
    size     tokens of a block

    Raises ApiError for more than four marks, and for a bad one.
    """
    cuts = [*_cuts(request), *([] if whole is None else [(request, whole)])]
    if len(cuts) > _MOST_MARKS:
        message = f"{len(cuts)} blocks have cache_control: at most {_MOST_MARKS} may; leave out the earlier ones"
        raise bad_request(message, "cache_control")
    found: list[Mark] = []
    for cut, ttl in {control.ttl: (cut, control.ttl) for cut, control in cuts}.values():
        shared = len(prompt)
        if cut is not request:
            shared = 0
            with contextlib.suppress(ApiError, SidestreamError):  # some templates refuse some parts of conversations
                shared = _common(prompt, lay_out(_with_user(cut)))
        if shared >= size:
            found.append(Mark(shared // size * size, _TTL_S[ttl]))
    return tuple(sorted(found, key=lambda mark: -mark.ttl_s))


def created(marks: Sequence[Mark], cached: int) -> dict[str, int]:
    """Tokens that a request wrote to the cache for its marks, by time to live, if `cached` tokens were there before."""
    counts = dict.fromkeys(_TTL_S, 0)
    for ttl, seconds in sorted(_TTL_S.items(), key=lambda item: -item[1]):
        stop = max((mark.tokens for mark in marks if mark.ttl_s == seconds), default=0)
        counts[ttl], cached = max(0, stop - cached), max(cached, stop)
    return counts


def _cuts(request: Cut) -> Iterator[tuple[Cut, CacheControl]]:
    """The marked blocks in the order of Anthropic's API: tools, system, messages. A mark of a tool also covers the
    system prompt, which some templates put before the tools.
    """
    tools, system, messages = request
    for at, tool in enumerate(tools):
        yield from _mark(tool, f"tools[{at}]", Cut(tools[: at + 1], system, []))
    for at, block in enumerate(system if isinstance(system, list) else ()):
        yield from _mark(block, f"system[{at}]", Cut(tools, system[: at + 1], []))
    for number, message in enumerate(messages):
        content = message["content"]
        for at, block in enumerate(content if isinstance(content, list) else ()):
            cut = Cut(tools, system, [*messages[:number], {**message, "content": content[: at + 1]}])
            where = f"messages[{number}].content[{at}]"
            parts = block.get("content")
            for inner, part in enumerate(parts if isinstance(parts, list) else ()):
                yield from _mark(part, f"{where}.content[{inner}]", cut)
            yield from _mark(block, where, cut)


def _mark(block: Mapping[str, Any], where: str, cut: Cut) -> Iterator[tuple[Cut, CacheControl]]:
    value = block.get("cache_control")
    if value is None:
        return
    at = f"{where}.cache_control"
    if not isinstance(value, dict):
        raise bad_request(f"{at} is {str(value)[:64]!r}: give an object with type 'ephemeral', or leave it out", at)
    yield cut, checked(CacheControl, value, {}, at)


def _with_user(cut: Cut) -> Cut:
    """The cut as a conversation that a template accepts: its last message is the user's."""
    if cut.messages and cut.messages[-1]["role"] == "user":
        return cut
    return cut._replace(messages=[*cut.messages, {"role": "user", "content": "?"}])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class CacheHints:
    """Pins the marked prefixes of prompts that are computed. Used on one event loop.

    max_ttl_s   upper bound of the time of a pin; 0: none is made
    """

    def __init__(self, backend: FrontEnd, max_ttl_s: float) -> None:
        self._backend = backend
        self._max_ttl_s = max_ttl_s
        self._tasks: set[asyncio.Task[None]] = set()

    def with_session(self, params: SamplingParams, headers: Headers) -> SamplingParams:
        """The parameters with the session that the header names; see `cache_fields.with_session`."""
        return with_session(params, headers, self._max_ttl_s)

    def begin(self, prompt: Sequence[int], marks: Sequence[Mark], cache_salt: str) -> None:
        """Pin the marked prefixes of a prompt, whose first token was computed. Never waits; a failure only leaves the
        pin out.
        """
        if not self._max_ttl_s or len(self._tasks) >= _MOST_PINNING:
            return
        task = asyncio.create_task(self._pin(prompt, marks, cache_salt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pin(self, prompt: Sequence[int], marks: Sequence[Mark], cache_salt: str) -> None:
        for mark in marks:
            ttl_s = min(mark.ttl_s, self._max_ttl_s)
            try:
                await self._backend.pin_prefix(prompt[: mark.tokens], ttl_s=ttl_s, cache_salt=cache_salt, hint=True)
            except SidestreamError as failure:
                logger.debug("a prefix of %d tokens was not pinned: %s", mark.tokens, failure)
