"""The scheduler's side of a connector in another engine: knows which blocks the tiers hold, decides what to load and
what to store, and keeps the device blocks of transfers in flight from being used again. Knows no engine: requests and
blocks are whatever has the attributes that `PlannedRequest` and `BlockPool` name.

A block of tokens is identified by the engine's hash of the block and the group of layers that the block is for.

    group      layers with the same block size and kind of attention; a block of the device belongs to one group at once
    state      what a recurrent layer keeps after a token, in place of KV. A block holds one, which each step overwrites
               until the engine begins the next block. It serves a hit that ends at just its token
    boundary   number of tokens at which a hit may end: a multiple of the block size of every group
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from sidestream_kv.connectors.key_events import KeyEvents
from sidestream_kv.connectors.orders import LoadOrder, Orders, PromoteOrder, Report, StoreOrder, TierKeys
from sidestream_kv.types import HOST, Key

_HASH_BYTES = 15  # of a key; the last byte is the group
_MANY = 16  # from so many keys on, numpy makes them faster
# Weight of a new measurement in the moving average of the prefill rate, and least tokens of a step that tells it.
_WEIGHT = 0.2
_PREFILL_TOKENS = 512

# As a window, it reaches the last token before the next one only.
STATE_WINDOW = 2


class PlannedRequest(Protocol):
    """What the planner reads of a request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]


