"""Writes the messages of the checker's findings. A message is one sentence that names the broken rule, the work, its
call sites, its streams and the bytes. Called by the checker only, under its lock.

An id is a block or slot number of a pool; a lease keeps an id from reuse; an id is findable while its key is in a cache
index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidestream_kv.types import Access
from sidestream_order.shadow import HOST, Cell, Clock, Item, Lease, Op, Pool, Shadow, Site

Where = tuple[str, int, int]
"""Memory, start and stop. If the pool has no memory: pool name, block id, block id + 1."""

_LISTED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that was broken.

    kind            see `sidestream_order.checker`
    message         the finding as a sentence
    first, second   `file:line function, label` of the two operations, in the order of submission; `second` is empty for
                    a finding about one operation
    streams         the stream of each operation, in the same order
    works           `stream:tick` of each operation, or `"host"`, in the same order
    accesses        `"reads"` or `"writes"` for each operation; empty for kinds that are not about an access
    memory, start, stop   the bytes. If the pool has no memory: pool name, block id, block id + 1
    """

    kind: str
    message: str
    first: str
    second: str
    streams: tuple[str, ...]
    works: tuple[str, ...]
    accesses: tuple[str, ...]
    memory: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Report:
    """The findings of one run, at most `max_findings`. The same pair of call sites is reported once for each kind and
    memory.
    """

    def __init__(self, max_findings: int) -> None:
        self.findings: list[Finding] = []
        self._max_findings = max_findings
        self._known: dict[object, Finding] = {}

    def race(self, op: Op, writes: bool, other: Op, other_writes: bool, clock: Clock, where: Where) -> None:
        """Report that `op` and `other` access the same bytes, and that `op`'s vector clock `clock` does not include
        `other`. The message names both operations in the order of submission, not of execution.
        """
        if other.seq < op.seq:
            earlier, later, known = other, op, f" (it knows of {other.stream} up to {clock.get(other.stream, 0)})"
            verbs = _verb(other_writes), _verb(writes)
        else:
            earlier, later, known = op, other, ""
            verbs = _verb(writes), _verb(other_writes)
        missing = f"nothing orders `{later.label}` after {earlier.stream}:{earlier.tick}{known}"
        if later.stream == HOST:
            missing = f"the host saw no fence that covers {earlier.stream}:{earlier.tick} done before `{later.label}`"
        message = f"{later} {verbs[1]} {_bytes(where)}, which {earlier} {verbs[0]}: {missing}"
        self._add("race", message, where, earlier, later, accesses=verbs)

    def unwritten(self, op: Op, shadow: Shadow, cell: Cell) -> None:
        """Report that `op` reads bytes that were not written since their id was handed out, or never."""
        where = (shadow.memory, cell.start, cell.stop)
        since = (
            "ever wrote"
            if cell.write is None
            else f"wrote since its id was taken: the last to write it was {cell.write}, before that"
        )
        message = f"{op} reads {_bytes(where)}, which no work {since} (declare a write of the host with host_touched)"
        self._add("unwritten", message, where, op, accesses=("reads",))

    def withdraw_unwritten(self, op: Op) -> None:
        """Take back that `op` read bytes that were not written, because it failed: its results are not used. Such a
        read is usual if the work before it failed, too, and therefore wrote nothing.
        """
        for key, finding in list(self._known.items()):
            if finding.kind == "unwritten" and finding.works == (op.position,):
                del self._known[key]
                self.findings.remove(finding)

    def undeclared(self, op: Op, access: Access) -> None:
        """Report that `op` made an access that it had not declared."""
        where = (access.memory, access.start, access.stop)
        verb = _verb(access.write)
        self._add("undeclared", f"{op} {verb} {_bytes(where)}, and has not declared it", where, op, accesses=(verb,))

    def beyond(self, op: Op, access: Access, size: int | None) -> None:
        """Report that `op` declared an access outside the bounds of a memory. `size` is the memory's size; None: no
        memory has this name.
        """
        where = (access.memory, access.start, access.stop)
        verb = _verb(access.write)
        why = f"of which there are {size} bytes" if size is not None else "and there is no such memory"
        self._add("beyond", f"{op} {verb} {_bytes(where)}, {why}", where, op, accesses=(verb,))

    def unleased(self, op: Op, pool: str, number: int, where: Where) -> None:
        """Report that `op` accesses an id that was free when `op` was submitted."""
        self._add(
            "unleased",
            f"{op} touches {_id(pool, number, where)}, which had no open lease when it was submitted",
            where,
            op,
        )

    def over_released(self, pool: Pool, number: int, site: Site) -> None:
        """Report the release of an id without an open lease."""
        where, end = pool.span(number), lease_op(f"release of {pool.name}", site)
        self._add("unleased", f"{end} released {_id(pool.name, number, where)}, which had no open lease", where, end)

    def taken_twice(self, pool: Pool, item: Item, lease: Lease, site: Site) -> None:
        """Report that a pool handed out an id for new contents while a lease of the id was open."""
        where, held = pool.span(item.number), lease_op(f"lease of {pool.name}", lease.site)
        again = lease_op(f"take from {pool.name}", site)
        self._add(
            "early_release",
            f"{again} gave out {_id(pool.name, item.number, where)}, which {held} still holds",
            where,
            held,
            again,
        )

    def early_release(self, pool: Pool, item: Item, use: Op, lease: Lease) -> None:
        """Report that `lease` ended while the host had not seen `use` done, and that no fence given with a release
        comes after `use`.
        """
        where, end = pool.span(item.number), lease_op(f"release of {pool.name}", lease.site)
        given = ", ".join(f"{fence.stream}:{fence.tick}" for fence in lease.after) or "none"
        story = f"{end} released {_id(pool.name, item.number, where)}, which {use} uses"
        missing = (
            f"the host had not seen {use.stream}:{use.tick} done, and no fence given with a release comes after it "
            f"(given: {given})"
        )
        self._add("early_release", f"{story}: {missing}", where, use, end)

    def early_publish(self, pool: Pool, item: Item, write: Op, publish: Op) -> None:
        """Report that an id became findable before the host observed that `write` was done."""
        where = pool.span(item.number)
        story = f"{publish} made {_id(pool.name, item.number, where)} findable"
        self._add(
            "early_publish",
            f"{story} before the host saw that {write}, which writes it, is done",
            where,
            write,
            publish,
        )

    def incomplete(self, pool: Pool, item: Item, byte: int, publish: Op) -> None:
        """Report that an id became findable although byte `byte` of its memory was not written."""
        where = pool.span(item.number)
        story = f"{publish} made {_id(pool.name, item.number, where)} findable"
        self._add("early_publish", f"{story}, but no work wrote {where[0]}[{byte}] since it was taken", where, publish)

    def failed_publish(self, pool: Pool, item: Item, write: Op, publish: Op) -> None:
        """Report that an id became findable although its write failed."""
        where = pool.span(item.number)
        story = f"{publish} made {_id(pool.name, item.number, where)} findable"
        self._add(
            "failed_publish", f"{story}, though {write}, which wrote it, failed: {write.failure}", where, write, publish
        )

    def published_write(self, op: Op, pool: str, item: Item, where: Where) -> None:
        """Report that `op` writes a findable id. If `op` was submitted before the publication, the kind is
        `early_publish`.
        """
        kind, when = ("published_write", "was") if op.seq > item.published else ("early_publish", "has become")
        self._add(
            kind,
            f"{op} writes {_id(pool, item.number, where)}, which {when} findable before it",
            where,
            op,
            accesses=("writes",),
        )

    def stall(self, op: Op, allowed: frozenset[str]) -> None:
        """Report that the host was blocked by `op`."""
        only = ", ".join(f'"{reason}"' for reason in sorted(allowed)) or "none"
        message = (
            f"the host waited for the reason {op}; allowed reasons: {only} "
            "(others: `Rules.waits` of explore, `allowed_waits` of Checker)"
        )
        self._add("stall", message, ("", 0, 0), op)

    def leak(self, pool: Pool, held: Sequence[Item]) -> Finding | None:
        """Report that ids of a pool are still leased at the end. Returns None if `max_findings` is reached."""
        lease = held[0].lease
        assert lease is not None
        numbers = ", ".join(str(item.number) for item in held[:_LISTED])
        more = f" and {len(held) - _LISTED} more" if len(held) > _LISTED else ""
        first = lease_op(f"lease of {pool.name}", lease.site)
        message = f"{len(held)} of {pool.name} still leased at the end: {numbers}{more}; the first since {first}"
        return self._add("leak", message, pool.span(held[0].number), first)

    def _add(self, kind: str, message: str, where: Where, *ops: Op, accesses: tuple[str, ...] = ()) -> Finding | None:
        key = (kind, where[0], *((op.site, op.label, op.stream) for op in ops))
        finding = self._known.get(key)
        if finding is None and len(self.findings) < self._max_findings:
            second = ops[1].place if len(ops) > 1 else ""
            streams, works = tuple(op.stream for op in ops), tuple(op.position for op in ops)
            finding = Finding(kind, message, ops[0].place, second, streams, works, accesses, *where)
            self._known[key] = finding
            self.findings.append(finding)
        return finding


def lease_op(label: str, site: Site) -> Op:
    """A host operation on a lease, to name it in a finding."""
    return Op(HOST, 0, 0, label, site, None)


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"


def _bytes(where: Where) -> str:
    return f"{where[0]}[{where[1]}:{where[2]}]"


def _id(pool: str, number: int, where: Where) -> str:
    return f"{pool} {number} ({_bytes(where)})"
