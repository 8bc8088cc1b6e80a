"""Records the last accesses to bytes and ids, and the leases that covered them. Contains no rules, and knows neither
devices nor pools.

A memory is a map of cells, which are split where accesses begin and end, so that overlapping accesses are compared byte
by byte. Called by the checker only, under its lock.
"""

from __future__ import annotations

import importlib.util
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType

import sidestream.device
from sidestream.types import Access, Fence

HOST = "host"

Clock = dict[str, int]
"""A vector clock: for each stream and for the host, the tick up to which all work is known to be done. Never changed in
place, because clocks are shared.
"""

Site = tuple[CodeType, int]
"""A call site: code and instruction. Cheap to record; the line number is computed for messages only."""

# Findings name the caller of these files.
_TORCH = importlib.util.find_spec("torch")  # not imported here
_ROOM = Path(sidestream.device.__file__).parent
_PASSED_OVER = (
    str(_ROOM),
    *(
        str(_ROOM.parent / name)
        for name in ("testing/checker.py", "testing/check_trace", "kv/pool.py", "offload/tiers/index.py")
    ),
    *((_TORCH.submodule_search_locations if _TORCH is not None else None) or ()),
)
_hidden_files: dict[str, bool] = {}


def hide_frames_of(path: str) -> None:
    """Findings name the caller of this file's functions, not the file itself."""
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
    """`file:line function`, the file with its directory."""
    code, at = site
    line = next((line for start, stop, line in code.co_lines() if start <= at < stop), None)
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line or code.co_firstlineno} {code.co_name}"


class Op:
    """One piece of work of a stream, or one access by the host, which is done at once.

    seq            position among all submissions, accesses and lease events
    before         the host's clock at its submission; None once it is done
    final          the clock that a host gets by waiting for it; None before it is done, and after every host knows it
    failure        the exception of the work, for messages
    declared       all accesses that it has declared so far; empty once it is done
    writes, reads  accesses declared at its start: memory, start, stop; for reads also the `seq` after which the bytes
                   must have been written
    verdicts       releases that may turn out to be correct once this work's waits are known
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
    """A release that was too early unless one of `awaited` turns out to come after `use`."""

    __slots__ = ("awaited", "report", "use")

    def __init__(self, use: Op, awaited: int, report: Callable[[], None]) -> None:
        self.use = use
        self.awaited = awaited
        self.report = report


class Cell:
    """A byte range with one access history: its last write, and each stream's last read since."""

    __slots__ = ("reads", "start", "stop", "write")

    def __init__(self, start: int, stop: int, write: Op | None = None, reads: dict[str, Op] | None = None) -> None:
        self.start = start
        self.stop = stop
        self.write = write
        self.reads: dict[str, Op] = reads or {}

    def ops(self) -> list[Op]:
        """The last accesses."""
        return [*self.reads.values()] if self.write is None else [self.write, *self.reads.values()]


class Lease:
    """One period in which an id was leased: from the first lease until no lease is left. Further leases in this period
    change only the count.

    since, until   `seq` at its begin and at its end; until 0: still leased
    taken          `seq` at which the id was last taken for new contents
    after          the fences of its releases, once it has ended
    site           call site of the last release
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
    lease       the current period; None: the id is not leased
    past        ended periods, kept while work submitted during them may still declare accesses
    taken       `seq` at which its contents were last discarded
    published   `seq` at which it became findable; 0: it is not findable
    users       the last work of each stream that accesses it since it was taken, and the last work of each that writes
    after       the last fence of each stream given with a release
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
        """Record that `op` accesses it. Running work may declare an access after later work was submitted."""
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
        """The work that accesses it, and the fences that its next owner must wait for."""
        return [*self.users.values(), *self.after.values()]

    def lease_at(self, seq: int) -> Lease | None:
        """The period in which something was submitted; None: the id was not leased."""
        if self.lease is not None and self.lease.since < seq:
            return self.lease
        return next((lease for lease in reversed(self.past) if lease.since < seq < lease.until), None)


class Shadow:
    """One memory, or a part of it: its cells, and the pool whose ids represent its bytes, if there is one.

    first        first byte of the part
    item_bytes   bytes of one id; 0: there is no pool
    beyond       the next part of the memory, if that part belongs to another pool
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
            if begin > here:  # not accessed before
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
        """Merge neighbouring cells that the next write covers."""
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
    """Ids of one pool, and their memory, once it was reported."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: dict[int, Item] = {}
        self.shadow: Shadow | None = None

    def back(self, shadow: Shadow, item_bytes: int) -> None:
        """Record that the pool's ids represent bytes of `shadow`."""
        self.shadow = shadow
        shadow.pool, shadow.item_bytes, shadow.items = self.name, item_bytes, self.items

    def span(self, number: int) -> tuple[str, int, int]:
        """Memory, start and stop of an id; pool name and id if its memory is not known."""
        if self.shadow is None:
            return self.name, number, number + 1
        size, first = self.shadow.item_bytes, self.shadow.first
        return self.shadow.memory, first + number * size, first + (number + 1) * size

    def sweep(self, floor: Clock, oldest: int) -> None:
        """Delete free ids to which no later event can refer, because pools may use new ids without end.

        All future events know `floor`, and none of them was submitted before `oldest`.
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
