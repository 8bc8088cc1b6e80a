"""The index of a persistent tier (such as the disk): which KV blocks the tier holds, reads or writes, and which block
is evicted next.

The index holds keys, but no file or socket; it does no I/O and never blocks. Only the offload worker's thread changes
it. The engine thread calls only `in` and `stats`, which read one attribute each. All entries have the same size, so the
capacity is a number of entries.

    entry      one *write* of a key, identified by the key and the serial number of the write
    grant      the right to write an entry; `reserve` gives it
    pin        protection of an entry from eviction while it is read
    published  an entry that can be found under its key
    doomed     an entry that cannot be found any more but is not deleted from the medium yet
    fence      the end of a read or write on its stream, like a CUDA event
    victim     the entry that a grant's write deletes before it writes its own bytes

    absent ── reserve ──> writing ── publish ──> published ── evicted by reserve · forget · clear ──> doomed ──> absent
                             └───── abandon (a finished write leaves its entry doomed) ───────────────────┘

A pinned entry is never evicted. If a pinned entry is forgotten or cleared, it becomes doomed when its last pin is
released. Each grant has at most one victim: a doomed entry, or else an evicted entry. So no thread waits for a
deletion, and the medium never holds more than `max_entries` entries:

    published + writing + leaving (pinned, but not findable) + doomed  <=  max_entries

A deletion cannot delete the wrong bytes, because it names an entry, not only a key. A second write of the same key
makes another entry, so late deletions, reads in flight and new writes use different entries.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sidestream_kv.errors import InvariantError, TierFull
from sidestream_kv.kv.key_log import TierKeyLog
from sidestream_kv.kv.pins import Pins
from sidestream_kv.types import Access, Key, Tracer


@dataclass(frozen=True, slots=True)
class Entry:
    """One write of one key. `serial` increases with every write and is never reused while the tier is open."""

    key: Key
    serial: int


@dataclass(slots=True, eq=False)
class WriteGrant:
    """The right to write `entry`. `TierIndex.reserve` gives it, and either `publish` or `abandon` ends it.

    Until the write's fence is done, the tier's `write` owns `victim` and `written`; then the offload worker reads them.

    victim   the entry that `write` deletes before it writes; None if there was space, or after the deletion
    written  whether the complete entry is on the medium
    void     whether the key was dropped during the write: `publish` then abandons the grant. Only the offload worker
             uses it
    """

    entry: Entry
    victim: Entry | None
    written: bool = False
    void: bool = False


@dataclass(frozen=True, slots=True)
class TierStats:
    """The content of a tier, and counts since it was opened.

    entries, bytes   number of published entries, and the bytes that they take on the medium
    evictions        number of entries removed to make space
    corrupt          number of entries dropped because they were damaged or unreadable
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
    """Keeps `entries` on the medium until `release`, and never ends after a time (hazard H6 in docs/glossary.md).
    `entries` are in the order of the pinned keys.
    """

    __slots__ = ("_index", "_slots", "entries")

    def __init__(self, index: TierIndex, slots: tuple[_Slot, ...]) -> None:
        self._index = index
        self._slots = slots
        self.entries: tuple[Entry, ...] = tuple(slot.entry for slot in slots)

    def release(self) -> None:
        """End the lease, after the fence of its last read. Raises InvariantError if it has ended already."""
        slots, self._slots = self._slots, ()
        if not slots and self.entries:
            raise InvariantError("a read lease was released twice")
        self._index._unpin(slots)  # rule: read-ends-its-pins


