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
from itertools import starmap
from typing import NamedTuple

from sidestream_kv.errors import InvariantError, TierFull
from sidestream_kv.kv.key_log import TierKeyLog
from sidestream_kv.kv.pins import Pins
from sidestream_kv.types import Access, Key, Tracer

# Interval at which a tier looks for changes by other processes, and its least ratio to the time that a look takes.
_REFRESH_S = 0.2
_REFRESH_RATIO = 50


class Entry(NamedTuple):
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


class ReadLease:
    """Keeps `entries` on the medium until `release`, and never ends after a time (hazard H6 in docs/glossary.md).
    `entries` are in the order of the pinned keys.
    """

    __slots__ = ("_held", "_index", "entries")

    def __init__(self, index: TierIndex, entries: tuple[Entry, ...]) -> None:
        self._index = index
        self._held = entries
        self.entries = entries

    def release(self) -> None:
        """End the lease, after the fence of its last read. Raises InvariantError if it has ended already."""
        held, self._held = self._held, ()
        if not held and self.entries:
            raise InvariantError("a read lease was released twice")
        self._index._unpin(held)  # rule: read-ends-its-pins


class TierIndex:
    """Entries by key, least recently used first. A tracer (in tests) sees the tier as a memory with the tier's name,
    `name`.
    """

    def __init__(
        self,
        published: Iterable[tuple[Key, int]] = (),
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
        published            keys and serials of entries on the medium, least recently used first, at most `max_entries`
        next_serial          first serial to use, larger than every serial on the medium
        evictions, corrupt   initial values of these statistics
        tracer               records every grant, pin and key
        """
        self.name = name
        self.key_log: TierKeyLog | None = None
        """Log of every key that becomes findable or is removed; None: no log."""
        self.prefix_pins: Pins | None = None
        """The keys whose entries are evicted last; unlike a `pin`, they never prevent a write. None: there are none."""
        self.on_pin: Callable[[Entry], None] = _ignore
        """Called with an entry before its first reader, and `on_unpin` after its last one."""
        self.on_unpin: Callable[[Entry], None] = _ignore
        self.on_evict: tuple[Callable[[Sequence[Key]], None], ...] = ()
        """Called with the keys of evicted entries, on the offload worker's thread."""
        self.max_entries = max_entries
        self._entry_bytes = entry_bytes
        self._next_serial = next_serial
        # Published entries are in one of these, and in both while they go from one to the other.
        self._idle = OrderedDict(published)  # serials, next victim first; a million of `Entry` would take half a second
        self._reading: dict[Key, Entry] = {}  # pinned
        self._pins: dict[Entry, int] = {}  # number of readers, of entries that are being read
        self._writing: dict[Key, WriteGrant] = {}
        self._victims: dict[Key, Entry] = {}  # victims of the grants in _writing
        self._leaving = 0  # number of entries that are unreachable, but still pinned
        self._doomed: deque[Entry] = deque()
        self._evictions = evictions
        self._corrupt = corrupt
        self._trace = _Trace(tracer, name, starmap(Entry, self._idle.items()))

    def __len__(self) -> int:
        return len(self._idle) + len(self._reading)

    def __contains__(self, key: Key) -> bool:
        return key in self._idle or key in self._reading

    def __iter__(self) -> Iterator[Key]:  # in no particular order
        return iter((*self._idle, *self._reading))

    def get(self, key: Key) -> Entry | None:
        """The published entry of a key."""
        serial = self._idle.get(key)
        return self._reading.get(key) if serial is None else Entry(key, serial)

    @property
    def entries(self) -> Iterable[Entry]:
        """Published entries, in no particular order."""
        return (*starmap(Entry, self._idle.items()), *self._reading.values())

    @property
    def next_serial(self) -> int:
        """The serial number of the next write."""
        return self._next_serial

    @property
    def traced(self) -> bool:
        """Whether a tracer records its grants, pins and keys."""
        return self._trace.tracer is not None

    def access(self, entry: Entry, *, write: bool) -> Access:
        """The access to an entry, for a tracer: the entry is one byte of a memory with the tier's name."""
        return self._trace.access(entry, write=write)

    def accesses(self, grant: WriteGrant) -> list[Access]:
        """The accesses of a write: it deletes the grant's victim and makes the grant's entry."""
        # rule: disk-write-declares-its-victim
        touched = [grant.entry] if grant.victim is None else [grant.entry, grant.victim]
        return [self.access(entry, write=True) for entry in touched]

    @property
    def stats(self) -> TierStats:
        """The current counts."""
        return TierStats(len(self), len(self) * self._entry_bytes, self._evictions, self._corrupt)

    def lookup(self, keys: Sequence[Key]) -> int:
        """Number of leading `keys` that are published, without a gap. Read-only: it neither pins entries nor changes
        their order (hazard H26).
        """
        return next((count for count, key in enumerate(keys) if key not in self), len(keys))

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark `keys` as just used, in reverse order; absent keys are skipped. They are those of a sequence's first
        blocks, in order: a block is useless without the blocks before it, so the last one must be evicted first.
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
        if (held := self.lookup(keys)) < len(keys):
            raise InvariantError(
                f"pin of {len(keys)} keys of the {self.name} tier, which holds only the first {held}: look up first"
            )
        entries = tuple(entry for key in keys if (entry := self.get(key)) is not None)
        for entry in entries:
            if entry not in self._pins:
                self.on_pin(entry)
            self._pins[entry] = self._pins.get(entry, 0) + 1
            self._reading[entry.key] = entry
            self._idle.pop(entry.key, None)  # rule: pinned-entry-is-not-evicted
        self._trace.shared(entries)
        return ReadLease(self, entries)

    def reserve(self, key: Key) -> WriteGrant | None:
        """The right to write `key`, with space for the entry. None if `key` is published or being written already.
        If there is no space, the least recently used entry that is not pinned is evicted at once, and the grant's write
        deletes it. Raises TierFull, and evicts nothing, if every entry is being read or written.
        """
        if key in self or key in self._writing:  # rule: key-is-written-by-one-at-a-time
            return None
        grant = WriteGrant(Entry(key, self._next_serial), self._make_room())
        self._next_serial += 1  # rule: each-write-has-its-own-serial
        self._writing[key] = grant
        self._trace.took(grant.entry)
        if grant.victim is not None:
            self._victims[key] = grant.victim
            self._trace.shared([grant.victim])
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
        self._trace.published(grant.entry)
        self._end(grant)
        self._make_findable(grant.entry)

    def abandon(self, grant: WriteGrant) -> None:
        """End a grant without a findable entry (H9): its write failed, never ran, or is not needed any more. Call it
        only after the fence of the write, or if the write was never submitted.
        """
        self._end(grant)
        if grant.written:  # rule: abandoned-grant-leaves-no-file
            self._doomed.append(grant.entry)
        if grant.victim is not None:
            self._doomed.append(grant.victim)

    def forget(self, entry: Entry) -> None:
        """Drop an entry whose read failed, and count it as corrupt, unless it was dropped already."""
        if self.get(entry.key) == entry:  # rule: newer-write-survives-a-failed-read-of-an-older
            self._corrupt += 1
            self._retire(entry)

    def clear(self) -> None:
        """Drop every entry: no key can be found afterwards, not even a key that is being written now (H8).
        Later writes, and `close` of the tier, delete the entries from the medium. After kill -9, the next open finds
        them again, which is harmless: their content still matches their keys.
        """
        if self.prefix_pins is not None:
            self.prefix_pins.clear()
        self.drop([*self, *self._writing])

    def drop(self, keys: Iterable[Key]) -> None:
        """Drop the entries of these keys, as `clear` does for all keys."""
        for key in keys:
            if (entry := self.get(key)) is not None:
                self._retire(entry)  # rule: reset-drops-entries
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
            self._retire(entry)
        for entry in sorted(set(of_others).difference(own, kept), key=lambda entry: entry.serial):
            self._trace.found(entry)
            self._trace.forgot(entry)
            self._doomed.append(entry)  # rule: entry-of-another-rank-only-is-deleted

    def learn(self, entries: Iterable[Entry]) -> None:
        """Make entries findable that another process has written, each as the most recently used one. Keys that are
        published or being written here are skipped, and all entries beyond the capacity.
        """
        for entry in entries:
            if self._num_held >= self.max_entries:  # rule: learned-entries-stay-within-the-capacity
                return
            if entry.key in self or entry.key in self._writing:  # rule: own-write-of-a-key-is-kept
                continue
            self._trace.found(entry)
            self._make_findable(entry)

    def unlearn(self, entries: Iterable[Entry]) -> None:
        """Drop entries that another process has deleted. Only those that are read now are deleted again."""
        for entry in entries:
            if self.get(entry.key) == entry:
                self._retire(entry, on_medium=False)  # rule: vanished-entry-is-forgotten
            elif (grant := self._writing.get(entry.key)) is not None and grant.entry == entry:
                grant.void = True  # rule: entry-that-vanished-early-is-not-published

    def take_doomed(self) -> list[Entry]:
        """Return and remove all doomed entries, which the owner deletes when it closes the tier."""
        doomed, self._doomed = list(self._doomed), deque()
        return doomed

    @property
    def _num_held(self) -> int:
        return len(self) + len(self._writing) + self._leaving  # all that take space but doomed ones

    def _make_room(self) -> Entry | None:
        """The victim of the next grant; None if there is space without deleting an entry."""
        if self._doomed:  # rule: doomed-entries-are-deleted
            return self._doomed.popleft()
        if self._num_held < self.max_entries:
            return None
        if not self._idle:
            raise TierFull(
                f"all {self.max_entries} entries of the {self.name} tier ({self.max_entries * self._entry_bytes} "
                f"bytes) are being read or written: raise its capacity"
            )
        self._evictions += 1
        if self.prefix_pins is not None and self.prefix_pins.held:
            self.prefix_pins.pass_over(self._idle)
        entry = Entry(*self._idle.popitem(last=False))  # rule: least-recently-used-entry-is-evicted-first
        self._hide(entry)
        for on_evict in self.on_evict:
            on_evict((entry.key,))
        return entry

    def _end(self, grant: WriteGrant) -> None:
        if self._writing.get(grant.entry.key) is not grant:
            raise InvariantError(f"grant of {grant.entry.key.hex()} in the {self.name} tier ended twice")
        del self._writing[grant.entry.key]  # rule: grant-ends
        victim = self._victims.pop(grant.entry.key, None)
        self._trace.released([grant.entry] if victim is None else [grant.entry, victim])

    def _make_findable(self, entry: Entry) -> None:
        self._idle[entry.key] = entry.serial
        if self.key_log is not None:
            self.key_log.stored((entry.key,))

    def _hide(self, entry: Entry) -> None:
        self._trace.forgot(entry)
        if self.key_log is not None:
            self.key_log.removed((entry.key,))

    def _retire(self, entry: Entry, *, on_medium: bool = True) -> None:
        self._hide(entry)
        if entry in self._pins:  # rule: pinned-entry-is-not-deleted-by-a-reset
            del self._reading[entry.key]
            self._leaving += 1
            return
        del self._idle[entry.key]  # rule: idle-entry-leaves-the-idle-list
        if on_medium:
            self._doomed.append(entry)

    def _unpin(self, entries: tuple[Entry, ...]) -> None:
        self._trace.released(entries)
        for entry in reversed(entries):  # reversed, so that the first key becomes the most recently used: see `touch`
            self._pins[entry] -= 1  # rule: reader-ends-its-own-pin
            if self._pins[entry]:  # rule: entry-is-idle-after-its-last-reader
                continue
            del self._pins[entry]
            self.on_unpin(entry)
            if self._reading.get(entry.key) == entry:  # rule: dropped-entry-stays-dropped
                self._idle[entry.key] = entry.serial
                self._reading.pop(entry.key, None)
            else:
                self._leaving -= 1
                self._doomed.append(entry)


def is_leaving(index: TierIndex, entry: Entry) -> bool:
    """Whether an entry waits for its deletion, or is being deleted by a write. Looks at each of those that wait. True
    for entries that are being read, too: those that were not dropped are known, the others wait for their readers.
    """
    # rule: entry-that-leaves-is-not-found
    return entry in index._pins or entry in index._doomed or entry in index._victims.values()


class Refresh:
    """Calls a tier's method `refresh`, if it has one, from time to time. Used on the thread that owns the index."""

    def __init__(self, tier: object, clock: Callable[[], float]) -> None:
        self._refresh: Callable[[], None] | None = getattr(tier, "refresh", None)
        self._clock = clock
        self.due_s = float("inf") if self._refresh is None else clock()
        """The time of the next call."""

    def at_once(self) -> None:
        """Call `refresh` now, if the tier has it."""
        if self._refresh is not None:
            self.due_s = self._clock()
            self.poll()

    def poll(self) -> None:
        """Call `refresh`, if it is time."""
        start_s = self._clock()
        if self._refresh is None or start_s < self.due_s:
            return
        self._refresh()  # rule: entries-of-other-processes-are-found
        now_s = self._clock()
        self.due_s = now_s + max(_REFRESH_S, _REFRESH_RATIO * (now_s - start_s))


def _ignore(entry: Entry) -> None:
    """No one holds an entry for its readers."""


class _Trace:
    """Events of a tier's entries for a tracer; None: no tracer."""

    def __init__(self, tracer: Tracer | None, name: str, published: Iterable[Entry]) -> None:
        self.tracer = tracer
        self._name = name
        if tracer is not None:
            tracer.backed(name, name, 1)
            for entry in published:
                self.found(entry)

    def access(self, entry: Entry, *, write: bool) -> Access:
        return Access(self._name, entry.serial, entry.serial + 1, write)

    def took(self, entry: Entry) -> None:
        if self.tracer is not None:
            self.tracer.took(self._name, [entry.serial], ())

    def shared(self, entries: Sequence[Entry]) -> None:
        if self.tracer is not None:
            self.tracer.shared(self._name, [entry.serial for entry in entries])

    def released(self, entries: Sequence[Entry]) -> None:
        if self.tracer is not None:
            self.tracer.released(self._name, [entry.serial for entry in entries], ())

    def published(self, entry: Entry) -> None:
        if self.tracer is not None:
            self.tracer.published(self._name, entry.serial, entry.key)

    def forgot(self, entry: Entry) -> None:
        if self.tracer is not None:
            self.tracer.forgot(self._name, [entry.serial])

    def found(self, entry: Entry) -> None:
        """An entry that another process wrote, before or since this one opened the tier."""
        if self.tracer is not None:
            self.took(entry)
            self.tracer.host_touched(lambda: [self.access(entry, write=True)], f"found on {self._name}")
            self.published(entry)
            self.released([entry])
