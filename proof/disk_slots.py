"""Looks at the slots of a disk tier's directory, and damages them, behind the tier's back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sidestream_kv.offload.tiers.directory import TierDirectory
from sidestream_kv.offload.tiers.slots import HEADER_BYTES, SlotLocks, SlotTable, segment_name
from sidestream_kv.types import Key


class DiskSlots:
    """The slots of the directory of a disk tier, which may be open.

    slots   slot of each entry with a valid record
    """

    def __init__(self, path: Path) -> None:
        """Reads the records, as they are now."""
        directory = TierDirectory.open(path)
        table = SlotTable.open(directory)
        assert table is not None
        self.table = table
        self._path = path
        records = table.records()
        slots = np.flatnonzero(records.checks)
        slots = slots[records.valid(slots)]
        self.slots = dict(zip(records.entries(slots), slots.tolist(), strict=True))

    def clear(self) -> None:
        """Make all records void, and let the next serial number be the first one."""
        for slot in self.slots.values():
            self.table.void(slot)
        self.table.opens = 0

    def slot_of(self, key: Key) -> int:
        """The slot of the only entry of a key."""
        (slot,) = (slot for entry, slot in self.slots.items() if entry.key == key)
        return slot

    def flip(self, key: Key, at: int = HEADER_BYTES) -> None:
        """Flip a bit of a byte of the key's slot, by default of the block's first one."""
        slot = self.slot_of(key)
        content = self.bytes_of(slot)
        content[at] ^= 1
        self.fill(slot, content)

    def bytes_of(self, slot: int) -> bytearray:
        """The content of a slot."""
        path, at, num_bytes = self.place(slot)
        with path.open("rb") as file:
            file.seek(at)
            return bytearray(file.read(num_bytes))

    def fill(self, slot: int, content: bytearray) -> None:
        """Overwrite a slot."""
        path, at, _ = self.place(slot)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    def place(self, slot: int) -> tuple[Path, int, int]:
        """The slot's file, its position in it, and its bytes."""
        geometry = self.table.geometry
        segment, number = divmod(slot, geometry.slots_per_segment)
        return self._path / segment_name(segment), number * geometry.slot_bytes, geometry.slot_bytes

    @property
    def in_use(self) -> bool:
        """Whether a tier has the directory open."""
        return SlotLocks(self.table.fd).in_use
