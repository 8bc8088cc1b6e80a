"""Operations on prefixes in the KV cache: pin them, end their pins, prefetch, list and drop them. Any thread except the
engine thread may call them.

Pins belong to the keys of blocks, so they end with a reset and with new weights, and a new process has none. Other
ranks follow rank 0's tiers, so a pin needs no message to them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from sidestream.config import MAX_TTL_S
from sidestream.engine.operations import Call
from sidestream.engine.output_stream import OutputStream
from sidestream.engine.parts import Parts
from sidestream.engine.quotas import Quotas
from sidestream.engine.sessions import Sessions
from sidestream.engine.stats import Asked, CacheHistory
from sidestream.engine.tier_pins import TierPins
from sidestream.errors import CallTimeout, EngineStopped, InvariantError, RequestRejected
from sidestream.types import CachedPrefix, PrefixQuery
from sidestream_kv.kv.pins import PIN_SHARE
from sidestream_kv.offload.tiers.base import SharedTier
from sidestream_kv.types import DEVICE, HOST, Key

MOST_LISTED = 1000
"""Upper bound of the number of listed prefixes."""
# Polling interval of a drop from the tiers.
_POLL_S = 0.0005
# How long a prompt's blocks may take to reach a shared tier, and how often that is looked at.
_HAND_OVER_S = 5.0
_HAND_OVER_POLL_S = 0.004
# First tokens of a listed prefix.
_TOKENS_SHOWN = 256


class Prefixes:
    """The operations on the prefixes of one engine.

    call         `Engine.call`
    store_again  `StepLoop.store_again`
    is_alive     whether the engine thread has not ended
    """

    def __init__(
        self,
        parts: Parts,
        history: CacheHistory,
        *,
        call: Call,
        store_again: Callable[[Sequence[Key]], None],
        is_alive: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._history = history
        self._call = call
        self._store_again = store_again
        self._is_alive = is_alive
        self._pins = TierPins(parts)
        self.sessions = Sessions(parts, self._pins)
        self._quotas = Quotas(parts)

    def ended(self, stream: OutputStream, now_s: float) -> None:
        """Count the KV of a request that has ended for its session and its owner. Engine thread only."""
        self.sessions.ended(stream, now_s)
        self._quotas.ended(stream.request)

    def run(self, operation: str, query: PrefixQuery, *, timeout_s: float) -> Sequence[CachedPrefix]:
        """Carry out `pin_prefix`, `unpin_prefix`, `prefetch_prefix`, `cached_prefixes`, `drop_prefix`, `close_session`
        or `hand_over_prefix`; see these methods of `LLM` and `FrontEnd`. Returns the prefixes of which it tells: the
        one that was pinned, read or dropped, those whose pin or session ended, the listed ones. Raises RequestRejected,
        CallTimeout and EngineStopped.
        """
        match operation:
            case "pin_prefix":
                return [self._pin(query, timeout_s)]
            case "prefetch_prefix":
                return [self._prefetch(query, timeout_s)]
            case "unpin_prefix":
                return self._unpin(query)
            case "cached_prefixes":
                return self._listed(min(query.limit, MOST_LISTED))
            case "drop_prefix":
                return [self._drop(query, timeout_s)]
            case "close_session":
                return self._close_session(query, timeout_s)
            case "hand_over_prefix":
                return [self._hand_over(query, min(timeout_s, _HAND_OVER_S))]
            case _:
                raise InvariantError(f"no operation {operation!r} on prefixes")

    # ------------------------------------------------------------------ pins

    def _pin(self, query: PrefixQuery, timeout_s: float) -> CachedPrefix:
        if not 0 < query.ttl_s <= MAX_TTL_S:
            raise RequestRejected(
                f"ttl_s is {query.ttl_s:g}: give seconds above 0, up to {MAX_TTL_S:g} (a week)", param="ttl_s"
            )
        try:
            keys = self._keys(query)
        except RequestRejected:
            if query.hint:
                return CachedPrefix("", 0, {})
            raise
        pinned: list[CachedPrefix] = []
        self._call(lambda: pinned.append(self._pin_now(keys, query)), timeout_s=timeout_s)
        if query.hint or pinned[0].ttl_s is not None:
            return pinned[0]
        if not pinned[0].tokens:
            num_tokens = len(keys) * self._size
            message = f"none of the {num_tokens} tokens in whole blocks is cached: send them as a request first"
            raise RequestRejected(message, param="prompt")
        fullest = self._pins.fullest
        raise RequestRejected(
            f"pins hold {len(fullest.held)} of at most {fullest.room} blocks ({PIN_SHARE:.0%} of the tier), and this "
            f"prefix has {pinned[0].tokens // self._size}: end other pins, or pin a shorter prefix",
            param="prompt",
        )

    def _pin_now(self, keys: Sequence[Key], query: PrefixQuery) -> CachedPrefix:
        """Pin what can be reused of these blocks, on the engine thread. Without `ttl_s`: there was no room."""
        parts = self._parts
        found, state_parts = parts.scheduler.reach(keys)
        if not found:
            return CachedPrefix("", 0, {})
        name, ttl_s, hint = found[-1], query.ttl_s, query.hint
        held = self._pins.add(found, state_parts, ttl_s=ttl_s, hint=hint)
        if held and parts.tiers is not None:
            host = parts.tiers.host.pool
            self._store_again([key for key in found if host.get(key) is None])
        return self._prefix(name, found, ttl_s=ttl_s if held else None, hint=hint)

    def _prefetch(self, query: PrefixQuery, timeout_s: float) -> CachedPrefix:
        keys, cached = self._keys(query), list[CachedPrefix]()

        def prefetch() -> None:
            parts = self._parts
            found, state_parts = parts.scheduler.reach(keys)
            cached.append(self._prefix(found[-1], found) if found else CachedPrefix("", 0, {}))
            if parts.transfers is not None and found:
                parts.transfers.prefetch([*state_parts, *found])

        self._call(prefetch, timeout_s=timeout_s)
        return cached[0]

    def _unpin(self, query: PrefixQuery) -> list[CachedPrefix]:
        pinned = self._pins.pinned()
        if query.name:
            named = [key for key in pinned if key.hex() == query.name]
        else:  # the pin has the longest part of the prompt that was cached
            named = [key for key in reversed(self._keys(query)) if key in pinned][:1]
        ended = [self._prefix(key, pinned[key].keys) for key in named]
        for key in named:
            self._pins.end(key)
        return ended

    def _close_session(self, query: PrefixQuery, timeout_s: float) -> list[CachedPrefix]:
        closed: list[CachedPrefix] = []
        salt = query.cache_salt.decode("utf-8", "surrogatepass")

        def close() -> None:
            if keys := self.sessions.close(query.name, cache_salt=salt):
                closed.append(self._prefix(keys[-1], keys))

        self._call(close, timeout_s=timeout_s)
        return closed

    # ------------------------------------------------------------------ lists and drops

    def _listed(self, limit: int) -> list[CachedPrefix]:
        """The pinned prefixes, then the most used ones, of which some request shared the tokens with another. Takes
        0.2 s of the calling thread if the history is full.
        """
        now_s, pinned = self._parts.device.now(), self._pins.pinned()
        version = self._parts.scheduler.keys_version
        known = [one for one in self._history.requests() if one.cache[1] == version]
        uses: Counter[Key] = Counter()
        last: dict[Key, Asked] = {}
        for one in known:
            uses.update(one.keys[: one.num_prompt // self._size])
        branches: dict[Key, int] = {}  # number of blocks of each prefix behind which prompts part
        for one in known:
            keys = one.keys[: one.num_prompt // self._size]
            for at, (key, after) in enumerate(itertools.zip_longest(keys, keys[1:])):
                if key in pinned or (uses[key] > 1 and (after is None or uses[after] < uses[key])):
                    branches[key] = at + 1
                    if key not in last or one.tokens:
                        last[key] = one
        most_used = sorted(branches.keys() - pinned.keys(), key=lambda key: (-uses[key], -branches[key]))
        found: list[CachedPrefix] = []
        for key in [*sorted(pinned, key=lambda key: -pinned[key].until_s)[:limit], *most_used[:limit]]:
            request, pin = last.get(key), pinned.get(key)
            keys = pin.keys if pin is not None else () if request is None else request.keys[: branches[key]]
            found.append(
                self._prefix(
                    key,
                    keys,
                    ttl_s=None if pin is None else pin.until_s - now_s,
                    hint=pin is not None and pin.hint,
                    hits=uses[key],
                    age_s=None if request is None else now_s - request.ended_s,
                    token_ids=() if request is None else self._first_tokens(request, branches[key]),
                )
            )
        return found

    def _drop(self, query: PrefixQuery, timeout_s: float) -> CachedPrefix:
        parts, keys = self._parts, self._keys(query)
        persistent = () if parts.tiers is None else (HOST, *parts.tiers.persistent)
        if query.tier is not None and query.tier not in (DEVICE, *persistent):
            have = ", ".join((DEVICE, *persistent))
            raise RequestRejected(f"tier is {query.tier!r}: this engine has {have}", param="tier")
        dropped: list[dict[str, int]] = []

        def drop() -> None:
            part_keys = parts.scheduler.part_keys(keys)
            self._pins.forget(keys, part_keys, query.tier)
            if query.tier in (None, DEVICE):
                dropped.append({DEVICE: parts.scheduler.drop(keys)})
            if parts.transfers is not None and query.tier != DEVICE:
                tiers = None if query.tier is None else (query.tier,)
                dropped.append(parts.transfers.forget((*keys, *part_keys), tiers))

        until_s = parts.device.now() + timeout_s
        self._call(drop, timeout_s=timeout_s)
        while not all(dropped):  # the offload worker fills its counts at once
            if parts.transfers is None or parts.transfers.failure is not None or not self._is_alive():
                raise EngineStopped("the prefix was not dropped, because the engine has stopped")
            if parts.device.now() >= until_s:
                raise CallTimeout(f"the tiers did not drop the prefix within {timeout_s:g} s; they still will")
            parts.device.sleep(_POLL_S)
        name = keys[-1].hex()
        return CachedPrefix(name, len(keys) * self._size, {tier: n for held in dropped for tier, n in held.items()})

    # ------------------------------------------------------------------ hand-overs

    def _hand_over(self, query: PrefixQuery, timeout_s: float) -> CachedPrefix:
        """Block until a tier that engines share holds what this engine can reuse of the prompt, or no transfer is in
        flight that could bring it there.
        """
        parts = self._parts
        shared = {} if parts.tiers is None else parts.tiers.persistent
        shared = {name: tier for name, tier in shared.items() if isinstance(tier, SharedTier)}
        if not shared or parts.transfers is None:
            raise RequestRejected(
                "this engine has no tier that engines share: start it with --offload-tiers, or leave "
                "kv_transfer_params out",
                param="kv_transfer_params",
            )
        if len(query.tokens) // 4 < self._size:
            return CachedPrefix("", 0, {})
        keys, transfers, until_s = self._keys(query), parts.transfers, parts.device.now() + timeout_s
        done, stored = False, 0

        def look() -> None:
            nonlocal done, stored
            idle = not transfers.has_work  # before the look: what comes later is not waited for
            found, state_parts = parts.scheduler.reach(keys)
            held = max(tier.index.lookup([*state_parts, *found]) for tier in shared.values())
            stored = max(0, held - len(state_parts))
            done = idle or stored == len(found)

        while True:
            self._call(look, timeout_s=timeout_s)
            if done or parts.device.now() >= until_s:  # rule: hand-over-waits-for-its-blocks
                return CachedPrefix(keys[-1].hex(), stored * self._size, dict.fromkeys(shared, stored))
            parts.device.sleep(_HAND_OVER_POLL_S)

    # ------------------------------------------------------------------ shared

    @property
    def _size(self) -> int:
        return self._parts.layout.block_tokens

    def _first_tokens(self, request: Asked, num_blocks: int) -> tuple[int, ...]:
        return tuple(request.tokens[: min(num_blocks * self._size, _TOKENS_SHOWN)])

    def _keys(self, query: PrefixQuery) -> list[Key]:
        """Keys of the query's whole blocks; at least one."""
        scheduler, size = self._parts.scheduler, self._size
        tokens = np.frombuffer(query.tokens, "<i4").astype(np.int64)
        if not scheduler.limits.prefix_cache:
            raise RequestRejected("the engine has no prefix cache: start it with the cache", param="prompt")
        if len(tokens) < size:
            message = f"prompt has {len(tokens)} tokens, a block has {size}: the cache holds whole blocks"
            raise RequestRejected(message, param="prompt")
        salt = query.cache_salt.decode("utf-8", "surrogatepass")
        return scheduler.keys_of(tokens, salt=salt)  # rule: hand-over-is-of-its-own-request

    def _prefix(
        self,
        name: Key,
        keys: Sequence[Key],
        *,
        ttl_s: float | None = None,
        hint: bool = False,
        hits: int = 0,
        age_s: float | None = None,
        token_ids: tuple[int, ...] = (),
    ) -> CachedPrefix:
        """A prefix of these blocks, without the parts of checkpoints behind its last block."""
        keys = keys[: keys.index(name) + 1]
        tiers = {DEVICE: sum(self._parts.blocks.get(key) is not None for key in keys)}
        if (stack := self._parts.tiers) is not None:
            tiers[HOST] = sum(stack.host.pool.get(key) is not None for key in keys)
            for tier, one in stack.persistent.items():
                tiers[tier] = sum(key in one.index for key in keys)
        return CachedPrefix(name.hex(), len(keys) * self._size, tiers, ttl_s, hint, hits, age_s, token_ids)