class TierIndex:
    """Entries by key, least recently used first. A tracer (in tests) sees the tier as a memory with the tier's name,
    `name`.
    """

    def __init__(
        self,
        published: Iterable[Entry] = (),
        *,
        name: str,
        max_entries: int,
        entry_bytes: int,
        next_serial: int = 0,
        evictions: int = 0,
        corrupt: int = 0,
        tracer: Tracer | None = None,
    ) -> None:
        """
        published            entries that are on the medium already, least recently used first, at most `max_entries`
        next_serial          first serial to use, larger than every serial on the medium
        evictions, corrupt   initial values of these statistics
        tracer               records every grant, pin and key
        """
        self.name = name
        self.key_log: TierKeyLog | None = None
        """Log of every key that becomes findable or is removed; None: no log."""
        self.prefix_pins: Pins | None = None
        """The keys whose entries are evicted last; unlike a `pin`, they never prevent a write. None: there are none."""
        self.on_evict: tuple[Callable[[Sequence[Key]], None], ...] = ()
        """Called with the keys of evicted entries, on the offload worker's thread."""
        self._tracer = tracer
        self.max_entries = max_entries
        self._entry_bytes = entry_bytes
        self._next_serial = next_serial
        self._slots: dict[Key, _Slot] = {entry.key: _Slot(entry) for entry in published}
        self._idle: OrderedDict[Key, _Slot] = OrderedDict(self._slots)  # published and not pinned, next victim first
        self._writing: dict[Key, WriteGrant] = {}
        self._victims: dict[Key, Entry] = {}  # victims of the grants in _writing
        self._leaving = 0  # number of entries that are unreachable, but still pinned
        self._doomed: deque[Entry] = deque()
        self._evictions = evictions
        self._corrupt = corrupt
        if tracer is not None:
            tracer.backed(name, name, 1)
            for slot in self._slots.values():
                self._trace_found(tracer, slot.entry)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[Key]:
        """Published keys, in no particular order."""
        return iter(self._slots)

    @property
    def entries(self) -> Iterable[Entry]:
        """Published entries, in no particular order."""
        return (slot.entry for slot in self._slots.values())

    @property
    def next_serial(self) -> int:
        """The serial number of the next write."""
        return self._next_serial

    @property
    def traced(self) -> bool:
        """Whether a tracer records its grants, pins and keys."""
        return self._tracer is not None

    def access(self, entry: Entry, *, write: bool) -> Access:
        """The access to an entry, for a tracer. The tracer sees the tier as a memory, and the entry as one byte of
        it.
        """
        return Access(self.name, entry.serial, entry.serial + 1, write)

    def accesses(self, grant: WriteGrant) -> list[Access]:
        """The accesses of a write: it deletes the grant's victim and makes the grant's entry."""
        # rule: disk-write-declares-its-victim
        touched = [grant.entry] if grant.victim is None else [grant.entry, grant.victim]
        return [self.access(entry, write=True) for entry in touched]

    @property
    def stats(self) -> TierStats:
        """The current counts."""
        return TierStats(len(self._slots), len(self._slots) * self._entry_bytes, self._evictions, self._corrupt)

    def lookup(self, keys: Sequence[Key]) -> int:
        """Number of leading `keys` that are published, without a gap. Read-only: it neither pins entries nor changes
        their order (hazard H26).
        """
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark `keys` as just used, in reverse order; absent keys are skipped.

        The keys are those of a sequence's first blocks, in order. A block is useless without the blocks before it, so
        the last block must be evicted first.
        """
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def demote(self, keys: Sequence[Key]) -> None:
        """Let `keys` be evicted first. Absent keys and entries that are being read are skipped."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key, last=False)

    def pin(self, keys: Sequence[Key]) -> ReadLease:
        """Protect published `keys` from eviction until the lease is released. Only a pinned entry may be read.

        Raises InvariantError, and pins nothing, if a key is not published: call `lookup` first.
        """
        if self.lookup(keys) < len(keys):
            raise InvariantError(
                f"pin of {len(keys)} keys of the {self.name} tier, which holds only the first {self.lookup(keys)}: "
                f"look up first"
            )
        slots = tuple(self._slots[key] for key in keys)
        for slot in slots:
            slot.pins += 1
            self._idle.pop(slot.entry.key, None)  # rule: pinned-entry-is-not-evicted
        if self._tracer is not None:
            self._tracer.shared(self.name, [slot.entry.serial for slot in slots])
        return ReadLease(self, slots)

    def reserve(self, key: Key) -> WriteGrant | None:
        """The right to write `key`, with space for the entry. None if `key` is published or being written already.

        If there is no space, the least recently used entry that is not pinned is evicted at once, and the grant's write
        deletes it. Raises TierFull, and evicts nothing, if every entry is being read or written.
        """
        if key in self._slots or key in self._writing:  # rule: key-is-written-by-one-at-a-time
            return None
        grant = WriteGrant(Entry(key, self._next_serial), self._make_room())
        self._next_serial += 1  # rule: each-write-has-its-own-serial
        self._writing[key] = grant
        if grant.victim is not None:
            self._victims[key] = grant.victim
        if self._tracer is not None:
            self._tracer.took(self.name, [grant.entry.serial], ())
            if grant.victim is not None:
                self._tracer.shared(self.name, [grant.victim.serial])
        return grant

    def publish(self, grant: WriteGrant) -> None:
        """Make a written entry findable, as the most recently used entry. Call it after the fence of the write (H7).

        If the key was dropped during the write, the entry is dropped as well (H8). Raises InvariantError if the write
        did not succeed.
        """
        if not grant.written:  # rule: entry-was-written
            raise InvariantError(
                f"publish of {grant.entry.key.hex()} to the {self.name} tier before its write succeeded"
            )
        if grant.void:  # rule: write-from-before-a-reset-publishes-nothing
            self.abandon(grant)
            return
        if self._tracer is not None:
            self._tracer.published(self.name, grant.entry.serial, grant.entry.key)
        self._end(grant)
        self._slots[grant.entry.key] = self._idle[grant.entry.key] = _Slot(grant.entry)
        if self.key_log is not None:
            self.key_log.stored((grant.entry.key,))

    def abandon(self, grant: WriteGrant) -> None:
        """End a grant without a findable entry (H9), because its write failed, never ran, or is no longer needed.

        Call it only after the fence of the write, or if the write was never submitted.
        """
        self._end(grant)
        if grant.written:  # rule: abandoned-grant-leaves-no-file
            self._doomed.append(grant.entry)
        if grant.victim is not None:
            self._doomed.append(grant.victim)

    def forget(self, entry: Entry) -> None:
        """Drop an entry whose read failed, and count it as corrupt. Does nothing if the entry was dropped already, even
        if its key was written again.
        """
        slot = self._slots.get(entry.key)
        if slot is not None and slot.entry == entry:  # rule: newer-write-survives-a-failed-read-of-an-older
            self._corrupt += 1
            self._retire(slot)

    def clear(self) -> None:
        """Drop every entry: no key can be found afterwards, not even a key that is being written now (H8).

        Later writes delete the entries from the medium; `close` of the tier deletes those that remain. After kill -9,
        the next open finds them again. This is harmless, because their content still matches their keys.
        """
        if self.prefix_pins is not None:
            self.prefix_pins.clear()
        self.drop([*self._slots, *self._writing])

    def drop(self, keys: Iterable[Key]) -> None:
        """Drop the entries of these keys, as `clear` does for all keys: none of the keys can be found afterwards, not
        even a key that is being written now.
        """
        for key in keys:
            if (slot := self._slots.get(key)) is not None:
                self._retire(slot)  # rule: reset-drops-entries
            if (grant := self._writing.get(key)) is not None:
                grant.void = True  # rule: reset-reaches-writes-in-flight

    def keep_only(self, kept: Collection[Entry], *, of_others: Iterable[Entry], next_serial: int) -> None:
        """Drop all entries that are not in `kept`. Call it before the first grant or pin.

        of_others     entries of the same tier of other ranks. Those that are not kept become victims of later grants;
                      they may be absent from this rank's medium
        next_serial   first serial to use, larger than every serial on the medium of any rank
        """
        self._next_serial = next_serial
        own = set(self.entries)
        for entry in own.difference(kept):  # rule: only-entries-of-all-ranks-are-found
            self._retire(self._slots[entry.key])
        for entry in sorted(set(of_others).difference(own, kept), key=lambda entry: entry.serial):
            if self._tracer is not None:
                self._trace_found(self._tracer, entry)
                self._tracer.forgot(self.name, [entry.serial])
            self._doomed.append(entry)  # rule: entry-of-another-rank-only-is-deleted

    def take_doomed(self) -> list[Entry]:
        """Return and remove all doomed entries, which the owner deletes when it closes the tier."""
        doomed = list(self._doomed)
        self._doomed.clear()
        return doomed

    def _make_room(self) -> Entry | None:
        """The victim of the next grant; None if there is space without deleting an entry."""
        if self._doomed:  # rule: doomed-entries-are-deleted
            return self._doomed.popleft()
        if len(self._slots) + len(self._writing) + self._leaving < self.max_entries:
            return None
        if not self._idle:
            raise TierFull(
                f"all {self.max_entries} entries of the {self.name} tier ({self.max_entries * self._entry_bytes} "
                f"bytes) are being read or written: raise its capacity"
            )
        self._evictions += 1
        if self.prefix_pins is not None and self.prefix_pins.held:
            self.prefix_pins.pass_over(self._idle)
        key, slot = self._idle.popitem(last=False)  # rule: least-recently-used-entry-is-evicted-first
        del self._slots[key]
        if self._tracer is not None:
            self._tracer.forgot(self.name, [slot.entry.serial])
        if self.key_log is not None:
            self.key_log.removed((key,))
        for on_evict in self.on_evict:
            on_evict((key,))
        return slot.entry

    def _end(self, grant: WriteGrant) -> None:
        if self._writing.get(grant.entry.key) is not grant:
            raise InvariantError(f"grant of {grant.entry.key.hex()} in the {self.name} tier ended twice")
        del self._writing[grant.entry.key]  # rule: grant-ends
        victim = self._victims.pop(grant.entry.key, None)
        if self._tracer is not None:
            ended = [grant.entry] if victim is None else [grant.entry, victim]
            self._tracer.released(self.name, [entry.serial for entry in ended], ())

    def _retire(self, slot: _Slot) -> None:
        del self._slots[slot.entry.key]
        slot.retired = True  # rule: dropped-entry-is-marked
        if self._tracer is not None:
            self._tracer.forgot(self.name, [slot.entry.serial])
        if self.key_log is not None:
            self.key_log.removed((slot.entry.key,))
        if slot.pins:  # rule: pinned-entry-is-not-deleted-by-a-reset
            self._leaving += 1
        else:
            del self._idle[slot.entry.key]  # rule: idle-entry-leaves-the-idle-list
            self._doomed.append(slot.entry)

    def _trace_found(self, tracer: Tracer, entry: Entry) -> None:
        """Tell the tracer about an entry that an earlier process wrote."""
        tracer.took(self.name, [entry.serial], ())
        tracer.host_touched(lambda: [self.access(entry, write=True)], f"found on {self.name}")
        tracer.published(self.name, entry.serial, entry.key)
        tracer.released(self.name, [entry.serial], ())

    def _unpin(self, slots: tuple[_Slot, ...]) -> None:
        if self._tracer is not None:
            self._tracer.released(self.name, [slot.entry.serial for slot in slots], ())
        for slot in reversed(slots):  # reversed, so that the first key becomes the most recently used: see `touch`
            slot.pins -= 1  # rule: reader-ends-its-own-pin
            if slot.pins:  # rule: entry-is-idle-after-its-last-reader
                continue
            if slot.retired:  # rule: dropped-entry-stays-dropped
                self._leaving -= 1
                self._doomed.append(slot.entry)
            else:
                self._idle[slot.entry.key] = slot
