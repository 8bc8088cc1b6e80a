"""Messages between the two sides of a connector in another engine: the scheduler's side (`planner`) sends Orders with
every step, and the worker of each rank (`carrier`) answers with a Report. Plain values that can be pickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from sidestream_kv.kv.key_log import KeyChange, KeysRemoved, KeysStored
from sidestream_kv.types import HOST, Key


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Store these blocks, which the step of this order or an earlier step completes.

    prefix  keys of the sequence up to the last of these blocks, to mark as just used; may be empty
    """

    keys: tuple[Key, ...]
    block_ids: tuple[int, ...]
    prefix: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load these blocks, which no step uses before the engine is told that the request's KV has arrived."""

    request: str
    keys: tuple[Key, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromoteOrder:
    """Read these blocks into host memory."""

    keys: tuple[Key, ...]


Order = StoreOrder | LoadOrder | PromoteOrder


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker has to do with one step.

    step         number of the step
    resets       number of cache resets before the orders; the worker forgets all blocks whenever it grows
    first        number of the first order: all orders of an engine are numbered one after another
    most_tokens  most tokens that the step computes for a request; 0: it computes nothing, because all requests wait
    """

    step: int = 0
    resets: int = 0
    first: int = 1
    orders: tuple[Order, ...] = ()
    most_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank's worker saw since its last report.

    step      number of the last step whose orders the worker got
    resets    number of cache resets that the tiers have executed
    changes   keys that became findable or unfindable in a tier, in order
    settled   the orders up to this number use no device block any more
    promoted  numbers of the promotions that ended
    loaded    by the number of the load: whether it succeeded
    again     whether stores that found no slot would find one now, because host memory has grown
    seconds   by tier: latency of a transfer, and seconds for each block
    """

    rank: int
    step: int
    resets: int
    changes: tuple[KeyChange, ...] = ()
    settled: int = 0
    promoted: tuple[int, ...] = ()
    loaded: Mapping[int, bool] = field(default_factory=dict)
    again: bool = False
    seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class TierKeys:
    """The scheduler's copy of the keys that the tiers of each rank hold. It lags behind by a step, so a load may find
    that a block was evicted meanwhile.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks: list[dict[str, set[Key]]] = [{HOST: set()} for _ in range(num_ranks)]
        self._hosts = [tiers[HOST] for tiers in self._ranks]
        self._has_others = False  # whether any rank has reported keys of another tier

    def apply(self, rank: int, changes: Sequence[KeyChange]) -> None:
        """Take over what a rank's worker has reported."""
        tiers = self._ranks[rank]
        for change in changes:
            if isinstance(change, KeysStored):
                if change.tier not in tiers:
                    tiers[change.tier], self._has_others = set(), True
                tiers[change.tier].update(change.keys)
            elif isinstance(change, KeysRemoved) and change.tier in tiers:  # rule: removed-keys-leave-the-planner
                tiers[change.tier].difference_update(change.keys)

    def outside_host_memory(self, keys: Sequence[Key]) -> Collection[Key]:
        """Those of the keys whose blocks any rank does not have in host memory."""
        # The usual cases first, without a set of all keys: a new prompt, and a prefix that came back.
        if self._hosts[0].isdisjoint(keys):
            return keys
        for host in self._hosts:
            if not host.issuperset(keys):
                asked = set(keys)
                return set[Key]().union(*(asked - host for host in self._hosts))
        return ()

    def missing(self, keys: Sequence[Key]) -> Collection[Key]:
        """Those of the keys whose blocks any rank has in no tier."""
        outside = self.outside_host_memory(keys)
        if not outside or not self._has_others:
            return outside
        # rule: block-counts-if-every-rank-has-it
        return set[Key]().union(*(reduce(set.difference, tiers.values(), set(outside)) for tiers in self._ranks))

    def counts(self, keys: Sequence[Key]) -> Counter[str]:
        """How many of these blocks, which all ranks have, must be read from each tier: one that a rank lacks in host
        memory counts for the first tier that has it.
        """
        left = set(self.outside_host_memory(keys)) if self._has_others else set()
        found = Counter({HOST: len(keys) - len(left)})
        for tier, held in (named for tiers in self._ranks for named in tiers.items() if left):
            if tier != HOST:
                found[tier] += len(left & held)
                left -= held
        return found