class BlockPool(Protocol):
    """The engine's pool of device blocks, which counts the users of each block.

    reset_prefix_cache  function that forgets the tokens of all blocks if none has a user, and returns whether it did
    """

    reset_prefix_cache: Callable[[], bool]

    @property
    def blocks(self) -> Sequence[Any]:
        """The blocks by id."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a user to each block."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Remove a user from each block."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """A group of layers.

    block_tokens  tokens of a block
    hashes        number of the engine's hashes for each block
    window        tokens of its sliding window; 0: attention to all tokens; `STATE_WINDOW`: recurrent states
    handed        whether the engine names each block to store and its number of tokens (`Planner.plan_step`), because
                  a block of a request may hold the state after another token than its last one
    """

    block_tokens: int
    hashes: int
    window: int = 0
    handed: bool = False

    def blocks(self, first: int, stop: int) -> range:
        """The blocks that a hit from token `first` to token `stop` must load."""
        if self.window:  # the next token attends to the last `window` - 1 tokens before it
            first = max(first, stop - self.window + 1)
        return range(first // self.block_tokens, max(first, stop) // self.block_tokens)


def _keys(hashes: Sequence[bytes], group: int) -> list[Key]:
    """The keys of blocks of a group with these hashes, which are at least as long as a key."""
    tail = bytes((group,))  # rule: key-has-the-group
    if len(hashes) < _MANY:
        return [each[:_HASH_BYTES] + tail for each in hashes]
    size, together = len(hashes[0]), bytearray(b"".join(hashes))
    together[_HASH_BYTES::size] = tail * len(hashes)
    keys: list[Key] = np.ndarray(len(hashes), f"V{_HASH_BYTES + 1}", together, strides=(size,)).tolist()
    return keys


@dataclass(slots=True, eq=False)
class _State:
    """What is known of a request.

    keys       keys of its blocks, by group
    block_ids  its device blocks, by group
    seen       number of its blocks that are stored already or cannot be, by group; the next store begins there
    due        number of tokens at which its next block is complete
    first      tokens that were computed when its hit was found
    promoting  number of its promotion in flight
    promoted   whether a promotion ended: then only host memory counts
    loading    number of its load in flight
    refused    whether a load has failed: it then computes everything
    stale      whether its blocks were computed or loaded before a reset: they are not stored
    """

    request: Any
    keys: list[list[Key]]
    block_ids: list[list[int]]
    seen: list[int]
    due: float = 0
    first: int = 0
    promoting: int = 0
    promoted: bool = False
    loading: int = 0
    refused: bool = False
    stale: bool = False

    def extend_keys(self, groups: Sequence[Group], stop: int) -> None:
        """Add the keys of the blocks up to token `stop` whose hashes the engine has computed."""
        for at, group in enumerate(groups):
            keys, count = self.keys[at], stop // group.block_tokens
            if len(keys) < count:
                keys += _keys(self.hashes(group, len(keys), count), at)

    def hashes(self, group: Group, first: int, stop: int) -> Sequence[bytes]:
        """The engine's hashes of these blocks of a group."""
        size = group.hashes
        hashes: Sequence[bytes] = self.request.block_hashes[(first + 1) * size - 1 : stop * size : size]
        return hashes

    def needed(self, groups: Sequence[Group], first: int, stop: int) -> list[list[Key]]:
        """The keys that a hit from token `first` to token `stop` must load, by group."""
        ranges = [group.blocks(first, stop) for group in groups]
        return [keys[blocks.start : blocks.stop] for keys, blocks in zip(self.keys, ranges, strict=True)]

    def gaps(self, at: int, blocks: range, held: TierKeys) -> Sequence[int]:
        """Those of these blocks of a group that cannot be loaded, in order."""
        keys = self.keys[at][blocks.start : blocks.stop]
        # rule: after-a-promotion-only-host-memory-counts
        lost = held.outside_host_memory(keys) if self.promoted else held.missing(keys)
        unknown = blocks[len(keys) :]
        if not lost or lost is keys:
            return blocks if lost else unknown
        return [*(block for block, key in zip(blocks, keys, strict=False) if key in lost), *unknown]

    def hit(self, groups: Sequence[Group], boundary: int, held: TierKeys, computed: int) -> tuple[int, Counter[str]]:
        """Where a hit ends, in tokens, and how many blocks it reads from each tier."""
        most = (self.request.num_tokens - 1) // boundary * boundary  # at least one token is computed
        # The first blocks tell that a prompt is new, without the keys of the others.
        stop = min(most, computed + boundary)
        if self._until_gap(groups, boundary, held, range(computed, stop)) <= computed:
            return computed, Counter()
        stop = self._until_gap(groups, boundary, held, range(computed, most))
        windows = [(at, group) for at, group in enumerate(groups) if group.window]
        while stop > computed:  # where one group's window has a gap, all groups need their windows before it
            gaps = ((self.gaps(at, group.blocks(computed, stop), held), group) for at, group in windows)
            gap = next((blocks[-1] * group.block_tokens for blocks, group in gaps if blocks), None)
            if gap is None:  # rule: hit-has-the-whole-window
                break
            stop = gap // boundary * boundary
        needed = Counter[str]()
        for keys in self.needed(groups, computed, stop):
            needed += held.counts(keys)
        return stop, needed

    def _until_gap(self, groups: Sequence[Group], boundary: int, held: TierKeys, tokens: range) -> int:
        """Where the first of these tokens that a group without a window cannot load has its boundary."""
        stop = tokens.stop
        self.extend_keys(groups, stop)
        for at, group in enumerate(groups):
            if not group.window and (gaps := self.gaps(at, group.blocks(tokens.start, stop), held)):
                stop = min(stop, gaps[0] * group.block_tokens) // boundary * boundary
        return stop


@dataclass(slots=True, eq=False)
class _Held:
    """Device blocks that an order keeps from being used again, and the keys that it stores."""

    blocks: list[Any] = field(default_factory=list)
    stores: list[Key] = field(default_factory=list)


