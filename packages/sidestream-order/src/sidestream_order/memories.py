"""Records the accesses to the bytes of all memories, and checks each access against earlier accesses.

Reports races, reads of unwritten bytes, and accesses beyond the end of a memory. Asks `Leases` whether an id was leased
when work used it. Has no lock: the caller (`Checker`) holds one.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestream_kv.types import Access
from sidestream_order.findings import Report
from sidestream_order.leases import Leases
from sidestream_order.shadow import Cell, Clock, Op, Read, Shadow, Written


class Memories:
    """The memories of one device.

    An access is checked in two steps: `declare` when the work is submitted, because a lease must be open at that time,
    and `apply` when the work runs, because its clock is known only then.

    shadows   the records of each memory, by its name
    """

    def __init__(self, leases: Leases, report: Report) -> None:
        self._leases = leases
        self._report = report
        self.shadows: dict[str, Shadow] = {}
        self._sizes: dict[str, int] = {}
        self._knows_all = False

    def allocate(self, memory: str, num_bytes: int) -> None:
        """Record the size of a memory."""
        self._sizes[memory] = num_bytes

    def refuse_unknown(self) -> None:
        self._knows_all = True

    def shadow(self, memory: str) -> Shadow:
        """The records of a memory."""
        shadow = self.shadows.get(memory)
        if shadow is None:
            shadow = self.shadows[memory] = Shadow(memory)
        return shadow

    def part(self, memory: str, first: int) -> Shadow:
        """The records of a pool's bytes. If `first` is not 0, the pool's bytes begin there, and get records of their
        own.
        """
        shadow = self.shadow(memory)
        if first:
            while shadow.beyond is not None:
                shadow = shadow.beyond
            shadow.beyond = Shadow(memory, first)
            shadow = shadow.beyond
        return shadow

    def num_cells(self) -> int:
        """Number of byte ranges with records. Does not count the later parts of a memory (`Shadow.beyond`)."""
        return sum(len(shadow.cells) for shadow in self.shadows.values())

    def declare(self, op: Op, accesses: Sequence[Access], *, late: bool = False) -> tuple[list[Written], list[Read]]:
        """Check leases and bounds of accesses. Returns the writes and the reads, split at the borders of ids.

        late   True: the work is running already
        """
        writes: list[Written] = []
        reads: list[Read] = []
        shadows, stream = self.shadows, op.stream
        for access in accesses:
            start, stop, write = access.start, access.stop, access.write
            if not 0 <= start <= stop <= self._sizes.get(access.memory, -1):
                self._check_bounds(op, access)
            shadow = shadows.get(access.memory) or self.shadow(access.memory)
            while shadow.beyond is not None and start >= shadow.beyond.first:
                shadow = shadow.beyond
            size, first = shadow.item_bytes or stop, shadow.first
            while start < stop:
                number, written_after = (start - first) // size, 0
                upto = first + (number + 1) * size
                if upto > stop:
                    upto = stop
                if shadow.item_bytes:
                    item = shadow.items.get(number)
                    if late or item is None or item.lease is None or (write and item.published):
                        written_after = self._leases.use(op, shadow, number, (shadow.memory, start, upto), write=write)
                    else:  # the usual case: the id is leased
                        item.users[stream] = op
                        if write:
                            item.writers[stream] = op
                        written_after = item.taken
                if write:
                    writes.append((shadow, start, upto))
                else:
                    reads.append((shadow, start, upto, written_after))
                start = upto
        return writes, reads

    def _check_bounds(self, op: Op, access: Access) -> None:
        """Report an access to bytes that its memory does not have. The ids of a tier without memory have no bound."""
        size, shadow = self._sizes.get(access.memory), self.shadows.get(access.memory)
        if size is not None or (self._knows_all and (shadow is None or not shadow.pool)):
            self._report.beyond(op, access, size)

    def apply(self, op: Op, clock: Clock, writes: list[Written], reads: list[Read]) -> None:
        """Compare accesses that happen now with earlier accesses, and record them.

        clock   the work that happens before `op`
        """
        known = clock.get
        # Writes first: work may read the bytes that it writes.
        for shadow, start, stop in writes:
            cell = shadow.cells.get(start)
            if cell is None or cell.stop != stop:
                cells = shadow.carve(start, stop)
                for part in cells:
                    self._check_write(op, clock, shadow, part)
                cell = shadow.join(cells)
                cell.reads = {}
            elif cell.reads:
                self._check_write(op, clock, shadow, cell)
                cell.reads = {}
            elif (last := cell.write) is not None and last.tick > known(last.stream, 0):
                self._check_write(op, clock, shadow, cell)
            cell.write = op
        stream = op.stream
        for shadow, start, stop, written_after in reads:
            cell = shadow.cells.get(start)
            for part in (cell,) if cell is not None and cell.stop == stop else shadow.carve(start, stop):
                last = part.write
                if last is None or last.seq < written_after:
                    self._report.unwritten(op, shadow, part)
                elif last.tick > known(last.stream, 0):
                    self._report.race(op, False, last, True, clock, (shadow.memory, part.start, part.stop))
                part.reads[stream] = op

    def _check_write(self, op: Op, clock: Clock, shadow: Shadow, cell: Cell) -> None:
        where, last = (shadow.memory, cell.start, cell.stop), cell.write
        if last is not None and last.tick > clock.get(last.stream, 0):
            self._report.race(op, True, last, True, clock, where)
        for read in cell.reads.values():
            if read.tick > clock.get(read.stream, 0):
                self._report.race(op, True, read, False, clock, where)
