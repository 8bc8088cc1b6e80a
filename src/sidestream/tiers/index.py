"""The ledger of a persistent tier: which blocks it holds, which are being read or written, and which goes next.

Knows keys, serials, pins and order; never a file or a socket. Called from the engine thread only; nothing here does I/O
or blocks. The entries are all of one size, so capacity is a number of entries.

    absent ── reserve ──> writing ── publish ──> published ── evicted by reserve · forget · clear ──> doomed ──> absent
                             └───── abandon (a finished write leaves its entry doomed) ───────────────────┘

A published entry that is pinned is never evicted; one that is forgotten or cleared while pinned becomes doomed at its
last release. Doomed entries are unreachable, but still lie on the medium until the write of a later grant deletes them:
each grant carries at most one victim, deleted before the grant's own bytes are written. So the medium never holds more
than

    published + writing + leaving (pinned, unreachable) + doomed  <=  max_entries

and the engine thread never waits for a deletion.

A deletion can not hit the wrong bytes: it names an Entry, which is one *write* of a key (key and serial), never the key
alone. Writing the same key again makes another entry, so late deletions, reads in flight and new writes never meet.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sidestream.errors import InvariantError, TierFull
from sidestream.types import Access, Key, Tracer

# Name of the medium as a memory and of its entries as a pool, for a tracer.
MEDIUM = "disk"


@dataclass(frozen=True, slots=True)
class Entry:
    """One write of one key; `serial` grows with every write and is never used twice while the tier is open."""

    key: Key
    serial: int

    def access(self, *, write: bool) -> Access:
        """The entry as something to touch: it stands for one byte of the memory `"disk"`."""
        return Access(MEDIUM, self.serial, self.serial + 1, write)


@dataclass(slots=True, eq=False)
class WriteGrant:
    """The right to write `entry`; from `TierIndex.reserve` until `publish` or `abandon`, exactly one of them.

    Between the two, the tier's `write` owns `victim` and `written`; the engine thread looks at them behind the write's
    fence.

    victim   deleted by `write` before it writes; None when there was room, or once deleted
    written  the entry lies complete on the medium
    void     the tier was cleared meanwhile: publishing abandons (engine thread)
    """

    entry: Entry
    victim: Entry | None
    written: bool = False
    void: bool = False

    def accesses(self) -> list[Access]:
        """What its write touches: it deletes the victim and makes the entry."""
        touched = [self.entry] if self.victim is None else [self.entry, self.victim]
        return [entry.access(write=True) for entry in touched]


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what happened to it since it was opened.

    entries, bytes   published entries, and what they take on the medium
    evictions        entries removed to make room
    corrupt          entries dropped because they were damaged or unreadable
    """

    entries: int
    bytes: int
    evictions: int
    corrupt: int


@dataclass(slots=True, eq=False)
class _Slot:
    entry: Entry
    pins: int = 0
    retired: bool = False


class ReadLease:
    """Keeps `entries` (in the order of the pinned keys) on the medium until `release`; never ends by time (H6)."""

    __slots__ = ("_index", "_slots", "entries")

    def __init__(self, index: TierIndex, slots: tuple[_Slot, ...]) -> None:
        self._index = index
        self._slots = slots
        self.entries: tuple[Entry, ...] = tuple(slot.entry for slot in slots)

    def release(self) -> None:
        """End the lease, behind the fence of its last read. Engine thread. Raises InvariantError the second time."""
        slots, self._slots = self._slots, ()
        if not slots and self.entries:
            raise InvariantError("a read lease was released twice")
        self._index._unpin(slots)


