"""Replays traces of hash ids on simulated tiers: which policy of eviction and of writing finds most blocks again, and
what it writes for that.

A trace has a JSON object for each request and line, with `hash_ids`: one number for each block of the prompt, equal if
all tokens up to the block's end are (the format of Mooncake's public traces). A request reuses its leading blocks
that any tier holds; the rest is computed. Host memory is small and evicts the least recently used block. Behind it is a
larger tier, whose policies are compared:

    evict   lru, fifo, s3fifo (Yang et al. 2023), arc (Megiddo and Modha 2003)
    write   through: every new block; second: a block that was computed before; evicted: a block that leaves host
            memory; returning: a block that leaves host memory, and was reused there, computed before, or part of a
            request that reused a third of its prompt; reused: every new block until the tier is full, then the same
            blocks as returning, but at once: when they are reused in host memory, or computed (what the disk does by
            default)
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Protocol

from proof.report import Figure
from sidestream.errors import ConfigError

Request = Sequence[int]

_S3_SMALL = 0.1
_REMEMBERED = 4  # keys of computed blocks that `second` remembers, for each block of the tier
_WRITES = ("through", "second", "evicted", "returning", "reused")
_RETURNING = 3  # a request returns if it reuses its prompt's length, divided by this


class Cache(Protocol):
    """A set of keys with a bound. `capacity` is at least 2."""

    def __init__(self, capacity: int) -> None: ...

    def __contains__(self, key: int) -> bool: ...

    def use(self, keys: Sequence[int]) -> None:
        """The leading keys of a sequence were used; those that are not held are skipped."""

    def add(self, key: int) -> object:
        """Hold a key that is not held."""


class Lru:
    """Evicts the least recently used key; of one sequence, the last one first, which is useless without the others."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def use(self, keys: Sequence[int]) -> None:
        """See `Cache`."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def add(self, key: int) -> int | None:
        """See `Cache`. Returns the evicted key."""
        self._keys[key] = None
        return self._keys.popitem(last=False)[0] if len(self._keys) > self._capacity else None


class Fifo(Lru):
    """Evicts the key that was added first."""

    def use(self, keys: Sequence[int]) -> None:
        """See `Cache`."""


class S3Fifo:
    """Three queues: keys that were used once leave the small one early, and are remembered without their blocks."""

    def __init__(self, capacity: int) -> None:
        self._small_capacity = max(1, int(_S3_SMALL * capacity))
        self._capacity = capacity
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._uses

    def use(self, keys: Sequence[int]) -> None:
        """See `Cache`."""
        for key in keys:
            if key in self._uses:
                self._uses[key] = min(3, self._uses[key] + 1)

    def add(self, key: int) -> None:
        """See `Cache`."""
        while len(self._uses) >= self._capacity:
            self._evict_one()
        queue = self._main if key in self._ghosts else self._small
        self._ghosts.pop(key, None)
        queue[key] = None
        self._uses[key] = 0

    def _evict_one(self) -> None:
        if len(self._small) >= self._small_capacity or not self._main:
            key, _ = self._small.popitem(last=False)
            if self._uses[key] > 1:
                self._main[key] = None
                return
            self._ghosts[key] = None
            if len(self._ghosts) > self._capacity:
                self._ghosts.popitem(last=False)
        else:
            key, _ = self._main.popitem(last=False)
            if self._uses[key]:
                self._uses[key] -= 1
                self._main[key] = None
                return
        del self._uses[key]


class Arc:
    """Two lists, of keys that were used once and of those used more often, whose sizes follow from evicted keys that
    come back.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._aim = 0.0  # of the first list
        self._once, self._more, self._once_ghosts, self._more_ghosts = (OrderedDict[int, None]() for _ in range(4))

    def __contains__(self, key: int) -> bool:
        return key in self._once or key in self._more

    def use(self, keys: Sequence[int]) -> None:
        """See `Cache`."""
        for key in reversed(keys):
            if key in self._once:
                del self._once[key]
                self._more[key] = None
            elif key in self._more:
                self._more.move_to_end(key)

    def add(self, key: int) -> None:
        """See `Cache`."""
        once, more = len(self._once_ghosts), len(self._more_ghosts)
        came_back = key in self._once_ghosts or key in self._more_ghosts
        if key in self._once_ghosts:
            self._aim = min(self._capacity, self._aim + max(1.0, more / once))
        elif key in self._more_ghosts:
            self._aim = max(0.0, self._aim - max(1.0, once / more))
        if len(self._once) + len(self._more) >= self._capacity:
            self._evict_one(prefer_once=key in self._more_ghosts)
        self._once_ghosts.pop(key, None)
        self._more_ghosts.pop(key, None)
        (self._more if came_back else self._once)[key] = None
        for ghosts in (self._once_ghosts, self._more_ghosts):
            if len(ghosts) > self._capacity:
                ghosts.popitem(last=False)

    def _evict_one(self, *, prefer_once: bool) -> None:
        size = len(self._once)
        if self._once and (size > self._aim or (prefer_once and size == self._aim) or not self._more):
            self._once_ghosts[self._once.popitem(last=False)[0]] = None
        else:
            self._more_ghosts[self._more.popitem(last=False)[0]] = None