class _Holds:
    """The device blocks that transfers in flight use. Each has one more user in the engine's pool.

    storing   keys of the blocks that are being stored
    """

    def __init__(self) -> None:
        self.pool: BlockPool | None = None
        self.num_blocks = 0
        self.storing: set[Key] = set()
        self._held: dict[int, _Held] = {}  # in the order of their numbers

    def __bool__(self) -> bool:
        return bool(self._held)

    def bind(self, pool: BlockPool) -> None:
        """Use this pool. It resets only if none of its blocks has a user, and must not count the users added here."""
        self.pool, reset = pool, pool.reset_prefix_cache

        def reset_beside_transfers() -> bool:
            blocks = [block for held in self._held.values() for block in held.blocks]
            pool.free_blocks(blocks)
            try:
                return reset()
            finally:
                pool.touch(blocks)

        pool.reset_prefix_cache = reset_beside_transfers

    def add(self, number: int, block_ids: Sequence[int], stores: Sequence[Key] = ()) -> None:
        """Keep these blocks, too, from being used again until order `number` has settled."""
        assert self.pool is not None
        pool_blocks = self.pool.blocks
        blocks = [pool_blocks[block_id] for block_id in block_ids]
        self.pool.touch(blocks)
        if number not in self._held:
            self._held[number] = _Held()
        held = self._held[number]
        held.blocks += blocks
        held.stores += stores
        self.num_blocks += len(blocks)
        self.storing.update(stores)

    def settle(self, number: int) -> list[Key]:
        """Let go of the blocks of all orders up to `number`. Returns the keys that these orders stored."""
        keys: list[Key] = []
        for first in [first for first in self._held if first <= number]:  # rule: blocks-are-held-until-settled
            held = self._held.pop(first)
            self.num_blocks -= len(held.blocks)
            self.storing.difference_update(held.stores)
            keys += held.stores
            assert self.pool is not None
            self.pool.free_blocks(reversed(held.blocks))  # the last block of a prefix is evicted first
        return keys


@dataclass(slots=True, eq=False)
class _Stores:
    """What the next step stores: one order for all requests, because each order costs the workers as much as many
    blocks. `number`: the order's.
    """

    number: int
    keys: list[Key] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    prefix: list[Key] = field(default_factory=list)

    def order(self) -> StoreOrder:
        """The order for the workers."""
        return StoreOrder(tuple(self.keys), tuple(self.block_ids), tuple(self.prefix))

    def clear(self) -> None:
        """Store nothing. The order remains, because it has a number."""
        self.keys, self.block_ids, self.prefix = [], [], []


