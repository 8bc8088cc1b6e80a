"""Opens the directory of a disk tier: describes it, puts its records in order, and gives it its capacity. Called when
an engine starts, and when its directory was lost.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from sidestream_kv.errors import TierCorrupt
from sidestream_kv.offload.tiers.directory import (
    SEGMENT_PREFIX,
    TEMPORARY,
    Description,
    TierDirectory,
    open_regular,
)
from sidestream_kv.offload.tiers.slots import Geometry, Records, Segments, SlotLocks, Slots, SlotTable

# Serial numbers of one open of a directory.
_SERIAL_BITS = 32


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """An open directory.

    next_serial  larger than every serial number of earlier opens
    damaged      records that were removed because their check was wrong
    evictions    entries that were removed because the capacity was lowered
    shared       whether other processes use the directory
    """

    directory: TierDirectory
    table: SlotTable
    locks: SlotLocks
    segments: Segments
    next_serial: int
    damaged: int
    evictions: int
    shared: bool

    def close(self) -> None:
        """Close all files, and so end all leases. Idempotent."""
        self.segments.close()
        self.table.close()
        self.directory.close()


def identity_of(description: Description) -> bytes:
    """16 bytes that the headers of a tier's blocks have: they differ between models and layouts."""
    return xxhash.xxh3_128_digest(json.dumps(dict(description), sort_keys=True).encode())


def open_slots(path: Path, description: Description, geometry: Geometry) -> OpenSlots:
    """Open the directory at `path`, which is made and described first if it is missing or empty. If no other process
    uses it, it gets the number of slots of `geometry`; else it keeps its own.

    Raises ConfigError, and changes nothing, if `TierDirectory` refuses the directory. Raises OSError.
    """
    directory = TierDirectory.open(path)
    with directory.locked():
        directory.describe(description)
        try:
            table = SlotTable.open(directory)
        except TierCorrupt:
            table = None
        if table is None or table.geometry.block_bytes != geometry.block_bytes:
            table = SlotTable.create(directory, geometry)
        locks, damaged, evictions = SlotLocks(table.fd), 0, 0
        identity = identity_of(description)
        segments = Segments(directory, table.geometry, identity=identity, direct=False)
        if alone := locks.be_alone():
            table, damaged, evictions = _put_in_order(directory, table, segments, geometry.num_slots)
            locks = SlotLocks(table.fd)
        segments = Segments(directory, table.geometry, identity=identity, direct=True)
        locks.join()
        table.opens = opens = table.opens + 1  # rule: serials-go-on-after-a-restart
    return OpenSlots(directory, table, locks, segments, opens << _SERIAL_BITS, damaged, evictions, not alone)


def _put_in_order(
    directory: TierDirectory, table: SlotTable, segments: Segments, num_slots: int
) -> tuple[SlotTable, int, int]:
    """Remove records that are damaged, or older entries of a key, and give the table the wanted number of slots.
    Returns the table, and the numbers of damaged records and of evicted entries. No other process uses the directory.
    """
    records = table.records()
    used = np.flatnonzero(records.checks)
    is_valid = records.valid(used)
    kept = _latest(records, used[is_valid])
    surplus = max(0, len(kept) - num_slots)
    if surplus:
        kept = records.by_use(np.sort(kept))
    evicted, kept = kept[:surplus], kept[surplus:]
    is_kept = np.zeros(len(records.checks), np.bool_)
    is_kept[kept] = True
    for slot in used[~is_kept[used]].tolist():
        table.void(slot)
    if table.geometry.num_slots != num_slots:
        sources = kept[kept >= num_slots]
        targets = np.flatnonzero(~is_kept[:num_slots])[: len(sources)]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            segments.copy(source, target)
        stay = kept[kept < num_slots]
        table = table.resized(
            directory, num_slots, records, np.concatenate((stay, sources)), np.concatenate((stay, targets))
        )
    _trim(directory, table.geometry)
    return table, int(np.count_nonzero(~is_valid)), len(evicted)


def _latest(records: Records, slots: Slots) -> Slots:
    """The slots without those that hold an earlier write of a key."""
    words = np.sort(records.bodies["key"][slots, 0])
    if (words[1:] != words[:-1]).all():  # the usual case, and much faster than a dictionary of keys
        return slots
    slots = slots[np.argsort(records.bodies["serial"][slots])]  # rule: later-write-of-a-key-wins
    return np.array(list(dict(zip(records.keys(slots), slots.tolist(), strict=True)).values()), np.intp)


def _trim(directory: TierDirectory, geometry: Geometry) -> None:
    """Delete segments beyond the capacity, what is beyond it in the last one, and files that a killed process has not
    renamed. No other process uses the directory. Raises OSError.
    """
    for name in directory.own_names():
        if name.endswith(TEMPORARY):
            directory.remove(name)
        elif name.startswith(SEGMENT_PREFIX):
            num_bytes = geometry.segment_bytes(int(name.removeprefix(SEGMENT_PREFIX)))
            if not num_bytes:
                directory.remove(name)
            elif directory.size(name) > num_bytes:
                fd = open_regular(name, os.O_RDWR, dir_fd=directory.fd)
                try:
                    os.truncate(fd, num_bytes)
                finally:
                    os.close(fd)
