"""The checker's records: the last accesses to each byte range and id, and the leases of each id. The rules are checked
elsewhere (`Leases`, `Memories`).

An id is a block or slot number of a pool; a lease keeps an id from reuse; an id is findable while its key is in a cache
index. `seq` numbers all submissions, host accesses and lease events in one order.

A memory is a list of cells (byte ranges). Cells are split where accesses begin and end, so that overlapping accesses
are compared byte by byte. Called by the checker only, under its lock.
"""

from __future__ import annotations

import importlib.util
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType

import sidestream_kv.device
from sidestream_kv.types import Access, Fence

HOST = "host"

Clock = dict[str, int]
"""A vector clock: for each stream and each host, the tick (work number) up to which all work is known to be done. A
clock that work keeps (`Op.before`, `Op.final`) is never changed in place, because others may keep it too.
"""

Site = tuple[CodeType, int]
"""A call site: code and instruction offset. To save time, the line number is computed only for messages."""

# Findings name the first caller outside these files as the call site.
_TORCH = importlib.util.find_spec("torch")  # finds torch without the slow import
_ROOM = Path(sidestream_kv.device.__file__).parent
_PASSED_OVER = (
    str(_ROOM),
    *(str(_ROOM.parent / name) for name in ("kv/pool.py", "offload/tiers/index.py")),
    *(str(Path(__file__).parent / name) for name in ("checker.py", "check_trace", "sim")),
    *((_TORCH.submodule_search_locations if _TORCH is not None else None) or ()),
)
_hidden_files: dict[str, bool] = {}


def hide_frames_of(path: str) -> None:
    """Let findings name the caller of this file's functions as the call site, not the file itself."""
    _hidden_files[path] = True


