"""Conversations of agents. The KV of a session's last request is evicted last until the session's next request is
expected, or until the session is closed; then it is evicted first.

An agent's requests come in turns, with pauses in which its tools run. Without a session, the KV of a pause competes
with that of requests that never return.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from sidestream.engine.output_stream import OutputStream
from sidestream.engine.parts import Parts
from sidestream.engine.tier_pins import TierPins
from sidestream_kv.types import Key, StorePlan

FIRST_TTL_S = 300.0
"""How long the KV of a session is held that has not paused yet."""
LEAST_TTL_S = 30.0
"""Lower bound of a learned time."""
_MOST_SESSIONS = 4096  # the one that was used longest ago is forgotten
_MOST_PAUSES = 8
_MARGIN = 2.0  # the longest of the last pauses, times this, is a learned time


@dataclass(slots=True)
class _Session:
    ended_s: float
    pin: tuple[Key, ...] = ()
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_PAUSES))


class Sessions:
    """The sessions of one engine, by salt and name. Engine thread only."""

    def __init__(self, parts: Parts, pins: TierPins) -> None:
        self._parts = parts
        self._pins = pins
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def ended(self, stream: OutputStream, now_s: float) -> None:
        """Hold the KV of a request that has ended, in place of that of the session's request before it."""
        request, scheduler = stream.request, self._parts.scheduler
        cache = request.cache
        if cache is None or not cache.session or request.keys_version != scheduler.keys_version:
            return
        name = request.cache_salt, cache.session
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(now_s)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)  # its pin ends by itself
        elif stream.began_s is not None and stream.began_s > session.ended_s:
            session.pauses.append(stream.began_s - session.ended_s)
        self._sessions.move_to_end(name)
        session.ended_s = now_s
        keys = request.keys[: request.committed_len // self._parts.layout.block_tokens]
        state_parts: list[Key] = []
        if scheduler.has_parts:
            keys, state_parts = scheduler.reach(keys)
        ttl_s = self._ttl_s(session, cache.max_ttl_s) if cache.session_ttl_s is None else cache.session_ttl_s
        if not keys or ttl_s <= 0:
            return
        earlier = session.pin[-1] if session.pin else keys[-1]
        if self._pins.move(earlier, keys, state_parts, ttl_s=ttl_s):  # rule: session-holds-its-kv
            session.pin = tuple(keys)

    def close(self, name: str, *, cache_salt: str) -> tuple[Key, ...]:
        """Forget a session: its KV is evicted first, unless a pin holds it. Returns the keys of its blocks; empty:
        there is no such session, or it held nothing.
        """
        session = self._sessions.pop((cache_salt, name), None)
        if session is None or not session.pin:
            return ()
        self._pins.end(session.pin[-1])
        parts = self._parts
        # In this order: the block that is demoted last goes first, and a block is useless without those before it.
        keys = (*parts.scheduler.end_parts(session.pin), *session.pin)
        parts.blocks.demote(keys)  # rule: closed-session-goes-first
        if parts.transfers is not None:
            parts.transfers.submit([StorePlan((), (), (), (), superseded=keys)])
        return session.pin

    def _ttl_s(self, session: _Session, most_s: float) -> float:
        """Learned from the pauses of this session."""
        if not session.pauses:
            return min(FIRST_TTL_S, most_s)
        return min(max(_MARGIN * max(session.pauses), LEAST_TTL_S), most_s)  # rule: session-learns-its-pauses