class _Costs:
    """Estimates of how long loading and computing take.

    rate     prompt tokens per second, by the steps that consist of prompts only. 0: not measured yet
    seconds  see Report.seconds
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rate = 0.0
        self.seconds: dict[str, tuple[float, float]] = {}
        self._clock = clock
        self._steps: dict[int, tuple[float, int]] = {}  # start, tokens
        self._last_end_s = 0.0

    def began(self, step: int, num_tokens: int) -> None:
        """A step of prompts was scheduled."""
        self._steps[step] = (self._clock(), num_tokens)

    def measure(self, step: int) -> None:
        """The results of a step of any kind have arrived."""
        now = self._clock()
        if step in self._steps:
            start, tokens = self._steps.pop(step)
            rate = tokens / max(1e-6, now - max(start, self._last_end_s))
            self.rate += (_WEIGHT if self.rate else 1.0) * (rate - self.rate)
        self._last_end_s = now

    def worth_loading(self, num_tokens: int, sources: Mapping[str, int]) -> bool:
        """Whether loading should take less time than computing these tokens. True until both were measured."""
        if not self.rate or not self.seconds:
            return True
        blocks = sum(sources.values())
        seconds = self._time_of(HOST, blocks)
        seconds += sum(self._time_of(tier, count) for tier, count in sources.items() if tier != HOST)
        return seconds < num_tokens / self.rate

    def _time_of(self, tier: str, blocks: int) -> float:
        latency, block = self.seconds.get(tier, (0.0, 0.0))
        return blocks * block + latency * (1 if tier == HOST else blocks)


@dataclass(slots=True, eq=False)
class _Load:
    """A load in flight, and how many ranks have not ended it."""

    request: str
    ranks: int


@dataclass(slots=True)
class Counts:
    """What the planner did, in blocks of tokens. `stores_put_off`: times that blocks of a request had to wait."""

    hits: Counter[str] = field(default_factory=Counter)  # by tier
    stores: int = 0
    stores_put_off: int = 0
    loads_failed: int = 0


class Planner:
    """Decides on the scheduler's thread; no call waits.

    groups      the engine's groups of layers
    boundary    tokens
    num_ranks   number of workers, each with its own tiers
    most_held   device blocks that transfers may hold when a block is stored; further blocks wait for their request's
                next steps or its end
    events      of blocks that the tiers of the first rank gain and lose; None: nobody wants them
    """

    def __init__(
        self,
        *,
        groups: Sequence[Group],
        boundary: int,
        num_ranks: int,
        most_held: int,
        events: KeyEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._groups = groups
        self._prefix_group = next((at for at, group in enumerate(groups) if not group.handed), 0)
        self._boundary = boundary
        self._num_ranks = num_ranks
        self._most_held = most_held
        self._events = events
        self._holds = _Holds()
        self._keys = TierKeys(num_ranks)
        self._states: dict[str, _State] = {}
        self._orders: list[LoadOrder | PromoteOrder | _Stores] = []
        self._stores: _Stores | None = None  # one of the orders
        self._step = self._sent = self._resets = 0  # `_sent`: number of the last order that was sent
        self._loads: dict[int, _Load] = {}
        self._promotions: dict[int, str] = {}
        self._settled = [0] * num_ranks
        self._ranks_reset = [-1] * num_ranks  # resets that each rank has executed; -1: it has not reported yet
        self._costs = _Costs(clock)

    def bind(self, pool: BlockPool) -> None:
        """Tell the pool of device blocks."""
        self._holds.bind(pool)

    @property
    def busy(self) -> bool:
        """Whether transfers hold device blocks, or requests wait for promotions: the engine must go on stepping."""
        return bool(self._holds or self._promotions or self._orders)

    @property
    def holds_blocks(self) -> bool:
        """Whether any device block will become free when a transfer settles."""
        return bool(self._holds)

    # ------------------------------------------------------------------ loads

    def match(self, request: PlannedRequest, computed: int) -> int | None:
        """Number of tokens beyond `computed` whose KV should be loaded. None: ask again at the next step, because
        blocks are being read into host memory, or because the workers have not reported yet.
        """
        state = self._state(request)
        state.stale = False  # it has no blocks now
        if min(self._ranks_reset) < self._resets:  # rule: nothing-is-found-until-a-reset-is-executed
            return None if min(self._ranks_reset) < 0 else 0
        if state.promoting:
            return None
        if state.refused:  # rule: request-loads-no-more-after-a-failure
            return 0
        stop, sources = state.hit(self._groups, self._boundary, self._keys, computed)
        num_blocks = sum(sources.values())
        if stop <= computed or not self._costs.worth_loading(stop - computed, sources):
            return 0
        state.first = computed
        if sources[HOST] < num_blocks:
            keys = [key for of_group in state.needed(self._groups, computed, stop) for key in of_group]
            state.promoting = self._add(PromoteOrder(tuple(keys)))
            self._promotions[state.promoting] = request.request_id
            return None
        return stop - computed

    def allocated(self, request: PlannedRequest, block_ids: Sequence[Sequence[int]], num_loaded: int) -> None:
        """The engine has allocated blocks, of which those for `num_loaded` tokens get their KV by a load."""
        state = self._state(request)
        if not num_loaded:
            return
        keys: list[Key] = []
        ids: list[int] = []
        for at, group in enumerate(self._groups):
            blocks = group.blocks(state.first, state.first + num_loaded)
            keys += state.keys[at][blocks.start : blocks.stop]
            ids += block_ids[at][blocks.start : blocks.stop]
        state.block_ids = [list(of_group) for of_group in block_ids]
        state.loading = self._add(LoadOrder(request.request_id, tuple(keys), tuple(ids)))
        self._loads[state.loading] = _Load(request.request_id, self._num_ranks)
        self._holds.add(state.loading, ids)  # rule: load-holds-its-device-blocks
        self.counts.hits[self.came_from(request.request_id)] += len(keys)

    def came_from(self, request_id: str) -> str:
        """Where the KV of a request's load came from: "host" or "disk"."""
        state = self._states.get(request_id)
        return "disk" if state is not None and state.promoted else HOST

    # ------------------------------------------------------------------ stores

    def plan_step(
        self,
        scheduled: Iterable[tuple[str, Sequence[Sequence[int] | None] | None, bool]],
        num_tokens: Mapping[str, int],
        handed: Mapping[str, Iterable[tuple[int, int, int]]] = MappingProxyType({}),
    ) -> Orders:
        """The orders for the workers with the step that the engine schedules now.

        scheduled   for each request of the step: its id, its new blocks by group, and whether these are all its blocks,
                    because the request has lost the earlier ones
        num_tokens  tokens of the step, by request
        handed      by request: group, device block and number of tokens of each state that this or an earlier step
                    completes. Nothing overwrites the block while it has a user
        """
        prompt_tokens = 0
        for request_id, new_ids, again in scheduled:
            state = self._states.get(request_id)
            if state is None:
                continue
            if again:  # rule: resumed-request-has-new-blocks
                state.block_ids, state.seen, state.due = [[] for _ in self._groups], [0] * len(self._groups), 0
            for at, ids in enumerate(new_ids or ()):
                state.block_ids[at].extend(ids or ())
            count = num_tokens.get(request_id, 0)
            prompt_tokens += count if count > 1 else 0
            computed = state.request.num_computed_tokens + count
            if count and not state.loading:
                self._store(state, computed, touches=count > 1 and computed >= state.request.num_tokens)
        for request_id, states in handed.items():
            if (state := self._states.get(request_id)) is not None:
                self._store_states(state, states)
        self._step += 1
        if prompt_tokens >= _PREFILL_TOKENS and prompt_tokens == sum(num_tokens.values()):
            self._costs.began(self._step, prompt_tokens)
        sent = tuple(order.order() if isinstance(order, _Stores) else order for order in self._orders)
        most = max(num_tokens.values(), default=0)
        orders = Orders(self._step, self._resets, self._sent + 1, sent, most_tokens=most)
        self._sent += len(sent)
        self._orders, self._stores = [], None
        return orders

    def _store(self, state: _State, computed: int, *, touches: bool) -> None:
        """Order the store of the blocks that are complete once `computed` tokens are, and that no tier holds.

        touches   the whole prefix counts as just used; not with each chunk of a prompt, because prefixes are long
        """
        if computed < state.due:
            return
        state.extend_keys(self._groups, computed)
        ordered, state.due = False, inf
        for at, group in enumerate(self._groups):
            if group.handed:  # rule: state-is-stored-when-it-is-handed
                continue
            complete = min(computed // group.block_tokens, len(state.keys[at]), len(state.block_ids[at]))
            behind = group.blocks(0, state.request.num_computed_tokens).start if group.window else 0
            first = max(state.seen[at], behind)  # rule: block-behind-the-window-is-not-stored
            state.seen[at] = max(first, complete)
            while first < complete:
                room = self._most_held - self._holds.num_blocks
                stop = min(complete, first + max(1, room))  # a step without room looks at one block
                keys, ids = self._not_held(state.keys[at][first:stop], state.block_ids[at][first:stop])
                if keys and room <= 0:
                    self.counts.stores_put_off += 1
                    state.seen[at] = first  # rule: store-without-room-is-tried-again
                    break
                ordered |= self._order_store(state, at, range(first, stop), keys, ids)
                first = stop
            state.due = min(state.due, (state.seen[at] + 1) * group.block_tokens)
        if touches and ordered and self._stores is not None:
            first = self._prefix_group
            self._stores.prefix += state.keys[first][: state.seen[first]]

    def _store_states(self, state: _State, handed: Iterable[tuple[int, int, int]]) -> None:
        """Order the store of states, with or without room: they are few, and the engine may free their blocks next."""
        for at, block_id, num_tokens in handed:
            state.extend_keys(self._groups, num_tokens)
            blocks, rest = divmod(num_tokens, self._groups[at].block_tokens)
            if blocks <= len(state.keys[at]) and not rest:  # rule: state-is-stored-with-its-own-tokens
                keys, ids = self._not_held(state.keys[at][blocks - 1 : blocks], [block_id])
                self._order_store(state, at, range(blocks - 1, blocks), keys, ids)

    def _not_held(self, keys: Sequence[Key], block_ids: Sequence[int]) -> tuple[Sequence[Key], Sequence[int]]:
        """Those of the blocks that host memory neither holds nor gets, and that are not empty."""
        wanted = self._keys.outside_host_memory(keys)
        # The usual cases first, without a look at each block: a prefix that came back, and a new prompt.
        if not wanted:
            return (), ()
        if wanted is keys and 0 not in block_ids and self._holds.storing.isdisjoint(keys):
            return keys, block_ids
        wanted = set(wanted) - self._holds.storing
        found = [(key, block) for key, block in zip(keys, block_ids, strict=True) if block and key in wanted]
        return [key for key, _ in found], [block for _, block in found]

    def _order_store(
        self, state: _State, at: int, blocks: range, keys: Sequence[Key], block_ids: Sequence[int]
    ) -> bool:
        """Order the store of blocks with these keys, some of `blocks` of a group. Returns whether it is ordered."""
        if not keys or state.stale:  # rule: blocks-from-before-a-reset-are-not-stored
            return False
        if self._events is not None:
            first, stop = blocks.start, blocks.stop
            hashes = dict(zip(state.keys[at][first:stop], state.hashes(self._groups[at], first, stop), strict=True))
            self._events.ordered(at, {key: hashes[key] for key in keys})
        if (stores := self._stores) is None:
            stores = self._stores = _Stores(self._sent + len(self._orders) + 1)
            self._orders.append(stores)
        stores.keys += keys
        stores.block_ids += block_ids
        self._holds.add(stores.number, block_ids, keys)  # rule: store-holds-its-device-blocks
        self.counts.stores += len(keys)
        return True

    def request_ended(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """The request ended, and `block_ids`, all of its blocks by group, become free after this call."""
        state = self._states.pop(request_id, None)
        if state is not None and not state.loading:  # rule: blocks-of-an-unfinished-load-are-not-stored
            # A preempted request has lost the blocks of its last step.
            state.block_ids = [list(ids) for ids in block_ids]  # rule: ended-request-stores-its-own-blocks
            self._store(state, state.request.num_computed_tokens, touches=True)

    # ------------------------------------------------------------------ reports

    def take(self, report: Report) -> None:
        """Take over what a rank's worker has reported."""
        self._keys.apply(report.rank, report.changes)
        self._ranks_reset[report.rank] = max(self._ranks_reset[report.rank], report.resets)
        self._costs.seconds.update(report.seconds)
        self._settled[report.rank] = report.settled
        settled = self._holds.settle(min(self._settled))  # rule: blocks-are-held-until-all-ranks-settled
        if self._events is not None and report.rank == 0:
            self._events.changed(report.changes)
            self._events.settled(settled)
        for number in report.promoted:
            self._promotion_ended(number)
        for number, good in report.loaded.items():
            self._load_ended(number, good=good)
        if report.again:
            for state in self._states.values():  # blocks behind a sliding window may be of another request by now
                state.seen = [seen if group.window else 0 for seen, group in zip(state.seen, self._groups, strict=True)]
                state.due = 0
        self._costs.measure(report.step)

    def _promotion_ended(self, number: int) -> None:
        """With several ranks, the first one that ends decides: blocks that another rank still reads do not count."""
        state = self._states.get(self._promotions.pop(number, ""))
        if state is not None:
            state.promoting, state.promoted = 0, True

    def _load_ended(self, number: int, *, good: bool) -> None:
        load = self._loads[number]
        load.ranks -= 1
        state = self._states.get(load.request)
        if not good:
            self.counts.loads_failed += 1
            if state is not None:
                state.refused = True
        if not load.ranks:
            del self._loads[number]
            if state is not None and state.loading == number:
                state.loading = 0

    def reset(self) -> None:
        """Forget all blocks (hazard H8 in docs/glossary.md): none is found until the workers have forgotten them."""
        self._resets += 1
        self._keys = TierKeys(self._num_ranks)  # blocks that are computed from now on are stored again
        for state in self._states.values():
            state.stale = any(state.block_ids)
        # The workers give blocks that they store from now on to later requests.
        if self._stores is not None:
            self._stores.clear()  # rule: unsent-store-ends-with-a-reset
        self._holds.storing.clear()

    # ------------------------------------------------------------------ records

    def _state(self, request: PlannedRequest) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            groups = self._groups
            state = _State(request, [[] for _ in groups], [[] for _ in groups], [0] * len(groups))
            self._states[request.request_id] = state
        return state

    def _add(self, order: LoadOrder | PromoteOrder) -> int:
        """Send an order with the next step. Returns its number."""
        self._orders.append(order)
        return self._sent + len(self._orders)