def calling_site() -> Site:
    """The call site outside the device, the pool and the checker."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        hidden = _hidden_files.get(name)
        if hidden is None:
            hidden = _hidden_files[name] = name.startswith(_PASSED_OVER)
        if not hidden:
            break
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


@lru_cache(maxsize=1024)
def read_site(site: Site) -> str:
    """The call site as `directory/file:line function`."""
    code, at = site
    line = next((line for start, stop, line in code.co_lines() if start <= at < stop), None)
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line or code.co_firstlineno} {code.co_name}"


class Op:
    """One operation: a piece of work on a stream, or an access by the host, which is done immediately.

    seq            position in the order of all events
    before         the host's clock at the submission; None after the end
    final          the clock that a stream or host merges into its own when it waits for this work; None before the end,
                   and after the record was pruned
    failure        the exception of the work, as text for messages
    declared       all accesses that the work has declared so far; empty after the end
    writes, reads  accesses declared at the submission: memory, start, stop; for a read also the `seq` after which the
                   bytes must have been written
    verdicts       suspected early releases, decided when this work ends and its clock is known
    """

    __slots__ = (
        "before",
        "declared",
        "failure",
        "final",
        "label",
        "over",
        "reads",
        "seq",
        "site",
        "stream",
        "tick",
        "verdicts",
        "writes",
    )

    def __init__(self, stream: str, tick: int, seq: int, label: str, site: Site, before: Clock | None) -> None:
        self.stream = stream
        self.tick = tick
        self.seq = seq
        self.label = label
        self.site = site
        self.before = before
        self.final: Clock | None = None
        self.over = False
        self.failure: str | None = None
        self.declared: Sequence[Access] = ()
        self.writes: list[Written] = []
        self.reads: list[Read] = []
        self.verdicts: list[Verdict] = []

    @property
    def place(self) -> str:
        """Call site and label, for messages."""
        return f"{read_site(self.site)}, `{self.label}`"

    @property
    def position(self) -> str:
        """`stream:tick`, or the host."""
        return HOST if self.stream == HOST else f"{self.stream}:{self.tick}"

    def __str__(self) -> str:
        return f"`{self.label}` ({self.position}, {read_site(self.site)})"


class Verdict:
    """A suspected early release. It is reported if no awaited fence turns out to come after `use`.

    awaited   number of fences given with the release that are not done yet; 0: decided
    """

    __slots__ = ("awaited", "report", "use")

    def __init__(self, use: Op, awaited: int, report: Callable[[], None]) -> None:
        self.use = use
        self.awaited = awaited
        self.report = report


class Cell:
    """A byte range with one access history: the last write, and the last read of each stream since that write."""

    __slots__ = ("reads", "start", "stop", "write")

    def __init__(self, start: int, stop: int, write: Op | None = None, reads: dict[str, Op] | None = None) -> None:
        self.start = start
        self.stop = stop
        self.write = write
        self.reads: dict[str, Op] = reads or {}

    def ops(self) -> list[Op]:
        """The operations of the last accesses."""
        return [*self.reads.values()] if self.write is None else [self.write, *self.reads.values()]


class Lease:
    """One period in which an id was leased without interruption. Several leases may overlap in one period
    (`Item.leases` counts them).

    since, until   `seq` at the begin and at the end; until 0: still leased
    taken          `seq` at which the pool last handed out the id for new contents
    after          the fences given with the releases, after the end
    site           call site of the first lease; after the end, of the last release
    """

    __slots__ = ("after", "since", "site", "taken", "until")

    def __init__(self, since: int, taken: int, site: Site) -> None:
        self.since = since
        self.taken = taken
        self.until = 0
        self.after: tuple[Fence, ...] = ()
        self.site = site


class Item:
    """One id of a pool.

    leases      number of open leases
    lease       the current leased period; None: the id is not leased
    past        ended periods, kept as long as work that was submitted during them is unfinished
    taken       `seq` at which the pool last handed out the id, which discards the contents
    published   `seq` at which it became findable; 0: it is not findable
    users       by stream: the last work that uses the id since `taken`. `writers`: the last work that writes the id
    after       by stream: the last fence given with a release
    """

    __slots__ = ("after", "lease", "leases", "number", "past", "published", "taken", "users", "writers")

    def __init__(self, number: int) -> None:
        self.number = number
        self.leases = 0
        self.lease: Lease | None = None
        self.past: list[Lease] = []
        self.taken = 0
        self.published = 0
        self.users: dict[str, Op] = {}
        self.writers: dict[str, Op] = {}
        self.after: dict[str, Fence] = {}

    def note(self, op: Op, write: bool) -> None:
        """Record that `op` accesses the id. Running work may declare an access after later work of its stream did, so
        the later work stays recorded.
        """
        for ops in (self.users, self.writers) if write else (self.users,):
            last = ops.get(op.stream)
            if last is None or last.tick < op.tick:
                ops[op.stream] = op

    def add_after(self, fences: Iterable[Fence]) -> None:
        """Keep the last fence of each stream."""
        for fence in fences:
            known = self.after.get(fence.stream)
            if known is None or known.tick < fence.tick:
                self.after[fence.stream] = fence

    def last_uses(self) -> list[Op | Fence]:
        """The work that uses the id, and the fences that the next owner must wait for."""
        return [*self.users.values(), *self.after.values()]

    def lease_at(self, seq: int) -> Lease | None:
        """The leased period that contains the event `seq`; None: the id was not leased at that event."""
        if self.lease is not None and self.lease.since < seq:
            return self.lease
        return next((lease for lease in reversed(self.past) if lease.since < seq < lease.until), None)


class Shadow:
    """One memory, or a part of it: its cells, and the pool that divides its bytes into ids, if there is one.

    first        offset of the part's first byte in the memory
    item_bytes   bytes of one id; 0: there is no pool
    beyond       the next part of the memory, which belongs to another pool; None: there is none
    """

    def __init__(self, memory: str, first: int = 0) -> None:
        self.memory = memory
        self.first = first
        self.beyond: Shadow | None = None
        self.pool = ""
        self.item_bytes = 0
        self.items: dict[int, Item] = {}
        self.cells: dict[int, Cell] = {}
        self._starts: list[int] = []

    def carve(self, start: int, stop: int) -> list[Cell]:
        """The cells that cover exactly `[start, stop)`; splits cells and creates missing ones."""
        starts, cells = self._starts, self.cells
        at = bisect_right(starts, start) - 1
        if at >= 0 and starts[at] < start < cells[starts[at]].stop:
            self._split(at, start)
        at = bisect_left(starts, start)
        found, here = [], start
        while here < stop:
            begin = starts[at] if at < len(starts) else stop
            if begin > here:  # a gap: bytes that were never accessed
                cells[here] = Cell(here, min(begin, stop))
                starts.insert(at, here)
            elif cells[here].stop > stop:
                self._split(at, stop)
            found.append(cells[here])
            here = found[-1].stop
            at += 1
        return found

    def span(self, start: int, stop: int) -> list[Cell]:
        """The cells that overlap `[start, stop)`, without splitting or creating any."""
        cell = self.cells.get(start)
        if cell is not None and cell.stop == stop:
            return [cell]
        first = max(0, bisect_right(self._starts, start) - 1)
        cells = (self.cells[at] for at in self._starts[first : bisect_left(self._starts, stop)])
        return [cell for cell in cells if cell.stop > start]

    def join(self, cells: list[Cell]) -> Cell:
        """Merge adjacent cells into one, because the next write covers all of them."""
        first, last = cells[0], cells[-1]
        if first is not last:
            at = bisect_left(self._starts, first.start)
            for cell in cells[1:]:
                del self.cells[cell.start]
            del self._starts[at + 1 : at + len(cells)]
            first.stop = last.stop
        return first

    def drop(self, gone: set[int]) -> None:
        """Delete the cells with these starts."""
        if gone:
            for start in gone:
                del self.cells[start]
            self._starts = [start for start in self._starts if start not in gone]

    def _split(self, at: int, where: int) -> None:
        cell = self.cells[self._starts[at]]
        self.cells[where] = Cell(where, cell.stop, cell.write, dict(cell.reads))
        self._starts.insert(at + 1, where)
        cell.stop = where


class Pool:
    """Ids of one pool. `shadow` holds the records of the pool's memory; None: the pool has not reported a memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: dict[int, Item] = {}
        self.shadow: Shadow | None = None

    def back(self, shadow: Shadow, item_bytes: int) -> None:
        """Record that the pool divides the bytes of `shadow` into ids."""
        self.shadow = shadow
        shadow.pool, shadow.item_bytes, shadow.items = self.name, item_bytes, self.items

    def span(self, number: int) -> tuple[str, int, int]:
        """Memory, start and stop of an id. Without a memory: the pool's name, the id, and the id + 1."""
        if self.shadow is None:
            return self.name, number, number + 1
        size, first = self.shadow.item_bytes, self.shadow.first
        return self.shadow.memory, first + number * size, first + (number + 1) * size

    def sweep(self, floor: Clock, oldest: int) -> None:
        """Delete free ids to which no later event can refer. Otherwise records would grow for ever: some pools never
        reuse an id.

        floor    all unfinished and future work happens after this clock
        oldest   `seq` of the oldest unfinished work
        """
        gone: set[int] = set()
        for item in list(self.items.values()):
            if item.lease is not None or item.published or any(lease.until > oldest for lease in item.past):
                continue
            _, start, stop = self.span(item.number)
            cells = [] if self.shadow is None else self.shadow.span(start, stop)
            inside = all(start <= cell.start and cell.stop <= stop for cell in cells)
            if inside and all(
                _is_known(last, floor) for last in (*item.last_uses(), *(op for cell in cells for op in cell.ops()))
            ):
                gone.update(cell.start for cell in cells)
                del self.items[item.number]
        if self.shadow is not None:
            self.shadow.drop(gone)


def learn(clock: Clock, other: Clock) -> None:
    """Merge `other` into `clock`."""
    for name, tick in other.items():
        if tick > clock.get(name, 0):
            clock[name] = tick


def _is_known(last: Op | Fence, clock: Clock) -> bool:
    return last.tick <= clock.get(last.stream, 0)


Written = tuple[Shadow, int, int]
Read = tuple[Shadow, int, int, int]