class TierIndex:
    """Entries by key, least recently used first. Single writer and reader: the engine thread."""

    def __init__(
        self,
        published: Iterable[Entry] = (),
        *,
        max_entries: int,
        entry_bytes: int,
        name: str = "tier",
        next_serial: int = 0,
        evictions: int = 0,
        corrupt: int = 0,
        tracer: Tracer | None = None,
    ) -> None:
        """`published` are the entries already on the medium, least recently used first, at most `max_entries`.

        `next_serial` exceeds every serial on the medium. `name` is for messages; the counts are where the statistics
        start. `tracer` is told of every grant, pin and key.
        """
        self._name = name
        self._tracer = tracer
        self._max_entries = max_entries
        self._entry_bytes = entry_bytes
        self._next_serial = next_serial
        self._slots: dict[Key, _Slot] = {entry.key: _Slot(entry) for entry in published}
        self._idle: OrderedDict[Key, _Slot] = OrderedDict(self._slots)  # published and not pinned, next victim first
        self._writing: dict[Key, WriteGrant] = {}
        self._victims: dict[Key, Entry] = {}  # of the grants in _writing that have one
        self._leaving = 0  # retired, but still pinned
        self._doomed: deque[Entry] = deque()
        self._evictions = evictions
        self._corrupt = corrupt
        if tracer is not None:
            tracer.backed(MEDIUM, MEDIUM, 1)
            for slot in self._slots.values():
                self._tell_found(tracer, slot.entry)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[Key]:
        """Published keys, in no particular order."""
        return iter(self._slots)

    @property
    def stats(self) -> TierStats:
        """Counts as of now."""
        return TierStats(len(self._slots), len(self._slots) * self._entry_bytes, self._evictions, self._corrupt)

    def lookup(self, keys: Sequence[Key]) -> int:
        """How many leading `keys` are published, without a gap. Read-only: no pin, no recency (H26)."""
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark `keys` (absent ones are skipped) as just used, the first one last.

        The keys are a run from the start of a prefix. A block is of no use without its predecessors, so eviction shall
        take a run from its end.
        """
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def pin(self, keys: Sequence[Key]) -> ReadLease:
        """Keep published `keys` from being evicted until the lease is released; only a pinned entry may be read.

        Raises InvariantError when a key is not published (nothing was pinned): `lookup` says how many are.
        """
        if self.lookup(keys) < len(keys):
            raise InvariantError(
                f"pin of {len(keys)} keys of the {self._name}, of which only {self.lookup(keys)} lead: look up first"
            )
        slots = tuple(self._slots[key] for key in keys)
        for slot in slots:
            slot.pins += 1
            self._idle.pop(slot.entry.key, None)
        if self._tracer is not None:
            self._tracer.shared(MEDIUM, [slot.entry.serial for slot in slots])
        return ReadLease(self, slots)

    def reserve(self, key: Key) -> WriteGrant | None:
        """The right to write `key`, with room for it; None when it is published or being written already.

        Room is made at once by evicting the least recently used entry that is not pinned; the grant's write deletes it.
        Raises TierFull when every entry is being read or written (nothing was evicted).
        """
        if key in self._slots or key in self._writing:
            return None
        grant = WriteGrant(Entry(key, self._next_serial), self._make_room())
        self._next_serial += 1
        self._writing[key] = grant
        if grant.victim is not None:
            self._victims[key] = grant.victim
        if self._tracer is not None:
            self._tracer.took(MEDIUM, [grant.entry.serial], ())
            if grant.victim is not None:
                self._tracer.shared(MEDIUM, [grant.victim.serial])
        return grant

    def publish(self, grant: WriteGrant) -> None:
        """Make a written entry visible, as the most recently used; behind the fence of its write (H7).

        After a `clear` it is dropped instead (H8). Raises InvariantError when the write did not succeed.
        """
        if not grant.written:
            raise InvariantError(f"publish of {grant.entry.key.hex()} to the {self._name} before its write succeeded")
        if grant.void:
            self.abandon(grant)
            return
        if self._tracer is not None:
            self._tracer.published(MEDIUM, grant.entry.serial, grant.entry.key)
        self._end(grant)
        self._slots[grant.entry.key] = self._idle[grant.entry.key] = _Slot(grant.entry)

    def abandon(self, grant: WriteGrant) -> None:
        """Give a grant back without an entry (H9): its write failed, never ran, or is not wanted any more.

        Never while the write may still run: behind its fence, or when it was never submitted.
        """
        self._end(grant)
        if grant.written:
            self._doomed.append(grant.entry)
        if grant.victim is not None:
            self._doomed.append(grant.victim)

    def forget(self, entry: Entry) -> None:
        """Drop an entry whose read failed, and count it as corrupt. Does nothing when it is gone or was written
        anew.
        """
        slot = self._slots.get(entry.key)
        if slot is not None and slot.entry == entry:
            self._corrupt += 1
            self._retire(slot)

    def clear(self) -> None:
        """Drop every entry; no key is reachable afterwards, not even those being written now (H8).

        The deletions happen with later writes and at the tier's close; entries not deleted by then (kill -9) come back
        with the next open. They hold what their keys say, so that is harmless.
        """
        self.drop([*self._slots, *self._writing])

    def drop(self, keys: Iterable[Key]) -> None:
        """Drop these entries; none of the keys is reachable afterwards, not even those being written now. The
        deletions: see `clear`.
        """
        for key in keys:
            if (slot := self._slots.get(key)) is not None:
                self._retire(slot)
            if (grant := self._writing.get(key)) is not None:
                grant.void = True

    def take_doomed(self) -> list[Entry]:
        """Hand over all doomed entries, for the owner to delete when it closes the tier."""
        doomed = list(self._doomed)
        self._doomed.clear()
        return doomed

    def _make_room(self) -> Entry | None:
        """The victim of one more entry, or None when there is room without one."""
        if self._doomed:
            return self._doomed.popleft()
        if len(self._slots) + len(self._writing) + self._leaving < self._max_entries:
            return None
        if not self._idle:
            raise TierFull(
                f"all {self._max_entries} entries of the {self._name} ({self._max_entries * self._entry_bytes} bytes) are being read or "
                f"written: raise its capacity"
            )
        self._evictions += 1
        key, slot = self._idle.popitem(last=False)
        del self._slots[key]
        if self._tracer is not None:
            self._tracer.forgot(MEDIUM, [slot.entry.serial])
        return slot.entry

    def _end(self, grant: WriteGrant) -> None:
        if self._writing.get(grant.entry.key) is not grant:
            raise InvariantError(f"grant of {grant.entry.key.hex()} in the {self._name} ended twice")
        del self._writing[grant.entry.key]
        victim = self._victims.pop(grant.entry.key, None)
        if self._tracer is not None:
            ended = [grant.entry] if victim is None else [grant.entry, victim]
            self._tracer.released(MEDIUM, [entry.serial for entry in ended], ())

    def _retire(self, slot: _Slot) -> None:
        del self._slots[slot.entry.key]
        slot.retired = True
        if self._tracer is not None:
            self._tracer.forgot(MEDIUM, [slot.entry.serial])
        if slot.pins:
            self._leaving += 1
        else:
            del self._idle[slot.entry.key]
            self._doomed.append(slot.entry)

    @staticmethod
    def _tell_found(tracer: Tracer, entry: Entry) -> None:
        """An entry that an earlier process wrote: its bytes are there."""
        tracer.took(MEDIUM, [entry.serial], ())
        tracer.host_touched(lambda: [entry.access(write=True)], "found on disk")
        tracer.published(MEDIUM, entry.serial, entry.key)
        tracer.released(MEDIUM, [entry.serial], ())

    def _unpin(self, slots: tuple[_Slot, ...]) -> None:
        if self._tracer is not None:
            self._tracer.released(MEDIUM, [slot.entry.serial for slot in slots], ())
        for slot in reversed(slots):  # the first key ends up as the most recently used: see touch
            slot.pins -= 1
            if slot.pins:
                continue
            if slot.retired:
                self._leaving -= 1
                self._doomed.append(slot.entry)
            else:
                self._idle[slot.entry.key] = slot