EVICTIONS: dict[str, type[Cache]] = {"lru": Lru, "fifo": Fifo, "s3fifo": S3Fifo, "arc": Arc}


def measure(
    *, traces: Sequence[Path], share: float, host_share: float, on_progress: Callable[[str], None]
) -> list[Figure]:
    """For each trace and pair of policies: the share of blocks that were reused, and blocks written for each block that
    was read. The tier holds `share` of a trace's distinct blocks, and host memory `host_share` of them.
    """
    figures = []
    for name, requests in [*((path.stem, _read(path)) for path in traces), ("agents", [*agents()])]:
        distinct = len({key for request in requests for key in request})
        sizes = max(2, int(host_share * distinct)), max(2, int(share * distinct))
        figures.append(Figure(f"{name}_blocks", sum(map(len, requests)), "blocks"))
        figures.append(
            Figure(f"{name}_most_reusable", _replayed(requests, "lru", "through", distinct, 2)[0], "of blocks")
        )
        shares, writes = dict[tuple[str, str], float](), dict[tuple[str, str], int]()
        for evict, write in product(EVICTIONS, _WRITES):
            on_progress(f"{name}: {evict}, {write}")
            reused, written, read = _replayed(requests, evict, write, sizes[1], sizes[0])
            shares[evict, write], writes[evict, write] = reused, written
            label = f"{name}_{evict}_{write}"
            figures.append(Figure(f"{label}_reused", reused, "of blocks"))
            figures.append(Figure(f"{label}_written_over_read", written / max(1, read), "blocks"))
        ours, through = ("lru", "reused"), ("lru", "through")
        figures += [
            Figure(f"{name}_default_reused_over_lru", shares[ours] / max(1e-9, shares[through]), "ratio"),
            Figure(f"{name}_default_reused_over_best", shares[ours] / max(1e-9, *shares.values()), "ratio"),
            Figure(f"{name}_default_written_over_through", writes[ours] / max(1, writes[through]), "ratio"),
        ]
    return figures


def _read(path: Path) -> list[Request]:
    try:
        with path.open(encoding="utf-8") as lines:
            requests: list[Request] = [tuple(json.loads(line)["hash_ids"]) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no trace: each line must be a JSON object with hash_ids ({error!r})") from error
    if not requests:
        raise ConfigError(f"{path} is empty: each line must be a JSON object with hash_ids")
    return requests


def agents(*, sessions: int = 300, seed: int = 0) -> Iterator[Request]:
    """Requests of agents: each session has a system prompt that many share, and grows by each turn; between them come
    prompts that never come back.
    """
    drawn, fresh = random.Random(seed), iter(range(10**9))
    systems = [[*islice(fresh, drawn.randrange(8, 40))] for _ in range(12)]
    talks: list[tuple[list[int], int]] = []
    while sessions or talks:
        if sessions and len(talks) < 40:
            sessions -= 1
            talks.append(([*drawn.choice(systems)], drawn.randrange(2, 30)))
        if drawn.random() < 0.3:
            yield [*islice(fresh, drawn.randrange(10, 120))]
        at = (
            drawn.randrange(len(talks))
            if drawn.random() < 0.3
            else len(talks) - 1 - min(len(talks) - 1, int(drawn.expovariate(0.3)))
        )
        prompt, left = talks[at]
        prompt += islice(fresh, drawn.randrange(1, 8))
        yield tuple(prompt)
        if left > 1:
            talks[at] = prompt, left - 1
        else:
            del talks[at]


def _replayed(
    requests: Iterable[Request], evict: str, write: str, capacity: int, host_capacity: int
) -> tuple[float, int, int]:
    """The share of blocks that were reused, and the blocks that the tier behind host memory wrote and read."""
    host, tier, computed = Lru(host_capacity), EVICTIONS[evict](capacity), Lru(_REMEMBERED * capacity)
    proven = set[int]()  # blocks that `returning` writes
    blocks = reused = written = read = 0
    for request in requests:
        hits = next((at for at, key in enumerate(request) if key not in host and key not in tier), len(request))
        blocks += len(request)
        reused += hits
        tier.use(request[:hits])
        host.use(request[:hits])
        stored, free = [], capacity - written
        for at, key in enumerate(request):
            read += at < hits and key not in host
            if at < hits or key in computed or hits * _RETURNING > len(request):
                proven.add(key)
            if write == "reused" and at < hits and key in host:
                stored.append(key)
            gone = host.add(key) if key not in host else None
            if gone is not None and (write == "evicted" or (write == "returning" and gone in proven)):
                stored.append(gone)
            if at >= hits:
                worth = hits * _RETURNING > len(request) or len(stored) < free
                again = key in computed or (write == "reused" and worth)
                if write == "through" or (write in ("second", "reused") and again):
                    stored.append(key)
                if key not in computed:
                    computed.add(key)
        host.use(request)
        for key in reversed(stored):  # the beginning of a sequence is evicted last
            if key not in tier:
                written += 1
                tier.add(key)
    return reused / blocks, written, read
